#pragma once
// Randomized response: which lie a 64-bit word tells.

#include "core/layouts.h"
#include "core/numeric.h"

namespace dpkern {

#if !defined(__CUDACC__)
inline Lies lies_of(std::uint32_t categories, std::uint64_t keep) {
  // 2^64 - keep, which is not 0, in arithmetic modulo 2^64.
  const std::uint64_t width = (std::uint64_t{0} - keep) / (categories - 1);
  return {keep, width, ~std::uint64_t{0} / width, categories};
}
#endif

DPK_HD std::uint64_t high_product(std::uint64_t a, std::uint64_t b) {
#if defined(__CUDACC__)
  return __umul64hi(a, b);
#else
  return static_cast<std::uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
#endif
}

// v / width by one multiplication: the quotient by the rounded reciprocal is at most one too small.
template <class V>
DPK_HD V width_quotient(const Lies& lies, V v) {
  const V q = high_product(v, lies.reciprocal);
  return q + (v - q * lies.width >= lies.width ? 1 : 0);
}

// By how many categories a word moves its symbol.
DPK_HD std::uint32_t lie_of(const Lies& lies, std::uint64_t word) {
  const std::uint64_t lie = width_quotient(lies, word - lies.keep), last = lies.categories - 2;
  const auto told = static_cast<std::uint32_t>(lie < last ? lie : last);
  return word < lies.keep ? 0u : 1u + told;
}

// The category `move` further; both are below or at most their number.
DPK_HD std::uint32_t moved_symbol(std::uint32_t symbol, std::uint32_t move,
                                  std::uint32_t categories) {
  const std::uint32_t moved = symbol + move;
  return moved >= categories ? moved - categories : moved;
}

}  // namespace dpkern
