#pragma once
// Randomized response: every symbol keeps or changes by the value of one 64-bit word.

#include <cstdint>

#include "core/layouts.h"
#include "core/lies.h"

namespace dpkern::cpu {

// out[i] = the response to x[i], a category below `lies.categories`; T = uint8_t, int32_t or
// int64_t. Symbol i takes words 2 (first + i) and 2 (first + i) + 1 of the keystream.
template <class T>
void randomize(const Stream& stream, std::uint64_t first, const Lies& lies, const T* x,
               std::int64_t n, T* out, int threads);

}  // namespace dpkern::cpu
