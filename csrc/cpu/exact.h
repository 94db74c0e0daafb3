#pragma once
// How far sums of products in F can lie from their exact values, for integer sums (docs/exact.md).

#include <cstdint>
#include <limits>
#include <type_traits>

namespace dpkern::cpu {

template <class F>
constexpr double kRoundoff = static_cast<double>(std::numeric_limits<F>::epsilon()) / 2;
// What one operation loses at most where a result underflows or is flushed to zero.
template <class F>
constexpr double kFlushed = static_cast<double>(std::numeric_limits<F>::min());
// Roundings of an entry besides one for each position: products that are not fused, and the rows of
// an embedding table that is tied to the layer (their sum, and its addition).
constexpr std::int64_t kOtherRoundings = 4;

// How far sums of products, each of which meets at most n roundings, lie from their exact values;
// `absolute` bounds the sums of absolute products. Infinite where a chain of F could overflow.
template <class F>
double chain_error(std::int64_t n, double absolute) {
  const double total = static_cast<double>(n) * kRoundoff<F>;
  const bool fits = absolute < static_cast<double>(std::numeric_limits<F>::max()) / 4;
  // 1.001: room for the rounding of `absolute`, a sum of doubles. NaN fits nowhere.
  return fits && total < 0.5 ? 1.001 * total / (1 - total) * absolute
                             : std::numeric_limits<double>::infinity();
}

}  // namespace dpkern::cpu
