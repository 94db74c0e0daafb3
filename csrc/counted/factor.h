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

// A number in float64.
inline Counted<double> wide(Counted<double> x) { return x; }
inline Counted<double> wide(Counted<float> x) { return Counted<double>(x); }

}  // namespace dpkern::counted
