#pragma once
// The declared layouts, atomics on 64-bit counters, and packs, shared by the kernels.

#include "core/layouts.h"

#if !defined(__CUDACC_RTC__)
#include <cuda_runtime.h>
#endif

#if defined(__CUDACC__)
#define DPK_UNROLL _Pragma("unroll")
#define DPK_NO_UNROLL _Pragma("unroll 1")
#else
#define DPK_UNROLL
#define DPK_NO_UNROLL
#endif

namespace dpkern::cuda {

__device__ __forceinline__ void add_atomically(std::int32_t* to, std::int32_t x) {
  atomicAdd(to, x);
}
__device__ __forceinline__ void add_atomically(std::int64_t* to, std::int64_t x) {
  atomicAdd(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(x));
}

// V values that lie side by side, read and written in as few accesses as 16 bytes each allow;
// V > 1 needs the address to be a multiple of the pack's size, at most 16.
template <class S, int V>
struct Pack {
  static constexpr int kAlign = V * sizeof(S) > 16 ? 16 : static_cast<int>(V * sizeof(S));
  struct alignas(kAlign) Values {
    S of[V];
  };
};

template <int V, class S>
__device__ __forceinline__ void load_pack(const S* from, S* to) {
  typedef typename Pack<S, V>::Values Values;
  const Values values = *reinterpret_cast<const Values*>(from);
  DPK_UNROLL
  for (int v = 0; v < V; ++v) to[v] = values.of[v];
}

template <int V, class S>
__device__ __forceinline__ void store_pack(const S* from, S* to) {
  typedef typename Pack<S, V>::Values Values;
  Values values;
  DPK_UNROLL
  for (int v = 0; v < V; ++v) values.of[v] = from[v];
  *reinterpret_cast<Values*>(to) = values;
}

// The task of a list that holds piece `at`: the last one that begins at or before it. Tasks without
// pieces begin where the next one does.
template <class Task>
__device__ __forceinline__ std::int64_t task_of(const Task* tasks, std::int64_t count,
                                                std::int64_t Task::* first, std::int64_t at) {
  std::int64_t low = 0;
  std::int64_t high = count;
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    if (tasks[middle].*first <= at) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace dpkern::cuda
