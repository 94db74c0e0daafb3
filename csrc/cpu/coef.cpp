#include "cpu/coef.h"

#include <algorithm>

#include "cpu/coef_noise.h"
#include "cpu/isa.h"
#include "cpu/parallel.h"

namespace dpkern::cpu {
namespace {

constexpr std::int64_t kGrain = 16 * kTile;  // coefficients worth a thread

// The coefficients of a run, without noise and with it.
template <class T>
struct Plain {
  CoefForm form;

  DPK_INLINE T a1(T x, int) const { return linear_coefficient(x); }
  DPK_INLINE T a2(T x, int) const { return quadratic_coefficient(x, form); }
};

template <class T, class Bits>
struct Noised {
  using Part = NoiseWindow::Part<Bits>;
  CoefForm form;
  Lattice<T> lattice;
  Part linear;
  Part quadratic;

  DPK_INLINE T a1(T x, int i) const { return noised(linear_coefficient(x), linear, i); }
  DPK_INLINE T a2(T x, int i) const { return noised(quadratic_coefficient(x, form), quadratic, i); }
  DPK_INLINE T noised(T value, const Part& part, int i) const {
    const std::uint32_t bits = static_cast<std::make_unsigned_t<Bits>>(part.rounding[i]);
    return noised_coefficient(value, lattice.per_unit, lattice.cell, bits, part.draws[i]);
  }
};

// A run of coefficients: `count` from `index` on, of one row if rows matter.
struct Run {
  std::int64_t index;
  std::int64_t row;
  int count;
};

// body(run, its coefficients) for the coefficients [begin, end), at most a tile at a time.
template <class T, class F>
void for_runs(CoefForm form, const CoefNoise& noise, std::int64_t columns, bool by_row,
              std::int64_t begin, std::int64_t end, const F& body) {
  NoiseWindow linear(noise), quadratic(noise);
  std::int64_t row = by_row ? begin / std::max<std::int64_t>(1, columns) : 0;
  Lattice<T> lattice(noise.scales == nullptr ? noise.scale : noise.scale_of(row));
  for (std::int64_t index = begin; index < end;) {
    const auto at = static_cast<std::uint64_t>(index);
    const int offset = static_cast<int>((noise.linear + at) % kTile);
    std::int64_t count = std::min<std::int64_t>(kTile - offset, end - index);
    if (by_row) count = std::min(count, (row + 1) * columns - index);
    const Run run{index, row, static_cast<int>(count)};
    const auto noised = [&](auto bits) {
      using Bits = decltype(bits);
      return Noised<T, Bits>{form, lattice, linear.at<Bits>(noise.linear + at, run.count),
                             quadratic.at<Bits>(noise.quadratic + at, run.count)};
    };
    if (!noise.on) {
      body(run, Plain<T>{form});
    } else if (noise.ahead.rounding != nullptr) {
      body(run, noised(std::int16_t{}));
    } else {
      body(run, noised(std::uint32_t{}));
    }
    index += count;
    if (by_row && index == (row + 1) * columns && index < end) {
      ++row;
      if (noise.scales != nullptr) lattice = Lattice<T>(noise.scale_of(row));
    }
  }
}

// Slopes of a run, and its terms in their lanes; `column`: of the run's first coefficient.
template <class T, class Coefficients>
void evaluate(const Coefficients& coefficients, std::int64_t column, int count, const T* z,
              const T* targets, const T* shift, double* lanes, T* dz) {
  alignas(64) double terms[kTile];
  alignas(64) T first[kTile], second[kTile];
  versioned([&]() DPK_INLINE {
    // Copies: stores through `dz` could change the originals.
    const Coefficients own = coefficients;
    const T* x = targets;
    const T* logits = z;
    T* slopes = dz;
    const T moved = shift != nullptr ? *shift : T{0};
    const bool shifted = shift != nullptr;
    const int n = count;
    for (int i = 0; i < n; ++i) {
      first[i] = own.a1(x[i], i);
      second[i] = own.a2(x[i], i);
    }
    for (int i = 0; i < n; ++i) {
      const T a1 = first[i], a2 = second[i], w = shifted ? logits[i] + moved : logits[i];
      slopes[i] = quadratic_slope(a1, a2, w);
      terms[i] =
          quadratic_term(static_cast<double>(a1), static_cast<double>(a2), static_cast<double>(w));
    }
    const int lane = static_cast<int>(column % kLossLanes);
    const int head = std::min(n, (kLossLanes - lane) % kLossLanes);  // up to lane 0
    for (int i = 0; i < head; ++i) lanes[lane + i] += terms[i];
    int i = head;
    for (; i + kLossLanes <= n; i += kLossLanes) {
      for (int l = 0; l < kLossLanes; ++l) lanes[l] += terms[i + l];
    }
    for (int l = 0; i < n; ++i, ++l) lanes[l] += terms[i];
  });
}

}  // namespace

template <class T>
void perturb(CoefForm form, const CoefNoise& noise, std::int64_t rows, std::int64_t columns,
             const T* targets, T* linear, T* quadratic, int threads) {
  const bool by_row = noise.scales != nullptr;
  parallel_for(rows * columns, kGrain, threads, [&](std::int64_t begin, std::int64_t end) {
    for_runs<T>(form, noise, columns, by_row, begin, end, [&](const Run& run, const auto& made) {
      versioned([&]() DPK_INLINE {
        const auto own = made;  // copies: stores through the outputs could change the originals
        const int count = run.count;
        const T* x = targets + run.index;
        T* a1 = linear + run.index;
        T* a2 = quadratic + run.index;
        for (int i = 0; i < count; ++i) {
          a1[i] = own.a1(x[i], i);
          a2[i] = own.a2(x[i], i);
        }
      });
    });
  });
}

template <class T>
void quadratic_loss(CoefForm form, const CoefNoise& noise, std::int64_t rows, std::int64_t columns,
                    const T* z, const T* targets, const T* shift, double* loss, T* dz,
                    int threads) {
  std::fill(loss, loss + rows, 0.0);
  if (columns == 0) return;
  const std::int64_t grain = std::max<std::int64_t>(1, kGrain / columns);
  parallel_for(rows, grain, threads, [&](std::int64_t first, std::int64_t last) {
    alignas(64) double lanes[kLossLanes] = {};
    const auto add = [&](const Run& run, const auto& made) {
      const std::int64_t column = run.index - run.row * columns;
      evaluate(made, column, run.count, z + run.index, targets + run.index,
               shift == nullptr ? nullptr : shift + run.row, lanes, dz + run.index);
      if (column + run.count < columns) return;
      loss[run.row] = sum_of_lanes(lanes);
      std::fill(lanes, lanes + kLossLanes, 0.0);
    };
    for_runs<T>(form, noise, columns, true, first * columns, last * columns, add);
  });
}

template void perturb(CoefForm, const CoefNoise&, std::int64_t, std::int64_t, const float*, float*,
                      float*, int);
template void perturb(CoefForm, const CoefNoise&, std::int64_t, std::int64_t, const double*,
                      double*, double*, int);
template void quadratic_loss(CoefForm, const CoefNoise&, std::int64_t, std::int64_t, const float*,
                             const float*, const float*, double*, float*, int);
template void quadratic_loss(CoefForm, const CoefNoise&, std::int64_t, std::int64_t, const double*,
                             const double*, const double*, double*, double*, int);

}  // namespace dpkern::cpu
