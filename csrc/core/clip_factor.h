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

// The factor, at least 0, in the kernel's type, never above `factor`: near the smallest floats,
// rounding to nearest would lift it by more than the slack.
template <class T>
DPK_HD T round_down(double factor) {
  const T rounded = static_cast<T>(factor);
#if defined(__CUDACC__)
  return static_cast<double>(rounded) > factor ? std::nextafter(rounded, T{0}) : rounded;
#else
  if constexpr (sizeof(T) == sizeof(double)) return rounded;
  // The next float below a positive one has the bits before it; loops of this are vectorised.
  std::uint32_t bits;
  __builtin_memcpy(&bits, &rounded, sizeof(bits));
  bits -= static_cast<double>(rounded) > factor ? 1 : 0;
  float lower;
  __builtin_memcpy(&lower, &bits, sizeof(lower));
  return static_cast<T>(lower);
#endif
}

}  // namespace dpkern
