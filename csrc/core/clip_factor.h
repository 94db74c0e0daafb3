#pragma once
// The clip factor of one sample, shared by every kernel.

#include "core/numeric.h"

namespace dpkern {

// Clipping aims this much below C, so that rounding the factor and the products (each 2^-24 in
// float32) cannot lift a sample's own contribution above C.
constexpr double kClipSlack = 1 - 0x1p-21;
// The stabiliser of automatic clipping, C g / (||g|| + 0.01).
constexpr double kAutomaticGamma = 0.01;

template <class D>
DPK_HD D clip_factor(D norm, D max_norm, bool automatic) {
  const D aim = max_norm * kClipSlack;
  if (automatic) return aim / (norm + kAutomaticGamma);
  return norm <= aim ? D{1} : aim / norm;
}

// The factor in the kernel's type, never above `factor`: near the smallest floats, rounding to
// nearest would lift it by more than the slack.
template <class T>
DPK_HD T round_down(double factor) {
  const T rounded = static_cast<T>(factor);
  return static_cast<double>(rounded) > factor ? std::nextafter(rounded, T{0}) : rounded;
}

}  // namespace dpkern
