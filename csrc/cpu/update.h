#pragma once
// Noise, division by the public batch size and the optimizer rule in one pass over the parameters.

#include <cstdint>
#include <vector>

#include "core/layouts.h"
#include "cpu/noise.h"

namespace dpkern::cpu {

// One parameter tensor; `state1`, `state2`: momentum buffer, or first and second moments, or null.
struct UpdateItem {
  void* param;
  const void* sum;
  void* state1;
  void* state2;
  std::int64_t size;
  std::uint64_t first_position;  // of its noise; element i stands at first_position + i
  double scale;                  // certified noise scale; read only with noise on
};

struct UpdateNoise {
  bool on;
  Distribution law;
  Stream stream;
  Stream rounding;  // only read for float sums
  Ahead ahead;      // what the streams gave before; all null: nothing
};

// gradient = gradient_scale * (noisy sum). Returns the number of sums that were not finite (each
// counts as zero). T = float or double, the type of parameters, states and float sums.
template <class T>
std::int64_t update_step(const Rule& rule, const UpdateNoise& noise, SumType sum_type,
                         double gradient_scale, const std::vector<UpdateItem>& items, int threads);

}  // namespace dpkern::cpu
