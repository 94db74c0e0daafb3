#pragma once
// What a device is asked for: noise of the coefficients of `rows` x `columns` targets.

#include "core/coef.h"
#include "core/update_plan.h"

namespace dpkern {

// Element i has its linear coefficient at position linear + i, its quadratic one at quadratic + i.
struct CoefPlan {
  Stream stream;
  Stream rounding;
  std::uint64_t linear;
  std::uint64_t quadratic;
  const std::int32_t* draws;           // made ahead (kDraws)
  const std::uint16_t* rounding_bits;  // made ahead
  std::int64_t linear_at;              // where the draw of element 0 stands among these
  std::int64_t quadratic_at;
  const void* per_units;  // 1 / u of each row, in the targets' type; null: `per_unit` for all
  const void* cells;      // and its cell
  double per_unit;
  double cell;
  std::int64_t rows;
  std::int64_t columns;
  NoiseSource noise;
  CoefForm form;
  std::int32_t wide;       // targets are double
  std::int32_t aligned16;  // every array of a `perturb`, and the draws, begin at 16 bytes
};

}  // namespace dpkern
