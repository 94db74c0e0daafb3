#pragma once
// Weighted sums of linear gradients of floats by tiles of bfloat16 numbers, where a processor has
// them: the product of product_bfloat.h over samples and positions. docs/ghost.md.

#include <cstdint>
#include <vector>

#include "cpu/ghost_linear.h"
#include "cpu/linear_parts.h"

namespace dpkern::cpu::bfloat {

// Whether sums of this shape are made that way on the instruction set in use.
bool takes_sum(const LinearShape& shape);

// Positions that are multiplied together.
std::int64_t sum_block(const LinearShape& shape);

// out[rows, columns] of [p, d] += the products of all runs, at most sum_block positions. False, and
// nothing added, if there are numbers without a bfloat16 number next to them.
bool add_runs(const std::vector<Run<float>>& runs, const LinearShape& shape, Range rows,
              Range columns, float* out);

}  // namespace dpkern::cpu::bfloat
