#pragma once
// Tiles of integers that products or tiles of floats are rounded to (docs/exact.md). Only for files
// built with -ffp-contract=fast, as ghost_tiles.h.

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "cpu/ghost_tiles.h"
#include "cpu/isa.h"

namespace dpkern::cpu::ghost {

// The integer part of a product that is rounded first.
struct Truncated {
  static constexpr std::uint32_t kExcess = 0;
  template <class I, class F, class V>
  static DPK_INLINE I whole(F s, V x) {
    return __builtin_convertvector(s * x, I);
  }
};

// Integers in floating point: a number within kRoom of kOrigin has no bits behind the point, so
// that a product that is added to one is rounded to the nearest integer. Its low bits are the
// integer; in floats they are the number's own bits, which exceed the integer by kExcess. Sums of
// them wrap around and come out right.
template <class F>
struct Nearest {
  static constexpr bool kSingle = std::is_same_v<F, float>;
  static constexpr F kOrigin = kSingle ? F(0x1.8p23) : F(0x1.8p52);
  static constexpr double kRoom = kSingle ? 0x1p22 : 0x1p51;
  static constexpr std::uint32_t kExcess = kSingle ? 0x4B400000u : 0;
  template <class I, class V>
  static DPK_INLINE I low_bits(V shifted) {
    if constexpr (kSingle) {
      return (I)shifted;
    } else {
      using Wide = Vector<std::int64_t, sizeof(V) / sizeof(F)>;
      return __builtin_convertvector((Wide)shifted, I);
    }
  }
  template <class I, class V>
  static DPK_INLINE I whole(F s, V x) {
    return low_bits<I>(s * x + kOrigin);
  }
};

// Makes the last bit of each number 1, and 0 of what is subnormal: no product of it that is below
// 2^22 then lies half-way between two integers (docs/exact.md).
template <class F>
DPK_INLINE inline void make_odd(F* numbers, std::int64_t count) {
  using Bits = std::conditional_t<std::is_same_v<F, float>, std::uint32_t, std::uint64_t>;
  constexpr F kLeast = std::numeric_limits<F>::min();
  for (std::int64_t i = 0; i < count; ++i) {
    Bits bits;
    __builtin_memcpy(&bits, numbers + i, sizeof(F));
    bits = std::fabs(numbers[i]) < kLeast ? Bits{0} : bits | 1;
    __builtin_memcpy(numbers + i, &bits, sizeof(F));
  }
}

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
  // += the integers nearest to g a of samples whose integers add up to less than kRoom: packed
  // panels g [samples, kRows], odd and with the factors, and a [samples, kColumns]. Only where
  // products are added without being rounded before.
  DPK_INLINE void add_nearest(const F* g, const F* a, std::int64_t samples) {
    using Wrapping = Vector<std::uint32_t, T::kLanes>;
    T sums;
    sums.multiply(g, a, samples, Nearest<F>::kOrigin);
#pragma GCC unroll 16
    for (int m = 0; m < T::kRows; ++m) {
#pragma GCC unroll 16
      for (int n = 0; n < T::kVectors; ++n) {
        const auto whole = Nearest<F>::template low_bits<I>(sums.at[m][n]);
        at[m][n] = (I)((Wrapping)at[m][n] + ((Wrapping)whole - Nearest<F>::kExcess));
      }
    }
  }
  // += the whole number of g a for every sample: packed panels g [samples, kRows], which holds the
  // factors, and a [samples, kColumns].
  template <class Round>
  DPK_INLINE void add_products(const F* g, const F* a, std::int64_t samples) {
    for (int first = 0; first < T::kRows; first += kTogether) {
      add_rows<Round>(g + first, a, samples, at + first);
    }
  }

 private:
  // Rows whose sums stay in registers beside what a product and its rounding need.
  static constexpr int kTogether = kBytes == 64 ? T::kRows : T::kRows / 2;

  template <class Round>
  static DPK_INLINE void add_rows(const F* g, const F* a, std::int64_t samples,
                                  I (*to)[T::kVectors]) {
    using Wrapping = Vector<std::uint32_t, T::kLanes>;
    Wrapping acc[kTogether][T::kVectors];
#pragma GCC unroll 16
    for (int m = 0; m < kTogether; ++m) {
#pragma GCC unroll 16
      for (int n = 0; n < T::kVectors; ++n) acc[m][n] = Wrapping{};
    }
    for (std::int64_t b = 0; b < samples; ++b) {
      V x[T::kVectors];
#pragma GCC unroll 16
      for (int n = 0; n < T::kVectors; ++n) x[n] = load<V>(a + b * T::kColumns + n * T::kLanes);
#pragma GCC unroll 16
      for (int m = 0; m < kTogether; ++m) {
        const F s = g[b * T::kRows + m];
#pragma GCC unroll 16
        for (int n = 0; n < T::kVectors; ++n)
          acc[m][n] += (Wrapping)Round::template whole<I>(s, x[n]);
      }
    }
    const std::uint32_t excess = Round::kExcess * static_cast<std::uint32_t>(samples);
#pragma GCC unroll 16
    for (int m = 0; m < kTogether; ++m) {
#pragma GCC unroll 16
      for (int n = 0; n < T::kVectors; ++n) to[m][n] += (I)(acc[m][n] - excess);
    }
  }
};

// Whether tiles add products without rounding them before, which compilers may do or not: of
// (1 + e)^2 - 1 - 2 e, only e^2 is left then.
template <class F, int kBytes>
DPK_INLINE inline bool adds_exact_products() {
  using T = Tile<F, kBytes>;
  constexpr F kStep = std::numeric_limits<F>::epsilon();
  volatile F factor = 1 + kStep;  // not known to the compiler
  F g[T::kRows], a[T::kColumns];
  for (F& entry : g) entry = factor;
  for (F& entry : a) entry = factor;
  T tile;
  tile.multiply(g, a, 1, -1 - 2 * kStep);
  bool exact = true;
  for (int m = 0; m < T::kRows; ++m) {
    for (int n = 0; n < T::kVectors; ++n) {
      for (int lane = 0; lane < T::kLanes; ++lane) exact &= tile.at[m][n][lane] == kStep * kStep;
    }
  }
  return exact;
}

}  // namespace dpkern::cpu::ghost
