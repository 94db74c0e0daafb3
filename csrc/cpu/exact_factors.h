#pragma once
// Integer sums of linear gradients of one position, by products of small integers.

#include <cstdint>

#include "cpu/ghost_linear.h"

namespace dpkern::cpu {

// out [p, d] += the integers of all samples (docs/exact.md, lemma 2); shape.positions is 1.
template <class F>
void add_factored(const F* a, const F* g, const F* factors, const LinearShape& shape,
                  std::int32_t* out, int threads);

}  // namespace dpkern::cpu
