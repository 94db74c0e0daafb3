#pragma once
// Matrix products of floats by tiles of bfloat16 numbers, where a processor has them: each float is
// exactly the sum of three, and six of their nine products are taken. What is left out is below
// 2^-22 of a product's size, as roundings are.

#include "cpu/ops.h"

namespace dpkern::cpu {

// Whether products with this many inputs and outputs are made that way on the instruction set in
// use. Rows do not enter: what becomes of one must not depend on the others.
bool by_bfloat(const Matmul<float>& call);

// Calls `other` for what has no sum of three: all of it, or rows with numbers of 2^127 and more.
void matmul_by_bfloat(const Matmul<float>& call, int threads,
                      void (*other)(const Matmul<float>&, int));

}  // namespace dpkern::cpu
