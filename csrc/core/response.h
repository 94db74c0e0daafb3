#pragma once
// Randomized response: the map from a 64-bit word to a symbol. Keep the symbol if word < keep.
// Otherwise return (symbol + 1 + j) mod categories with
// j = min((word - keep) / width, categories - 2).

#include "core/layouts.h"
#include "core/numeric.h"

namespace dpkern {

#if !defined(__CUDACC__)
inline ResponseParams make_response_params(std::uint32_t categories, std::uint64_t keep) {
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
DPK_HD V width_quotient(const ResponseParams& response, V v) {
  const V q = high_product(v, response.reciprocal);
  return q + (v - q * response.width >= response.width ? 1 : 0);
}

// The number of categories by which a word moves its symbol: 0, or 1 + j.
DPK_HD std::uint32_t response_shift(const ResponseParams& response, std::uint64_t word) {
  const std::uint64_t lie = width_quotient(response, word - response.keep),
                      last = response.categories - 2;
  const auto told = static_cast<std::uint32_t>(lie < last ? lie : last);
  return word < response.keep ? 0u : 1u + told;
}

// The category `move` further on; `symbol` is below `categories`, `move` at most that.
DPK_HD std::uint32_t moved_symbol(std::uint32_t symbol, std::uint32_t move,
                                  std::uint32_t categories) {
  const std::uint32_t moved = symbol + move;
  return moved >= categories ? moved - categories : moved;
}

}  // namespace dpkern
