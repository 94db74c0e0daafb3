#pragma once
// Per-sample norms and clipped sums of explicit per-sample gradients, several tensors at a time,
// each row read from memory once: norm, factor and sum follow while the row is in the cache.

#include <cstdint>
#include <vector>

#include "core/layouts.h"

namespace dpkern::cpu {

// One parameter's per-sample gradients [rows, columns], contiguous, and where its sum goes.
struct ClipItem {
  const void* gradients;
  void* sum;  // added to: float (double for double gradients), int32 or int64; null: norms only
  std::int64_t columns;
  double max_norm;          // C of its clip group (the same for all items unless per layer)
  double per_unit;          // 1 / u, exact arithmetic only
  std::int64_t unit_bound;  // M = floor(C / u), exact arithmetic only
};

// norms[row, item] of every item, in float64. Rows with a non-finite entry add nothing to the sums.
void clip_sum(const ClipPlan& plan, GradType type, const std::vector<ClipItem>& items,
              double* norms, int threads);

}  // namespace dpkern::cpu
