#pragma once
// The sizes of an embedding, whose per-sample gradients have row v: the sum of g[b, t, :] over t
// with ids[b, t] = v.

#include <cstdint>
#include <limits>

#include "cpu/ops.h"

namespace dpkern::cpu {

struct EmbeddingShape {
  std::int64_t batch;
  std::int64_t positions;  // T
  std::int64_t columns;    // D
  std::int64_t padding;    // positions with this id are ignored
};

// A negative id is one like any other where only norms are taken; this one marks no padding.
constexpr std::int64_t kNoPadding = std::numeric_limits<std::int64_t>::min();

}  // namespace dpkern::cpu
