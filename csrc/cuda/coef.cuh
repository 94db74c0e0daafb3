#pragma once
// Noise steps and sums in lanes, shared by the kernels of coefficients.

#include "core/coef.h"
#include "core/layouts.h"
#include "cuda/device.cuh"
#include "cuda/draws.cuh"

namespace dpkern::cuda {

// 1 / u and the cell of a row.
template <class T>
struct Steps {
  T per_unit;
  T cell;

  __device__ __forceinline__ Steps(const CoefPlan& plan, std::int64_t row)
      : per_unit(static_cast<T>(plan.per_unit)), cell(static_cast<T>(plan.cell)) {
    if (plan.per_units == nullptr) return;
    per_unit = static_cast<const T*>(plan.per_units)[row];
    cell = static_cast<const T*>(plan.cells)[row];
  }
  __device__ __forceinline__ T noised(T value, std::uint32_t bits, std::int32_t x) const {
    return noised_coefficient(value, per_unit, cell, bits, x);
  }
};

// The sum of the sixteen lanes, in lane 0, by halves as in `sum_of_lanes`. All threads of the warp.
__device__ __forceinline__ double meet(double sum) {
  for (int half = kLossLanes / 2; half > 0; half /= 2) {
    sum = sum + __shfl_down_sync(0xffffffffu, sum, half);
  }
  return sum;
}

}  // namespace dpkern::cuda
