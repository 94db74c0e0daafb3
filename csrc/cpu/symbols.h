#pragma once
// Randomized response: every symbol keeps or changes by the value of one 64-bit word.

#include <cstdint>

#include "core/abi.h"

namespace dpkern::cpu {

// The lie that a word tells: word < keep: none, else number min((word - keep) / width, k - 2).
struct Lies {
  std::uint32_t categories;
  std::uint64_t keep;
};

inline std::uint64_t width_of(const Lies& lies) {
  // 2^64 - keep, which is not 0, in arithmetic modulo 2^64.
  return (std::uint64_t{0} - lies.keep) / (lies.categories - 1);
}

// out[i] = the response to x[i], a category below `categories`; T = uint8_t, int32_t or int64_t.
// Symbol i takes words 2 (first + i) and 2 (first + i) + 1 of the keystream.
template <class T>
void randomize(const Stream& stream, std::uint64_t first, const Lies& lies, const T* x,
               std::int64_t n, T* out, int threads);

}  // namespace dpkern::cpu
