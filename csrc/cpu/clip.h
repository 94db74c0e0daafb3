#pragma once
// Per-sample norms and clipped sums of explicit per-sample gradients, several tensors at a time,
// each row read from memory once: norm, factor and sum follow while the row is in the cache.

#include <cstdint>
#include <vector>

namespace dpkern::cpu {

enum class GradType : int { kFloat = 0, kDouble = 1, kBfloat16 = 2 };
enum class Style : int { kFlat = 0, kPerLayer = 1, kAutomatic = 2 };
enum class Arithmetic : int { kNormOnly = 0, kFloat = 1, kExact32 = 2, kExact64 = 3 };

// One parameter's per-sample gradients [rows, columns], contiguous, and where its sum goes.
struct ClipItem {
  const void* gradients;
  void* sum;  // added to: float (double for double gradients), int32 or int64; null: norms only
  std::int64_t columns;
  double max_norm;          // C of its clip group (the same for all items unless per layer)
  double per_unit;          // 1 / u, exact arithmetic only
  std::int64_t unit_bound;  // M = floor(C / u), exact arithmetic only
};

struct ClipPlan {
  std::int64_t rows;
  int p;  // 1 or 2
  Style style;
  Arithmetic arithmetic;
};

// norms[row, item] of every item, in float64. Rows with a non-finite entry add nothing to the sums.
void clip_sum(const ClipPlan& plan, GradType type, const std::vector<ClipItem>& items,
              double* norms, int threads);

}  // namespace dpkern::cpu
