// Equal blocks of the inner dimension: the right side is packed into panels once. Threads take rows
// and share the panels, or columns where there are more of them; they multiply tile by tile.

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

// Rows that a thread takes at a time: two tiles of every width.
std::int64_t grain() { return isa() >= Isa::kAvx512 ? 24 : 12; }

struct ProductShape {
  std::int64_t rows;
  std::int64_t inner;  // what is summed over
  std::int64_t columns;
  bool transposed;  // w is stored [columns, inner] instead of [inner, columns]
};

constexpr std::int64_t kSteps = 256;         // most entries of the inner dimension at a time
constexpr std::int64_t kSmallest = 1 << 20;  // multiplications worth a thread
constexpr std::int64_t kFewRows = 24;        // of a thread, which takes columns instead
constexpr std::int64_t kTogether = 4;        // left panels that meet a right panel in the cache
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
  using V = typename T::V;
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

  // out[rows, columns] = bias + the product, or += it from the second block on.
  DPK_INLINE void multiply(const F* x, const F* right, const F* bias, Range rows, Range columns,
                           F* out) const {
    constexpr bool kPacked = kBytes == 64;
    F* const left = kPacked ? scratch<F, 5>(kTogether * kLeft) : nullptr;
    for (std::int64_t first = rows.begin; first < rows.end; first += kTogether * T::kRows) {
      const std::int64_t end = std::min<std::int64_t>(rows.end, first + kTogether * T::kRows);
      for (std::int64_t row = first; kPacked && row < end; row += T::kRows) {
        pack_rows<T::kRows, T::kLanes>(left_rows(x, row),
                                       std::min<std::int64_t>(T::kRows, end - row), count(),
                                       shape.inner, left + (row - first) / T::kRows * kLeft);
      }
      for (std::int64_t column = columns.begin; column < columns.end; column += T::kColumns) {
        for (std::int64_t row = first; row < end; row += T::kRows) {
          const F* const panel = right + column * count();
          T tile;
          if constexpr (kPacked) {
            tile.multiply(left + (row - first) / T::kRows * kLeft, panel, count());
          } else {
            tile.multiply_rows(left_rows(x, row), shape.inner, end - row, panel, count());
          }
          write(tile, bias, {row, std::min<std::int64_t>(end, row + T::kRows)}, column, out);
        }
      }
    }
  }

 private:
  DPK_INLINE const F* left_rows(const F* x, std::int64_t row) const {
    return x + row * shape.inner + steps.begin;
  }
  DPK_INLINE void write(const T& tile, const F* bias, Range rows, std::int64_t column,
                        F* out) const {
    const std::int64_t wide = std::min<std::int64_t>(T::kColumns, shape.columns - column);
    const bool fresh = steps.begin == 0;
    F start[T::kColumns] = {};
    if (fresh && bias != nullptr) std::copy(bias + column, bias + column + wide, start);
    F* const first = out + rows.begin * shape.columns + column;
    if (wide == T::kColumns && rows.end - rows.begin == T::kRows) {
#pragma GCC unroll 16
      for (int m = 0; m < T::kRows; ++m) {
        F* const to = first + m * shape.columns;
#pragma GCC unroll 16
        for (int n = 0; n < T::kVectors; ++n) {
          const V sum = load<V>((fresh ? start : to) + n * T::kLanes) + tile.at[m][n];
          __builtin_memcpy(to + n * T::kLanes, &sum, sizeof(sum));
        }
      }
      return;
    }
    const T part = tile;  // a copy: the tile itself stays in registers
    for (std::int64_t m = 0; m < rows.end - rows.begin; ++m) {
      F sums[T::kColumns];
      __builtin_memcpy(sums, part.at[m], sizeof(sums));
      F* const to = first + m * shape.columns;
      const F* const before = fresh ? start : to;
      for (std::int64_t c = 0; c < wide; ++c) to[c] = before[c] + sums[c];
    }
  }
};

template <class F>
constexpr std::int64_t kWidest = 64 / sizeof(F);  // lanes of the widest vectors

// Products with kColumns columns and a vector of rows at least, which would leave most lanes of a
// tile idle: dot products of kRows rows at a time with each of them.
template <class F, int kBytes, int kColumns>
struct FewColumns {
  static constexpr int kLanes = kBytes / static_cast<int>(sizeof(F));
  static constexpr int kRows = kColumns <= 2 ? 4 : 2;
  using V = Vector<F, kLanes>;
  using Sums = V[kRows][kColumns];

  const Matmul<F>& call;
  F* columns;  // [kColumns, stride]
  std::int64_t stride;

  // The last vector of a row ends with it: its first lanes, which the one before has, are zeros.
  std::int64_t whole() const { return call.K / kLanes * kLanes; }
  int repeated() const { return static_cast<int>(whole() + kLanes - call.K); }

  DPK_INLINE void pack() const {
    std::fill_n(columns, kColumns * stride, F{0});
    for (std::int64_t c = 0; c < kColumns; ++c) {
      for (std::int64_t k = 0; k < call.K; ++k) {
        F* const to = columns + c * stride + (k < whole() ? k : k + repeated());
        *to = call.w[call.w_transposed ? c * call.K + k : k * kColumns + c];
      }
    }
  }

  DPK_INLINE void multiply(Range rows) const {
    for (std::int64_t first = rows.begin; first < rows.end; first += kRows) {
      const std::int64_t tall = std::min<std::int64_t>(kRows, rows.end - first);
      const F* row[kRows];
      for (int m = 0; m < kRows; ++m) row[m] = call.x + (first + (m < tall ? m : 0)) * call.K;
      Sums sums = {};
      for (std::int64_t k = 0; k < whole(); k += kLanes) {
        add([&](int m) DPK_INLINE { return load<V>(row[m] + k); }, k, sums);
      }
      if (whole() < call.K) {
        add([&](int m) DPK_INLINE { return last_of(row[m]); }, whole(), sums);
      }
      for (int m = 0; m < tall; ++m) {
        for (int c = 0; c < kColumns; ++c) {
          const F start = call.bias == nullptr ? 0 : call.bias[c];
          call.out[(first + m) * kColumns + c] = start + sum_lanes<V, kLanes>(sums[m][c]);
        }
      }
    }
  }

 private:
  DPK_INLINE V last_of(const F* row) const {
    using Bits = std::conditional_t<sizeof(F) == 4, std::int32_t, std::int64_t>;
    using I = Vector<Bits, kLanes>;
    I lanes;
    for (int l = 0; l < kLanes; ++l) lanes[l] = l;
    const V x = load<V>(row + call.K - kLanes);
    return reinterpret_cast<V>(reinterpret_cast<I>(x) & (lanes >= static_cast<Bits>(repeated())));
  }

  template <class Left>
  DPK_INLINE void add(const Left& left, std::int64_t k, Sums& sums) const {
#pragma GCC unroll 4
    for (int m = 0; m < kRows; ++m) {
      const V x = left(m);
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; ++c) sums[m][c] += x * load<V>(columns + c * stride + k);
    }
  }
};

template <int kColumns, class F>
void matmul_by_dots(const Matmul<F>& call, int team) {
  const std::int64_t stride = round_up(call.K, kWidest<F>);
  F* const columns = scratch<F, 6>(kColumns * stride);
  const auto with_product = [&](const auto& body) {
    versioned_by_width([&](auto width) DPK_INLINE {
      body(FewColumns<F, decltype(width)::value, kColumns>{call, columns, stride});
    });
  };
  with_product([](const auto& product) DPK_INLINE { product.pack(); });
  parallel_for(call.N, grain(), team, [&](std::int64_t begin, std::int64_t end) {
    with_product([&](const auto& product) DPK_INLINE { product.multiply({begin, end}); });
  });
}

template <class F>
void matmul_by_tiles(const Matmul<F>& call, int team) {
  const ProductShape shape{call.N, call.K, call.M, call.w_transposed};
  const std::int64_t units = (shape.columns + kUnit - 1) / kUnit;
  F* const panels = scratch<F, 6>(units * kUnit * std::min(kSteps, shape.inner));
  const Range all_rows{0, shape.rows}, all_columns{0, shape.columns};
  const auto with_block = [&](Range steps, const auto& body) {
    versioned_by_width([&](auto width)
                           DPK_INLINE { body(Block<F, decltype(width)::value>{shape, steps}); });
  };
  const bool by_rows = shape.rows >= kFewRows * team || units < team;  // else they take columns
  const std::int64_t blocks = std::max<std::int64_t>(1, (shape.inner + kSteps - 1) / kSteps);
  // At least 8: without inner dimension a single round writes the bias.
  const std::int64_t size =
      std::max<std::int64_t>(8, round_up((shape.inner + blocks - 1) / blocks, 8));
  for (std::int64_t t = 0; t == 0 || t < shape.inner; t += size) {
    const Range steps{t, std::min(shape.inner, t + size)};
    parallel_for(units, 1, team, [&](std::int64_t begin, std::int64_t end) {
      const Range columns{begin * kUnit, std::min(shape.columns, end * kUnit)};
      with_block(steps, [&](const auto& block) DPK_INLINE {
        block.pack_right(call.w, columns, panels);
        if (!by_rows) block.multiply(call.x, panels, call.bias, all_rows, columns, call.out);
      });
    });
    if (!by_rows) continue;
    parallel_for(shape.rows, grain(), team, [&](std::int64_t begin, std::int64_t end) {
      with_block(steps, [&](const auto& block) DPK_INLINE {
        block.multiply(call.x, panels, call.bias, {begin, end}, all_columns, call.out);
      });
    });
  }
}

template <class F>
void matmul_by_vectors(const Matmul<F>& call, int threads) {
  const int team = useful_threads(call.N * call.K * call.M, kSmallest, threads);
  if (call.K < kWidest<F>) return matmul_by_tiles(call, team);
  switch (call.M) {
    case 1:
      return matmul_by_dots<1>(call, team);
    case 2:
      return matmul_by_dots<2>(call, team);
    case 3:
      return matmul_by_dots<3>(call, team);
    case 4:
      return matmul_by_dots<4>(call, team);
    default:
      return matmul_by_tiles(call, team);
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
