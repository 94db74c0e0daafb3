#pragma once
// What clipping and the ops on explicit gradients are asked for, on the host and on devices.

#include "core/std.h"

namespace dpkern {

enum class GradType : int { kFloat = 0, kDouble = 1, kBfloat16 = 2 };
enum class Style : int { kFlat = 0, kPerLayer = 1, kAutomatic = 2 };
enum class Arithmetic : int { kNormOnly = 0, kFloat = 1, kExact32 = 2, kExact64 = 3 };

struct ClipPlan {
  std::int64_t rows;
  int p;  // 1 or 2
  Style style;
  Arithmetic arithmetic;
};

// Clip factors from squared norms.
struct ClipRule {
  double max_norm;  // infinity: no clipping
  double scale;     // takes captured gradients to those of each sample's own loss
  bool automatic;
};

// Devices read lists of tensors from a table in their own memory. One parameter's per-sample
// gradients [rows, columns] without gaps, and where their sum goes (null: norms only).
struct RowTask {
  const void* rows;
  void* sum;
  std::int64_t columns;
  std::int64_t first_chunk;   // kChunk columns each, of all tasks before this one
  std::int64_t first_column;  // of all tasks before this one
};

constexpr std::int64_t kChunk = 4096;

// The clip group of the task at the same place; the numbers of exact arithmetic are ready-made.
struct ClipBound {
  double max_norm;          // C, the same for all tasks unless per layer
  double per_unit;          // 1 / u, exact arithmetic only
  std::int64_t unit_bound;  // M = floor(C / u), exact arithmetic only
};

}  // namespace dpkern
