#pragma once
// Scales that turn a sample's inputs and output gradients into 16-bit integers, whose products over
// all positions stay in 32 bits: docs/exact.md, lemma 4. Not for files that fuse products with
// sums: every instruction set makes the same integers.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "cpu/ghost_linear.h"
#include "cpu/isa.h"
#include "cpu/panels.h"

namespace dpkern::cpu::exact {

// Norms that rounded rows stay below: dot products of two of them stay below 2^30 and 2^28.
constexpr double kInputNorm = 0x1p15, kOutputNorm = 0x1p14;
// Squared norms of rows outside of these count as zero and as lost: no scale leaves F.
constexpr double kLeastSquare = 0x1p-200, kMostSquare = 0x1p200;

// Numbers within 2^22 of it have no bits behind the point: adding it, and taking it off, rounds.
template <class F>
constexpr F kOrigin = std::is_same_v<F, float> ? F(0x1.8p23) : F(0x1.8p52);

// 2^power, for powers of double's normal range.
inline double power_of_two(std::int64_t power) {
  const std::int64_t bits = (power + 1023) << 52;
  double value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

// The power of 2 next below the root of a normal square.
inline std::int64_t power_below_root(double square) {
  std::int64_t bits;
  __builtin_memcpy(&bits, &square, sizeof(bits));
  return ((bits >> 52) - 1023) >> 1;
}

// Sum of squares, and the largest absolute value, of a row.
struct RowSize {
  double square, largest;
};

// Within 2^-9 of the sum of squares. Floats are summed as floats where their sizes hide nothing.
template <class F>
DPK_INLINE inline RowSize size_of(const F* row, std::int64_t n) {
  constexpr int kLanes = 8, kChains = 4;
  using V = Vector<F, kLanes>;
  using Bits = std::conditional_t<std::is_same_v<F, float>, std::int32_t, std::int64_t>;
  using I = Vector<Bits, kLanes>;
  constexpr Bits kSize = std::numeric_limits<Bits>::max();  // all but the sign
  V sums[kChains] = {};
  I most[kChains] = {};  // without the sign, bits are ordered as the numbers are
  const auto add = [&](int k, V x) DPK_INLINE {
    I bits;
    __builtin_memcpy(&bits, &x, sizeof(x));
    bits &= kSize;
    sums[k] += x * x;
    most[k] = most[k] > bits ? most[k] : bits;
  };
  std::int64_t i = 0;
  for (; i + kLanes * kChains <= n; i += kLanes * kChains) {
#pragma GCC unroll 4
    for (int k = 0; k < kChains; ++k) add(k, ghost::load<V>(row + i + k * kLanes));
  }
  for (; i < n; i += kLanes) {
    V rest{};
    __builtin_memcpy(&rest, row + i,
                     static_cast<std::size_t>(std::min<std::int64_t>(kLanes, n - i)) * sizeof(F));
    add(0, rest);
  }
  const V total = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  const I low = most[0] > most[1] ? most[0] : most[1], high = most[2] > most[3] ? most[2] : most[3];
  const I tallest = low > high ? low : high;
  Bits widest = 0;
  RowSize size{0, 0};
#pragma GCC unroll 8
  for (int l = 0; l < kLanes; ++l) {
    size.square += static_cast<double>(total[l]);
    widest = std::max<Bits>(widest, tallest[l]);
  }
  F largest;
  __builtin_memcpy(&largest, &widest, sizeof(largest));
  size.largest = static_cast<double>(largest);
  constexpr std::int64_t kMost = 1 << 19;
  if (std::is_same_v<F, float> && !(n <= kMost && 0x1p-80 < size.square && size.square < 0x1p120)) {
    size.square = ghost::square_of(row, n);
  }
  return size;
}

// One sample's scales. Its gradient is `unit` times sum_t gamma_t outer alpha_t, where alpha_t is
// a_scales[t] a_t to the nearest integers, and gamma_t is g_scales[t] g_t; a position whose
// integers are all zero has scales of 0. unit: 0 if all positions are, infinite if the sample is
// not finite or too large.
template <class F>
struct OperandScales {
  F *a_scales, *g_scales;
  double unit;
};

template <class F>
DPK_INLINE inline OperandScales<F> scales_of(const F* a, const F* g, std::int64_t positions,
                                             std::int64_t inputs, std::int64_t outputs) {
  OperandScales<F> scales{ghost::scratch<F, 16>(positions), ghost::scratch<F, 17>(positions), 0};
  double* const norms = ghost::scratch<double, 18>(positions);
  std::int64_t* const powers = ghost::scratch<std::int64_t, 19>(positions);
  // Sizes of rows once a power of 2 has moved from the inputs to the output gradients.
  double widest = 0, tallest = 0, largest_a = 0, largest_g = 0;
  for (std::int64_t t = 0; t < positions; ++t) {
    scales.a_scales[t] = scales.g_scales[t] = 0;
    norms[t] = 0, powers[t] = 0;
    const RowSize x = size_of(a + t * inputs, inputs), y = size_of(g + t * outputs, outputs);
    if (!(x.square <= kMostSquare && y.square <= kMostSquare)) {
      scales.unit = std::numeric_limits<double>::infinity();
      return scales;
    }
    if (x.square < kLeastSquare || y.square < kLeastSquare) continue;
    powers[t] = power_below_root(x.square);
    const double up = power_of_two(powers[t]), down = power_of_two(-powers[t]);
    norms[t] = std::sqrt(y.square) * up;
    widest = std::max(widest, x.square * down * down);
    tallest = std::max(tallest, norms[t]);
    largest_a = std::max(largest_a, x.largest * down);
    largest_g = std::max(largest_g, y.largest * up);
  }
  if (tallest == 0) return scales;
  // 1 +- 2^-8: what the sums of squares and the scales, rounded to F, can be off by.
  constexpr double kSlack = 1 - 0x1p-8;
  const double tall_room = kOutputNorm * kSlack - 0.5 * std::sqrt(static_cast<double>(outputs));
  const double wide_room = kInputNorm * kSlack - 0.5 * std::sqrt(static_cast<double>(inputs));
  // A sum over positions is at most T times the largest entries: each may be near the root.
  const double room = 0x1.fffffffcp30 / static_cast<double>(positions);
  const double g_scale = std::min(tall_room / tallest, (2 * std::sqrt(room) - 1) / largest_g);
  const double most = g_scale * largest_g * (1 + 0x1p-20) + 0.5;
  const double a_scale = std::min(wide_room / std::sqrt(widest), (room / most - 1) / largest_a);
  for (std::int64_t t = 0; t < positions; ++t) {
    // Below, no entry reaches one half.
    if (!(norms[t] * g_scale >= 0.25)) continue;
    scales.a_scales[t] = static_cast<F>(a_scale * power_of_two(-powers[t]));
    scales.g_scales[t] = static_cast<F>(g_scale * power_of_two(powers[t]));
  }
  scales.unit = 1 / (g_scale * a_scale);
  return scales;
}

}  // namespace dpkern::cpu::exact
