#pragma once
// Tiles of integers that products or tiles of floats are truncated to (docs/exact.md). Only for
// files built with -ffp-contract=fast, as ghost_tiles.h.

#include <cstdint>

#include "cpu/ghost_tiles.h"
#include "cpu/isa.h"

namespace dpkern::cpu::ghost {

// A tile of integers, laid out as the tile of floats that it is truncated from.
template <class F, int kBytes>
struct IntegerTile {
  using T = Tile<F, kBytes>;
  using V = typename T::V;
  using I = Vector<std::int32_t, T::kLanes>;

  I at[T::kRows][T::kVectors];

  DPK_INLINE void clear() {
#pragma GCC unroll 16
    for (int m = 0; m < T::kRows; ++m) {
#pragma GCC unroll 16
      for (int n = 0; n < T::kVectors; ++n) at[m][n] = I{};
    }
  }
  // += trunc(factor tile), entry by entry.
  DPK_INLINE void add(const T& tile, F factor) {
#pragma GCC unroll 16
    for (int m = 0; m < T::kRows; ++m) {
#pragma GCC unroll 16
      for (int n = 0; n < T::kVectors; ++n) {
        at[m][n] += __builtin_convertvector(factor * tile.at[m][n], I);
      }
    }
  }
  // += trunc(g a) for every sample: packed panels g [samples, kRows], which holds the factors, and
  // a [samples, kColumns].
  DPK_INLINE void add_products(const F* g, const F* a, std::int64_t samples) {
    for (int first = 0; first < T::kRows; first += kTogether) {
      add_rows(g + first, a, samples, at + first);
    }
  }

 private:
  // Rows whose sums stay in registers beside what a product and its rounding need.
  static constexpr int kTogether = kBytes == 64 ? T::kRows : T::kRows / 2;

  static DPK_INLINE void add_rows(const F* g, const F* a, std::int64_t samples,
                                  I (*to)[T::kVectors]) {
    I acc[kTogether][T::kVectors];
#pragma GCC unroll 16
    for (int m = 0; m < kTogether; ++m) {
#pragma GCC unroll 16
      for (int n = 0; n < T::kVectors; ++n) acc[m][n] = I{};
    }
    for (std::int64_t b = 0; b < samples; ++b) {
      V x[T::kVectors];
#pragma GCC unroll 16
      for (int n = 0; n < T::kVectors; ++n) x[n] = load<V>(a + b * T::kColumns + n * T::kLanes);
#pragma GCC unroll 16
      for (int m = 0; m < kTogether; ++m) {
        const F s = g[b * T::kRows + m];
#pragma GCC unroll 16
        for (int n = 0; n < T::kVectors; ++n) acc[m][n] += __builtin_convertvector(s * x[n], I);
      }
    }
#pragma GCC unroll 16
    for (int m = 0; m < kTogether; ++m) {
#pragma GCC unroll 16
      for (int n = 0; n < T::kVectors; ++n) to[m][n] += acc[m][n];
    }
  }
};

}  // namespace dpkern::cpu::ghost
