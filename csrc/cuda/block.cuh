#pragma once
// Fused products, and totals over a block, shared by the kernels of the frequency domain.

#include "cuda/rows.cuh"

namespace dpkern::cuda {

__device__ __forceinline__ float fused(float a, float b, float c) { return ::fmaf(a, b, c); }
__device__ __forceinline__ double fused(double a, double b, double c) { return ::fma(a, b, c); }

__device__ __forceinline__ double larger(double a, double b) { return a > b ? a : b; }

// The sum or the largest value over the block, in thread 0 and in a fixed order.
template <int kThreads>
struct BlockTotals {
  static constexpr int kCount = kThreads / kWarp;
  __device__ __forceinline__ static double sum(double x, double* room) {
    const int thread = static_cast<int>(threadIdx.x);
    x = warp_sum(x);
    if (thread % kWarp == 0) room[thread / kWarp] = x;
    __syncthreads();
    double total = 0;
    DPK_UNROLL
    for (int i = 0; i < kCount; ++i) total += room[i];
    __syncthreads();
    return total;
  }
  __device__ __forceinline__ static double most(double x, double* room) {
    const int thread = static_cast<int>(threadIdx.x);
    DPK_UNROLL
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      x = larger(x, __shfl_xor_sync(0xffffffffu, x, distance));
    }
    if (thread % kWarp == 0) room[thread / kWarp] = x;
    __syncthreads();
    double total = 0;
    DPK_UNROLL
    for (int i = 0; i < kCount; ++i) total = larger(total, room[i]);
    __syncthreads();
    return total;
  }
};

}  // namespace dpkern::cuda
