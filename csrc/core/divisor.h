#pragma once
// Division by a number that stays, for the host.

#include "core/numeric.h"

namespace dpkern {

// The upper half of a product.
DPK_HD std::uint64_t high_product(std::uint64_t a, std::uint64_t b) {
  __extension__ typedef unsigned __int128 Wide;
  return static_cast<std::uint64_t>((static_cast<Wide>(a) * b) >> 64);
}

// v / width by one multiplication: the quotient by the rounded reciprocal is at most one too small.
struct Divisor {
  std::uint64_t width;
  std::uint64_t reciprocal;  // floor((2^64 - 1) / width)

  explicit Divisor(std::uint64_t w) : width(w), reciprocal(~std::uint64_t{0} / w) {}
  template <class V>
  V quotient(V v) const {
    const V q = high_product(v, reciprocal);
    return q + (v - q * width >= width ? 1 : 0);
  }
};

}  // namespace dpkern
