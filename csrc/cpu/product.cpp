// Blocks of `kSteps` of the inner dimension: the right side is packed into panels once, shared by
// all threads; each thread packs its own rows of the left side and multiplies tile by tile.

#include <algorithm>
#include <type_traits>
#include <utility>

#include "cpu/ghost_tiles.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/product_bfloat.h"

namespace dpkern::cpu {
namespace {

using namespace ghost;

struct ProductShape {
  std::int64_t rows;
  std::int64_t inner;  // what is summed over
  std::int64_t columns;
  bool transposed;  // w is stored [columns, inner] instead of [inner, columns]
};

constexpr std::int64_t kSteps = 256;         // entries of the inner dimension at a time
constexpr std::int64_t kSmallest = 1 << 20;  // multiplications worth a thread
constexpr std::int64_t kTogether = 4;        // left panels that meet a right panel in the cache
constexpr std::int64_t kGrain = 24;          // rows: whole left panels of every width
constexpr std::int64_t kUnit = 32;           // columns: whole right panels of every width

// Lanes of c and d by the bit `kStep` of their number: halves change places.
template <int kStep, class V, int... l>
DPK_INLINE inline void exchange(V& c, V& d, std::integer_sequence<int, l...>) {
  constexpr int kLanes = sizeof...(l);
  const V low = __builtin_shufflevector(c, d, ((l & kStep) == 0 ? l : kLanes + l - kStep)...);
  d = __builtin_shufflevector(c, d, ((l & kStep) == 0 ? l + kStep : kLanes + l)...);
  c = low;
}

// kLanes vectors of kLanes lanes: rows become columns.
template <class V, int kLanes, int kStep = kLanes / 2>
DPK_INLINE inline void transpose(V* x) {
  if constexpr (kStep > 0) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      if ((i & kStep) != 0) continue;
      exchange<kStep>(x[i], x[i + kStep], std::make_integer_sequence<int, kLanes>{});
    }
    transpose<V, kLanes, kStep / 2>(x);
  }
}

// `used` rows of [*, stride] -> a panel [steps, kWidth] with a column for each row, zeros for those
// missing. Writes up to kLanes numbers past the panel's end.
template <int kWidth, int kLanes, class F>
DPK_INLINE inline void pack_rows(const F* from, std::int64_t used, std::int64_t steps,
                                 std::int64_t stride, F* to) {
  using V = Vector<F, kLanes>;
  constexpr int kGroups = (kWidth + kLanes - 1) / kLanes;
  // From the last group on: what a group writes past its row is overwritten by the first one.
  for (int first = (kGroups - 1) * kLanes; first >= 0; first -= kLanes) {
    for (std::int64_t t = 0; t < steps; t += kLanes) {
      const std::int64_t count = std::min<std::int64_t>(kLanes, steps - t);
      V x[kLanes];
#pragma GCC unroll 16
      for (int r = 0; r < kLanes; ++r) {
        x[r] = V{};
        if (first + r >= used) continue;
        const F* const row = from + (first + r) * stride + t;
        if (count == kLanes) {
          x[r] = load<V>(row);
        } else {
          F part[kLanes] = {};
          std::copy(row, row + count, part);
          x[r] = load<V>(part);
        }
      }
      transpose<V, kLanes>(x);
      for (std::int64_t k = 0; k < count; ++k) {
        __builtin_memcpy(to + (t + k) * kWidth + first, &x[k], sizeof(V));
      }
    }
  }
}

// One block of the inner dimension, [rows, steps] times [steps, columns].
template <class F, int kBytes>
struct Block {
  using T = Tile<F, kBytes>;
  static constexpr std::int64_t kLeft = T::kRows * kSteps + T::kLanes;  // of one left panel

  const ProductShape& shape;
  Range steps;

  DPK_INLINE std::int64_t count() const { return steps.end - steps.begin; }

  // Columns from a multiple of kUnit on, as panels behind each other.
  DPK_INLINE void pack_right(const F* w, Range columns, F* to) const {
    for (std::int64_t c = columns.begin; c < columns.end; c += T::kColumns) {
      const std::int64_t wide = std::min<std::int64_t>(T::kColumns, columns.end - c);
      F* const panel = to + c * count();
      if (shape.transposed) {
        pack_rows<T::kColumns, T::kLanes>(w + c * shape.inner + steps.begin, wide, count(),
                                          shape.inner, panel);
      } else {
        pack_panels<T::kColumns>(w + steps.begin * shape.columns + c, count(), wide, shape.columns,
                                 F{1}, panel, 0);
      }
    }
  }

  // out[rows] = bias + the product, or += it from the second block on.
  DPK_INLINE void multiply(const F* x, const F* right, const F* bias, Range rows, F* out) const {
    F* const left = scratch<F, 5>(kTogether * kLeft);
    for (std::int64_t first = rows.begin; first < rows.end; first += kTogether * T::kRows) {
      const std::int64_t end = std::min<std::int64_t>(rows.end, first + kTogether * T::kRows);
      for (std::int64_t row = first; row < end; row += T::kRows) {
        pack_rows<T::kRows, T::kLanes>(x + row * shape.inner + steps.begin,
                                       std::min<std::int64_t>(T::kRows, end - row), count(),
                                       shape.inner, left + (row - first) / T::kRows * kLeft);
      }
      for (std::int64_t column = 0; column < shape.columns; column += T::kColumns) {
        for (std::int64_t row = first; row < end; row += T::kRows) {
          T tile;
          tile.multiply(left + (row - first) / T::kRows * kLeft, right + column * count(), count());
          write(tile, bias, {row, std::min<std::int64_t>(end, row + T::kRows)}, column, out);
        }
      }
    }
  }

 private:
  DPK_INLINE void write(const T& tile, const F* bias, Range rows, std::int64_t column,
                        F* out) const {
    const std::int64_t wide = std::min<std::int64_t>(T::kColumns, shape.columns - column);
    const bool fresh = steps.begin == 0;
    F start[T::kColumns] = {};
    if (fresh && bias != nullptr) std::copy(bias + column, bias + column + wide, start);
    for (std::int64_t row = rows.begin; row < rows.end; ++row) {
      F sums[T::kColumns];
      __builtin_memcpy(sums, tile.at[row - rows.begin], sizeof(sums));
      F* const to = out + row * shape.columns + column;
      const F* const before = fresh ? start : to;
      if (wide == T::kColumns) {
        for (int c = 0; c < T::kColumns; ++c) to[c] = before[c] + sums[c];
      } else {
        for (std::int64_t c = 0; c < wide; ++c) to[c] = before[c] + sums[c];
      }
    }
  }
};

template <class F>
void matmul_by_vectors(const Matmul<F>& call, int threads) {
  const ProductShape shape{call.N, call.K, call.M, call.w_transposed};
  const std::int64_t work = shape.rows * shape.inner * shape.columns;
  const int team = useful_threads(work, kSmallest, threads);
  const std::int64_t units = (shape.columns + kUnit - 1) / kUnit;
  F* const panels = scratch<F, 6>(units * kUnit * std::min(kSteps, shape.inner));
  // Without inner dimension a single round writes the bias.
  for (std::int64_t t = 0; t == 0 || t < shape.inner; t += kSteps) {
    const Range steps{t, std::min(shape.inner, t + kSteps)};
    parallel_for(units, 1, team, [&](std::int64_t begin, std::int64_t end) {
      const Range columns{begin * kUnit, std::min(shape.columns, end * kUnit)};
      versioned_by_width([&](auto width) DPK_INLINE {
        const Block<F, decltype(width)::value> block{shape, steps};
        block.pack_right(call.w, columns, panels);
      });
    });
    parallel_for(shape.rows, kGrain, team, [&](std::int64_t begin, std::int64_t end) {
      versioned_by_width([&](auto width) DPK_INLINE {
        const Block<F, decltype(width)::value> block{shape, steps};
        block.multiply(call.x, panels, call.bias, {begin, end}, call.out);
      });
    });
  }
}

}  // namespace

// out [N, M] = x [N, K] w + bias [M]; a null bias is none.
template <class F>
void matmul(const Matmul<F>& call, int threads) {
  if constexpr (std::is_same_v<F, float>) {
    if (by_bfloat(call)) return matmul_by_bfloat(call, threads, matmul_by_vectors<float>);
  }
  matmul_by_vectors(call, threads);
}

template void matmul<float>(const Matmul<float>&, int);
template void matmul<double>(const Matmul<double>&, int);

}  // namespace dpkern::cpu
