#pragma once
// The logistic function of numbers or of whole vectors: the same operations for every number, so
// that its bits depend neither on its place nor on its neighbours.
//
//   y = n ln(2) + r,  p = e^r - 1 by its Taylor series, |r| <= ln(2) / 2,  so e^y = 2^n (1 + p)
//   sigmoid(x) = 1 / (1 + e^-|x|), times e^-|x| where x < 0
//
// No step cancels, so it is right to a few units in the last place, near zero too. NaN stays NaN.

#include "core/numeric.h"

namespace dpkern {

template <class F>
struct ExponentialOf;
template <>
struct ExponentialOf<float> {
  using Bits = std::uint32_t;  // what infinity leaves there may overflow
  static constexpr int kMantissa = 23, kBias = 127, kTerms = 7;
  static constexpr float kLowest = -87.0f;  // above the logarithm of the smallest normal number
  static constexpr float kRound = 0x1.8p23f;
  // n times the high part is exact.
  static constexpr float kLn2High = 0x1.62e4p-1f, kLn2Low = 0x1.7f7d1cp-20f;
};
template <>
struct ExponentialOf<double> {
  using Bits = std::uint64_t;
  static constexpr int kMantissa = 52, kBias = 1023, kTerms = 13;
  static constexpr double kLowest = -708.0;
  static constexpr double kRound = 0x1.8p52;
  static constexpr double kLn2High = 0x1.62e42fefap-1, kLn2Low = 0x1.cf79abc9e3b3ap-40;
};

template <int k>
struct Factorial {
  static constexpr double kValue = k * Factorial<k - 1>::kValue;
};
template <>
struct Factorial<0> {
  static constexpr double kValue = 1;
};

// The integers of a number's size, one for each number of V.
template <class F, class V>
struct BitsOf {
  typedef decltype(V{} < V{}) type;
};
template <class F>
struct BitsOf<F, F> {
  typedef typename ExponentialOf<F>::Bits type;
};

template <class To, class From>
DPK_HD To same_bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
#if defined(__CUDACC__)
  memcpy(&to, &from, sizeof(to));
#else
  __builtin_memcpy(&to, &from, sizeof(to));
#endif
  return to;
}

// 1/k! + r/(k+1)! + ... up to the last term.
template <class F, int k, class V>
DPK_HD V exponential_series(V r) {
  constexpr F kInverse = static_cast<F>(1 / Factorial<k>::kValue);
  if constexpr (k == ExponentialOf<F>::kTerms - 1) {
    return r * static_cast<F>(1 / Factorial<k + 1>::kValue) + kInverse;
  } else {
    return exponential_series<F, k + 1>(r) * r + kInverse;
  }
}

// e^y = power (1 + rest) for kLowest <= y <= 0; anything below, except that NaN gives NaN.
template <class F, class V>
DPK_HD void exponential(V y, V& power, V& rest) {
  using Known = ExponentialOf<F>;
  const V shifted = y * F(1.4426950408889634) + Known::kRound;  // n stands in its last bits
  const V n = shifted - Known::kRound;
  const V r = (y - n * Known::kLn2High) - n * Known::kLn2Low;
  rest = exponential_series<F, 1>(r) * r;
  using Bits = typename BitsOf<F, V>::type;
  power = same_bits<V>(Bits((same_bits<Bits>(shifted) + Known::kBias) << Known::kMantissa));
}

template <class F, class V>
DPK_HD V sigmoid(V x) {
  const V y = x < 0 ? x : -x;
  V power, rest;
  exponential<F>(y, power, rest);
  const V small = y < ExponentialOf<F>::kLowest ? V{} : power + power * rest;
  const V upper = 1 / (1 + small);
  return x < 0 ? small * upper : upper;
}

}  // namespace dpkern
