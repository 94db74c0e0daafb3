// Coefficients of polynomial losses, written with their noise or evaluated with it in registers.

#include <algorithm>

#include "cpu/coef_noise.h"
#include "cpu/isa.h"
#include "cpu/nontemporal.h"
#include "cpu/ops.h"
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

// body(run, its coefficients) for the coefficients [begin, end), at most a tile at a time. Runs
// begin at multiples of a tile's size in their row, or in all, wherever the noise's tiles do: so
// that lanes of a sum and lines of memory stay whole.
template <class T, class F>
void for_runs(CoefForm form, const CoefNoise& noise, std::int64_t rows, std::int64_t columns,
              bool by_row, std::int64_t begin, std::int64_t end, const F& body) {
  NoiseWindow linear(noise), quadratic(noise);
  const std::uint64_t behind = quadratic_position(noise, rows * columns);
  const std::int64_t row_size = by_row ? std::max<std::int64_t>(1, columns) : end;
  for (std::int64_t row = begin / row_size; row * row_size < end; ++row) {
    const std::int64_t first = row * row_size, last = std::min(end, first + row_size);
    const Lattice<T> lattice(noise.on ? scale_of(noise, row) : 1.0);
    for (std::int64_t index = std::max(begin, first); index < last;) {
      const auto at = static_cast<std::uint64_t>(index);
      const std::int64_t cut = index + kTile - (index - first) % kTile;
      const Run run{index, row, static_cast<int>(std::min(last, cut) - index)};
      const auto noised = [&](auto bits) {
        using Bits = decltype(bits);
        return Noised<T, Bits>{form, lattice, linear.at<Bits>(noise.linear + at, run.count),
                               quadratic.at<Bits>(behind + at, run.count)};
      };
      if (!noise.on) {
        body(run, Plain<T>{form});
      } else if (noise.draws.rounding != nullptr) {
        body(run, noised(std::int16_t{}));
      } else {
        body(run, noised(std::uint32_t{}));
      }
      index += run.count;
    }
  }
}

// Nonzero for numbers outside [0, 1], and for NaN.
template <class T>
DPK_INLINE inline int outside(T x) {
  return x >= T{0} && x <= T{1} ? 0 : 1;
}

// Coefficients of a run; nonzero if a target lies outside.
template <class T, class Coefficients>
int make(const Coefficients& coefficients, int count, const T* targets, T* linear, T* quadratic) {
  int found = 0;
  versioned([&]() DPK_INLINE {
    // Copies: stores through the outputs could change the originals.
    const Coefficients own = coefficients;
    const int n = count;
    const T* x = targets;
    T *a1 = linear, *a2 = quadratic;
    int bad = 0;
    for (int i = 0; i < n; ++i) {
      bad |= outside(x[i]);
      a1[i] = own.a1(x[i], i);
      a2[i] = own.a2(x[i], i);
    }
    found = bad;
  });
  return found;
}

// N numbers from an address that need not be a vector's.
template <class T, int N>
DPK_INLINE inline Vector<T, N> loaded(const T* from) {
  Vector<T, N> x;
  __builtin_memcpy(&x, from, sizeof x);
  return x;
}

// The same in double: a loop, because GCC converts a vector by halves.
template <int N, class T>
DPK_INLINE inline Vector<double, N> widened(const Vector<T, N>& from) {
  T narrow[N];
  double wide[N];
  __builtin_memcpy(narrow, &from, sizeof from);
  for (int i = 0; i < N; ++i) wide[i] = static_cast<double>(narrow[i]);
  return loaded<double, N>(wide);
}

// Slopes of a run that begins at lane 0, and its terms in their lanes; nonzero if a target lies
// outside.
template <class T, class Coefficients>
int evaluate(const Coefficients& coefficients, int count, const T* z, const T* targets,
             const T* shift, double* lanes, T* dz) {
  alignas(64) T first[kTile], second[kTile];
  const int found = make(coefficients, count, targets, first, second);
  versioned_by_width([&](auto bytes) DPK_INLINE {
    constexpr int kWide = decltype(bytes)::value / static_cast<int>(sizeof(double));
    constexpr int kVectors = kLossLanes / kWide;
    using Wide = Vector<double, kWide>;
    const T *const logits = z, *const linear = first, *const quadratic = second;
    T* const slopes = dz;
    const T moved = shift != nullptr ? *shift : T{0};
    const bool shifted = shift != nullptr;
    const int n = count;
    Wide sums[kVectors];
    for (int v = 0; v < kVectors; ++v) sums[v] = loaded<double, kWide>(lanes + v * kWide);
    int i = 0;
    for (; i + kLossLanes <= n; i += kLossLanes) {
      for (int v = 0; v < kVectors; ++v) {
        const int at = i + v * kWide;
        const auto a1 = loaded<T, kWide>(linear + at), a2 = loaded<T, kWide>(quadratic + at);
        auto w = loaded<T, kWide>(logits + at);
        if (shifted) w = w + moved;
        const auto slope = quadratic_slope(a1, a2, w);
        __builtin_memcpy(slopes + at, &slope, sizeof slope);
        sums[v] +=
            quadratic_term(widened<kWide, T>(a1), widened<kWide, T>(a2), widened<kWide, T>(w));
      }
    }
    for (int v = 0; v < kVectors; ++v) __builtin_memcpy(lanes + v * kWide, &sums[v], sizeof(Wide));
    for (int l = 0; i < n; ++i, ++l) {
      const T a1 = linear[i], a2 = quadratic[i], w = shifted ? logits[i] + moved : logits[i];
      slopes[i] = quadratic_slope(a1, a2, w);
      lanes[l] +=
          quadratic_term(static_cast<double>(a1), static_cast<double>(a2), static_cast<double>(w));
    }
  });
  return found;
}

}  // namespace

// Coefficients of the targets. Returns 1 if there is noise and a target outside [0, 1]: then
// nothing that was written may be released.
template <class T>
std::int64_t perturb(const Perturb<T>& call, int threads) {
  const CoefNoise& noise = call.noise;
  const std::int64_t count = call.B * call.D;
  const bool by_row = noise.scales != nullptr;
  const bool streamed = noise.draws.rounding != nullptr && count >= kNonTemporalMin;
  int found = 0;
  parallel_for(count, kGrain, threads, [&](std::int64_t begin, std::int64_t end) {
    int bad = 0;
    alignas(64) T first[kTile], second[kTile];
    const auto add = [&](const Run& run, const auto& made) {
      const T* x = call.targets + run.index;
      T *const linear = call.linear + run.index, *const quadratic = call.quadratic + run.index;
      if (!streamed) {
        bad |= make(made, run.count, x, linear, quadratic);
        return;
      }
      bad |= make(made, run.count, x, first, second);
      nontemporal_copy(first, run.count, linear);
      nontemporal_copy(second, run.count, quadratic);
    };
    for_runs<T>(call.form, noise, call.B, call.D, by_row, begin, end, add);
    if (streamed) nontemporal_fence();
    __atomic_fetch_or(&found, bad, __ATOMIC_RELAXED);
  });
  return noise.on && found != 0 ? 1 : 0;
}

// loss[row] = sum of w (a1 + a2 w), dz = a1 + 2 a2 w, with w = z + shift[row]; shift null: z.
// Returns what `perturb` does.
template <class T>
std::int64_t quadratic(const Quadratic<T>& call, int threads) {
  const CoefNoise& noise = call.noise;
  std::fill_n(call.loss, call.B, 0.0);
  if (call.D == 0) return 0;
  const std::int64_t grain = std::max<std::int64_t>(1, kGrain / call.D);
  const bool streamed = noise.draws.rounding != nullptr && call.B * call.D >= kNonTemporalMin;
  int found = 0;
  parallel_for(call.B, grain, threads, [&](std::int64_t first, std::int64_t last) {
    int bad = 0;
    alignas(64) double lanes[kLossLanes] = {};
    alignas(64) T slopes[kTile];
    const auto add = [&](const Run& run, const auto& made) {
      T* const to = call.dz + run.index;
      const T* const shift = call.shift == nullptr ? nullptr : call.shift + run.row;
      bad |= evaluate(made, run.count, call.z + run.index, call.targets + run.index, shift, lanes,
                      streamed ? slopes : to);
      if (streamed) nontemporal_copy(slopes, run.count, to);
      if (run.index + run.count < (run.row + 1) * call.D) return;
      call.loss[run.row] = sum_of_lanes(lanes);
      std::fill(lanes, lanes + kLossLanes, 0.0);
    };
    for_runs<T>(call.form, noise, call.B, call.D, true, first * call.D, last * call.D, add);
    if (streamed) nontemporal_fence();
    __atomic_fetch_or(&found, bad, __ATOMIC_RELAXED);
  });
  return noise.on && found != 0 ? 1 : 0;
}

template std::int64_t perturb(const Perturb<float>&, int);
template std::int64_t perturb(const Perturb<double>&, int);
template std::int64_t quadratic(const Quadratic<float>&, int);
template std::int64_t quadratic(const Quadratic<double>&, int);

}  // namespace dpkern::cpu
