#pragma once
// The sizes of a linear layer, whose per-sample gradients are sum_t g[b,t,:] outer a[b,t,:].

#include <cstdint>

#include "cpu/ops.h"

namespace dpkern::cpu {

struct LinearShape {
  std::int64_t batch;
  std::int64_t positions;  // T
  std::int64_t inputs;     // d
  std::int64_t outputs;    // p
};

template <class Call>
LinearShape shape_of(const Call& call) {
  return {call.B, call.T, call.d, call.p};
}

}  // namespace dpkern::cpu
