#pragma once
// Maps of one operand, shared by the kernels that transform them: their scale, and retained bins.

#include "cuda/block.cuh"

namespace dpkern::cuda {

// 2^k for -1022 <= k <= 1022.
template <class T>
__device__ __forceinline__ T power_of_two(int k) {
  return static_cast<T>(__hiloint2double((1023 + k) << 20, 0));
}

// A sample is multiplied by 2^-k, which is exact: k is the exponent of its largest entry, as near
// as T's normal numbers have it. So entries are below 4, and the largest is at least 1, or as many
// times the least normal number as it was. The sample of zeros has k = 0.
template <class T>
__device__ __forceinline__ int exponent_of(double largest) {
  constexpr int kMost = sizeof(T) == 4 ? 126 : 1022;
  if (largest == 0) return 0;
  const int k = ((__double2hiint(largest) >> 20) & 0x7ff) - 1023;
  return k < -kMost ? -kMost : k > kMost ? kMost : k;
}

// The part of the work of a block: some channels of a group of a sample.
struct SpectralPart {
  std::int64_t set;  // [sample, group, split]
  std::int64_t sample, begin, end;
  __device__ __forceinline__ SpectralPart(const SpectralMaps& maps, std::int64_t of) : set(of) {
    const std::int64_t each = maps.channels / maps.groups, split = set % maps.splits;
    const std::int64_t group = set / maps.splits % maps.groups;
    sample = set / (maps.groups * maps.splits);
    begin = group * each + each * split / maps.splits;
    end = group * each + each * (split + 1) / maps.splits;
  }
  template <class T>
  __device__ __forceinline__ const T* map(const SpectralMaps& maps, std::int64_t channel) const {
    return static_cast<const T*>(maps.data) +
           (sample * maps.channels + channel) * maps.height * maps.width;
  }
};

// Write the retained bins [begin, end) of a map, all of which are turns of A - i B.
template <class T>
__device__ __forceinline__ void keep_bins(const SpectralMaps& maps, const SpectralKept& kept,
                                          int begin, int end, T a, T b, T back, std::int64_t sample,
                                          std::int64_t channel) {
  for (int i = begin; i < end; ++i) {
    const T* const turn = static_cast<const T*>(kept.turns) + 4 * static_cast<std::int64_t>(i);
    T* const to = static_cast<T*>(kept.out) +
                  2 * (kept.which[i] * maps.batch + sample) * maps.channels + channel;
    to[0] = back * fused(turn[0], a, turn[1] * b);
    to[maps.channels] = back * fused(turn[2], a, turn[3] * b);
  }
}

}  // namespace dpkern::cuda
