#pragma once
// Register-tiled products for the ghost kernels: sums of outer products and tables of dot products.
// Only for files built with -ffp-contract=fast, and never together with rows.h: the linker keeps
// one copy of an inline function, and clipping must not get the contracted one.

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "cpu/isa.h"
#include "cpu/panels.h"

namespace dpkern::cpu::ghost {

// One row's `used` values times `scale`, then zeros up to `width`.
template <class S, class F>
DPK_INLINE inline void pack_row(const S* __restrict row, std::int64_t used, std::int64_t width,
                                F scale, F* __restrict to) {
  for (std::int64_t c = 0; c < used; ++c) to[c] = static_cast<F>(row[c]) * scale;
  for (std::int64_t c = used; c < width; ++c) to[c] = 0;
}

// `columns` of [rows, stride] -> panels of kWidth columns, each [rows, kWidth], zeros at the end.
// Row after row, as they lie in memory: each line is read once. A panel that is no multiple of a
// vector is written in whole ones, of kWritten columns: what is too much is overwritten by the next
// row, or lies in the room behind the last (panel_size).
template <int kWidth, int kWritten = kWidth, class S, class F>
DPK_INLINE inline void pack_panels(const S* from, std::int64_t rows, std::int64_t columns,
                                   std::int64_t stride, const Scales<F>& scales, F* to,
                                   std::int64_t panel_size) {
  const std::int64_t whole = std::max<std::int64_t>(0, columns + kWidth - kWritten) / kWidth;
  for (std::int64_t r = 0; r < rows; ++r) {
    const S* row = from + r * stride;
    const F scale = scales(r);
    F* panel = to + r * kWidth;
    for (std::int64_t i = 0; i < whole; ++i, row += kWidth, panel += panel_size) {
      pack_row(row, kWritten, kWritten, scale, panel);
    }
    for (std::int64_t left = columns - whole * kWidth; left > 0; left -= kWidth) {
      pack_row(row, std::min<std::int64_t>(left, kWidth), kWidth, scale, panel);
      row += kWidth, panel += panel_size;
    }
  }
}

// The same with one factor for all rows.
template <int kWidth, int kWritten = kWidth, class S, class F>
DPK_INLINE inline void pack_panels(const S* from, std::int64_t rows, std::int64_t columns,
                                   std::int64_t stride, F scale, F* to, std::int64_t panel_size) {
  pack_panels<kWidth, kWritten>(from, rows, columns, stride, Scales<F>{&scale, 0}, to, panel_size);
}

// The sum of one vector's lanes, halves first.
template <class V, int kLanes>
DPK_INLINE inline auto sum_lanes(V x) {
  if constexpr (kLanes == 1) {
    return x[0];
  } else {
    using F = std::remove_reference_t<decltype(x[0])>;
    using Half = Vector<F, kLanes / 2>;
    Half halves[2];
    __builtin_memcpy(halves, &x, sizeof(x));
    return sum_lanes<Half, kLanes / 2>(halves[0] + halves[1]);
  }
}

// A tile of sum_t g[t, rows] outer a[t, columns]: enough accumulators to hide the latency of FMA,
// few enough to leave registers for the operands.
template <class F, int kBytes>
struct Tile {
  static constexpr int kLanes = kBytes / static_cast<int>(sizeof(F));
  static constexpr int kRows = kBytes == 64 ? 12 : 6;
  static constexpr int kVectors = 2;
  static constexpr int kColumns = kVectors * kLanes;
  static constexpr int kWrittenRows = (kRows + kLanes - 1) / kLanes * kLanes;  // in whole vectors
  using V = Vector<F, kLanes>;

  V at[kRows][kVectors];

  // `start` + the sum over `steps` of packed panels g [steps, kRows] and a [steps, kColumns].
  DPK_INLINE void multiply(const F* g, const F* a, std::int64_t steps, F start = 0) {
    multiply_by([&](std::int64_t t, int m) DPK_INLINE { return g[t * kRows + m]; }, a, steps,
                start);
  }
  // The same with rows x [used, steps] as they lie, `stride` apart; what is beyond them is
  // undefined.
  DPK_INLINE void multiply_rows(const F* x, std::int64_t stride, std::int64_t used, const F* a,
                                std::int64_t steps) {
    const F* rows[kRows];
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) rows[m] = x + (m < used ? m : 0) * stride;
    multiply_by([&](std::int64_t t, int m) DPK_INLINE { return rows[m][t]; }, a, steps, F{0});
  }
  DPK_INLINE void add(const Tile& other) {
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 16
      for (int n = 0; n < kVectors; ++n) at[m][n] += other.at[m][n];
    }
  }
  // The same in blocks of `block` steps, which keeps the rounding error small.
  DPK_INLINE void multiply_blocked(const F* g, const F* a, std::int64_t steps, std::int64_t block) {
    multiply(g, a, std::min(steps, block));
    for (std::int64_t t = block; t < steps; t += block) {
      Tile part;
      part.multiply(g + t * kRows, a + t * kColumns, std::min(block, steps - t));
      add(part);
    }
  }
  // Roundings that one square sees in its tile before it is widened.
  static constexpr int kSquareRoundings = kRows + 1 + 4;
  // Sum of squares.
  DPK_INLINE double squares() const {
    V sums[kVectors];
#pragma GCC unroll 16
    for (int n = 0; n < kVectors; ++n) sums[n] = at[0][n] * at[0][n];
#pragma GCC unroll 16
    for (int m = 1; m < kRows; ++m) {
#pragma GCC unroll 16
      for (int n = 0; n < kVectors; ++n) sums[n] += at[m][n] * at[m][n];
    }
    double total = 0;
#pragma GCC unroll 16
    for (int n = 0; n < kVectors; ++n) {
      total += static_cast<double>(sum_lanes<V, kLanes>(sums[n]));
    }
    return total;
  }

 private:
  template <class Left>
  DPK_INLINE void multiply_by(const Left& left, const F* a, std::int64_t steps, F start) {
    V acc[kRows][kVectors];
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 16
      for (int n = 0; n < kVectors; ++n) acc[m][n] = V{} + start;
    }
    for (std::int64_t t = 0; t < steps; ++t) {
      V x[kVectors];
#pragma GCC unroll 16
      for (int n = 0; n < kVectors; ++n) x[n] = load<V>(a + t * kColumns + n * kLanes);
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) {
        const F s = left(t, m);
#pragma GCC unroll 16
        for (int n = 0; n < kVectors; ++n) acc[m][n] += s * x[n];
      }
    }
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 16
      for (int n = 0; n < kVectors; ++n) at[m][n] = acc[m][n];
    }
  }
};

// Sums over the lanes of 2^k vectors at once: halves of two vectors are added until lane l of the
// result belongs to vector l; first inside of pieces of 16 bytes, where moving lanes is cheapest.
template <int kLanes, int kPiece, int kSegments>
struct Halves {
  static constexpr bool kInside = kSegments < kPiece;
  static constexpr int kUnit = kInside ? 1 : kPiece;  // lanes that stay together
  static constexpr int kUnits = kInside ? kPiece : kLanes / kPiece;
  static constexpr int kApart = kUnits / 2 / (kSegments / kUnit);

  // The lane of the lower half, of two vectors side by side, that becomes lane `lane`.
  static constexpr int lower(int lane) {
    const int unit = lane / kUnit % kUnits, i = unit % (kUnits / 2);
    const int from = i / kApart * 2 * kApart + i % kApart;
    return lane + (from - unit) * kUnit + (unit < kUnits / 2 ? 0 : kLanes);
  }
  static constexpr int upper(int lane) { return lower(lane) + kApart * kUnit; }
};
template <class V, int kLanes, int kSegments, int... l>
DPK_INLINE inline V fold_pair(V c, V d, std::integer_sequence<int, l...>) {
  using H = Halves<kLanes, 16 * kLanes / static_cast<int>(sizeof(V)), kSegments>;
  return __builtin_shufflevector(c, d, H::lower(l)...) +
         __builtin_shufflevector(c, d, H::upper(l)...);
}
template <class V, int kLanes, int kCount, int kSegments = 1>
DPK_INLINE inline void fold(V* x) {
  if constexpr (kSegments < kLanes) {
#pragma GCC unroll 16
    for (int i = 0; i < kCount / 2; ++i) {
      x[i] = fold_pair<V, kLanes, kSegments>(x[2 * i], x[2 * i + 1],
                                             std::make_integer_sequence<int, kLanes>{});
    }
    fold<V, kLanes, kCount / 2, kSegments * 2>(x);
  }
}

constexpr int kDots = 4;  // a table of dot products is kDots x kDots

// Dot products of four rows with four others, n a multiple of the lanes. Chains of a few FMAs per
// lane are widened to double, so that the rounding error does not grow with n.
template <class F, int kBytes>
struct Dots {
  static constexpr int kLanes = kBytes / static_cast<int>(sizeof(F));
  static constexpr int kColumns = kBytes == 64 ? 4 : 2;  // columns at a time
  static constexpr int kChunk = 128;                     // entries per chain of FMAs
  // Roundings that one product sees in its chunk: product, chain, fold over at most 16 lanes.
  static constexpr int kRoundings = 1 + kChunk / kLanes + 4;
  using V = Vector<F, kLanes>;

  // out[j * kDots + i] = <x[i], y[j]>
  static DPK_INLINE void table(const F* const* x, const F* const* y, std::int64_t n, double* out) {
    for (int j = 0; j < kDots; j += kColumns) {
      double* const to = out + j * kDots;
      columns<false>(x, y + j, 0, std::min<std::int64_t>(n, kChunk), to);
      for (std::int64_t k = kChunk; k < n; k += kChunk) {
        columns<true>(x, y + j, k, std::min<std::int64_t>(n, k + kChunk), to);
      }
    }
  }

 private:
  static constexpr int kWide = kBytes / static_cast<int>(sizeof(double));

  template <bool kAdd>
  static DPK_INLINE void columns(const F* const* x, const F* const* y, std::int64_t begin,
                                 std::int64_t end, double* out) {
    constexpr int kCount = kDots * kColumns;
    V acc[kCount];
#pragma GCC unroll 16
    for (int i = 0; i < kCount; ++i) acc[i] = V{};
    const F *x0 = x[0], *x1 = x[1], *x2 = x[2], *x3 = x[3];
    const F* rows[kColumns];
#pragma GCC unroll 16
    for (int j = 0; j < kColumns; ++j) rows[j] = y[j];
    for (std::int64_t k = begin; k < end; k += kLanes) {
      const V a = load<V>(x0 + k), b = load<V>(x1 + k), c = load<V>(x2 + k), d = load<V>(x3 + k);
#pragma GCC unroll 16
      for (int j = 0; j < kColumns; ++j) {
        const V other = load<V>(rows[j] + k);
        acc[j * kDots] += a * other;
        acc[j * kDots + 1] += b * other;
        acc[j * kDots + 2] += c * other;
        acc[j * kDots + 3] += d * other;
      }
    }
    fold<V, kLanes, kCount>(acc);
    using Narrow = Vector<F, kWide>;
    using Wide = Vector<double, kWide>;
    constexpr int kParts = kLanes / kWide;
#pragma GCC unroll 16
    for (int i = 0; i < kCount / kLanes; ++i) {
      Narrow parts[kParts];
      __builtin_memcpy(parts, &acc[i], sizeof(V));
#pragma GCC unroll 16
      for (int part = 0; part < kParts; ++part) {
        double* const to = out + i * kLanes + part * kWide;
        Wide value = __builtin_convertvector(parts[part], Wide);
        if constexpr (kAdd) value += load<Wide>(to);
        __builtin_memcpy(to, &value, sizeof(value));
      }
    }
  }
};

}  // namespace dpkern::cpu::ghost
