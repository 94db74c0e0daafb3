#pragma once
// Norms and integer sums of linear gradients of several positions whose operands are rounded to
// 16-bit integers first: docs/exact.md, lemma 4.

#include <cstdint>

#include "cpu/ghost_linear.h"

namespace dpkern::cpu {

// squares[b]: at least the squared norm of sample b's gradient of rounded operands.
template <class F>
void operand_norms(const F* a, const F* g, const LinearShape& shape, double* squares, int threads);

// out [p, d] += integer parts of the factors times these gradients; a factor of 0 leaves one out.
template <class F>
void add_by_operands(const F* a, const F* g, const F* factors, const LinearShape& shape,
                     std::int32_t* out, int threads);

}  // namespace dpkern::cpu
