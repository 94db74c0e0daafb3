#pragma once
// What the kernels share: how a kernel is started, and atomics on 64-bit counters.

#include "core/std.h"

#if !defined(__CUDACC_RTC__)
#include <cuda_runtime.h>
#endif

#if defined(__CUDACC__)
#define DPK_UNROLL _Pragma("unroll")
#else
#define DPK_UNROLL
#endif

// kernel<<<grid, block>>>(arguments...); defined already where kernels run emulated. FLAT: the
// kernel has no barrier and no exchange between its threads.
#if !defined(DPK_LAUNCH)
#define DPK_LAUNCH(kernel, grid, block, stream, ...) \
  kernel<<<grid, block, 0, static_cast<cudaStream_t>(stream)>>>(__VA_ARGS__)
#define DPK_LAUNCH_FLAT DPK_LAUNCH
#endif

namespace dpkern::cuda {

// Blocks of `per_block` that hold n. More than a grid may have fail at the launch.
inline unsigned int blocks_of(std::int64_t n, std::int64_t per_block) {
  const std::int64_t blocks = (n + per_block - 1) / per_block;
  return blocks > 0x7fffffff ? 0xffffffffu : static_cast<unsigned int>(blocks);
}

__device__ __forceinline__ void add_atomically(std::int32_t* to, std::int32_t x) {
  atomicAdd(to, x);
}
__device__ __forceinline__ void add_atomically(std::int64_t* to, std::int64_t x) {
  atomicAdd(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(x));
}

}  // namespace dpkern::cuda
