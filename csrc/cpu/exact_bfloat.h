#pragma once
// Integer sums of linear gradients of several positions, by tiles of bfloat16 numbers where a
// processor has them: each float is the sum of two, and three of their four products are taken.
// docs/exact.md, lemma 3.

#include <cstdint>

#include "cpu/ghost_linear.h"

namespace dpkern::cpu::exact {

// Whether gradients of this shape are multiplied that way on the instruction set in use.
bool by_bfloat(const LinearShape& shape);

// out [p, d] += the integers of all samples; a factor of 0 leaves a sample out.
void add_by_bfloat(const float* a, const float* g, const float* factors, const LinearShape& shape,
                   std::int32_t* out, int threads);

// Sums over the positions of a sample: of |a_t| |g_t|, of |a_t| and of |g_t|; and the largest norm.
struct PositionNorms {
  double products = 0, inputs = 0, outputs = 0, largest = 0;
};

// At least the norm of the difference between the gradient that is truncated and the exact one.
double bfloat_error(const LinearShape& shape, const PositionNorms& norms);

}  // namespace dpkern::cpu::exact
