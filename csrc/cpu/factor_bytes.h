#pragma once
// Sums of products of 16-bit factors by tiles of bytes, where a processor has them.

#include <cstdint>

#include "cpu/factor_rounding.h"

namespace dpkern::cpu::exact {

// out [p, d] += the integers of the samples. Only for Isa::kAmx.
template <class F>
void add_by_bytes(const Samples<F>& samples, std::int32_t* out, int threads);

}  // namespace dpkern::cpu::exact
