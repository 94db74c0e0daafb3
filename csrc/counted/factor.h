#pragma once
// Factors of counted scalars.

#include "core/clip_factor.h"
#include "core/counted.h"

namespace dpkern::counted {

// `round_down` without its branch: the next smaller number is made for every factor, so that the
// count does not depend on the last bits. float64 stays as it is.
template <class T>
Counted<T> round_down(Counted<double> factor) {
  if constexpr (std::is_same_v<T, double>) {
    return factor;
  } else {
    const Counted<T> rounded(factor);
    const bool above = Counted<double>(rounded) > factor;
    count(kSub);  // of the number's bits
    return choose(above, Counted<T>(std::nextafter(rounded.value, T{0})), rounded);
  }
}

// sum of |x|^p over `count` values row(i) in float64, in the lanes of csrc/cpu/rows.h.
template <class Row>
Counted<double> power_sum(const Row& row, std::int64_t size, int p) {
  constexpr std::int64_t kLanes = 8, kUnroll = 4;
  const auto term = [&](std::int64_t i) {
    const Counted<double> x = row(i);
    return p == 2 ? x * x : fabs(x);
  };
  Total<double> lanes[kUnroll][kLanes];
  Total<double> total;
  std::int64_t i = 0;
  for (; i + kUnroll * kLanes <= size; i += kUnroll * kLanes) {
    for (int k = 0; k < kUnroll; ++k) {
      for (int l = 0; l < kLanes; ++l) lanes[k][l].add(term(i + k * kLanes + l));
    }
  }
  for (int k = 1; k < kUnroll; ++k) {
    for (int l = 0; l < kLanes; ++l) lanes[0][l].add(lanes[k][l]);
  }
  for (int l = 0; l < kLanes; ++l) total.add(lanes[0][l]);
  for (; i < size; ++i) total.add(term(i));
  return total.total();
}

// A number in float64.
inline Counted<double> wide(Counted<double> x) { return x; }
inline Counted<double> wide(Counted<float> x) { return Counted<double>(x); }

}  // namespace dpkern::counted
