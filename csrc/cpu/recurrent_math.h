#pragma once
// Logistic function and hyperbolic tangent of whole vectors: the same operations in every lane, so
// that a number's bits depend neither on its place nor on its neighbours.
//
//   p = e^r - 1 by its Taylor series, |r| <= ln(2) / 2;  y = n ln(2) + r, so e^y = 2^n (1 + p)
//   sigmoid(x) = 1 / (1 + e^-|x|), times e^-|x| where x < 0
//   tanh(|x|)  = -m / (2 + m) with m = e^(-2 |x|) - 1 = 2^n p + (2^n - 1)
//
// No step cancels, so both are right to a few units in the last place, near zero too. NaN stays
// NaN.

#include <cstdint>
#include <type_traits>

#include "cpu/isa.h"

namespace dpkern::cpu::recurrent {

template <class F>
struct Format;
template <>
struct Format<float> {
  using Bits = std::int32_t;
  static constexpr int kMantissa = 23, kTerms = 7;
  static constexpr float kLowest = -87.0f;  // above the logarithm of the smallest normal number
  static constexpr float kRound = 0x1.8p23f;
  // n times the high part is exact.
  static constexpr float kLn2High = 0x1.62e4p-1f, kLn2Low = 0x1.7f7d1cp-20f;
};
template <>
struct Format<double> {
  using Bits = std::int64_t;
  static constexpr int kMantissa = 52, kTerms = 13;
  static constexpr double kLowest = -708.0;
  static constexpr double kRound = 0x1.8p52;
  static constexpr double kLn2High = 0x1.62e42fefap-1, kLn2Low = 0x1.cf79abc9e3b3ap-40;
};

template <class F>
struct Series {
  F at[Format<F>::kTerms + 1];  // 1 / k!
};
template <class F>
constexpr Series<F> exponential_series() {
  Series<F> made{};
  double factorial = 1;
  for (int k = 0; k <= Format<F>::kTerms; ++k) {
    if (k > 0) factorial *= k;
    made.at[k] = static_cast<F>(1 / factorial);
  }
  return made;
}

template <class F, int kLanes>
struct Functions {
  static constexpr Series<F> kSeries = exponential_series<F>();
  using V = Vector<F, kLanes>;
  using Bits = Vector<typename Format<F>::Bits, kLanes>;

  static DPK_INLINE V absolute(V x) { return x < 0 ? -x : x; }

  // e^y = power (1 + rest) for kLowest <= y <= 0; anything below, except that NaN gives NaN.
  static DPK_INLINE void exponential(V y, V& power, V& rest) {
    using Known = Format<F>;
    const V shifted = y * F(1.4426950408889634) + Known::kRound;  // n stands in its last bits
    const V n = shifted - Known::kRound;
    const V r = (y - n * Known::kLn2High) - n * Known::kLn2Low;
    V p = r * kSeries.at[Known::kTerms] + kSeries.at[Known::kTerms - 1];
#pragma GCC unroll 16
    for (int k = Known::kTerms - 2; k > 0; --k) p = p * r + kSeries.at[k];
    rest = p * r;
    Bits bits;
    __builtin_memcpy(&bits, &shifted, sizeof(bits));
    constexpr typename Known::Bits kBias = std::is_same_v<F, float> ? 127 : 1023;
    bits = (bits + kBias) << Known::kMantissa;
    __builtin_memcpy(&power, &bits, sizeof(bits));
  }
  static DPK_INLINE V sigmoid(V x) {
    const V y = -absolute(x);
    V power, rest;
    exponential(y, power, rest);
    const V small = y < Format<F>::kLowest ? V{} : power + power * rest;
    const V upper = 1 / (1 + small);
    return x < 0 ? small * upper : upper;
  }
  static DPK_INLINE V tanh(V x) {
    const V y = -2 * absolute(x);
    V power, rest;
    exponential(y, power, rest);
    const V minus = y < Format<F>::kLowest ? V{} - 1 : power * rest + (power - 1);
    const V t = minus / (2 + minus);  // of -|x|
    return x < 0 ? t : 0 - t;
  }
};

}  // namespace dpkern::cpu::recurrent
