#pragma once
// Per-sample weight gradients of 2-D convolutions (1-D ones have height 1): kept, or squared and
// dropped.

#include <cstdint>

#include "cpu/ops.h"

namespace dpkern::cpu {

// The channels that lie innermost in memory.
enum class ConvLayout : int {
  kInputsLast = 0,   // [co, kh, kw, ci / groups]
  kOutputsLast = 1,  // [ci, kh, kw, co]
  kPlain = 2         // [co, ci / groups, kh, kw]
};

// The order of dimensions in which conv_gradient writes a sample.
ConvLayout conv_layout(const Geometry& plan, bool wide);

// conv_norm from Gram matrices over positions; there must be one group.
template <class T>
void conv_gram_norm(const ConvNorm<T>& call, int threads);

}  // namespace dpkern::cpu
