#pragma once
// What lets one core function compile for the host, for vectors of lanes and, later, for a device.

#include <cstdint>

#if defined(__CUDACC__)
#define DPK_HD __host__ __device__ __forceinline__
#else
// Internal linkage as well as inlining: each instruction-set version gets its own copy, and no
// linker may merge an AVX-512 body into a baseline caller.
#define DPK_HD static inline __attribute__((always_inline))
#endif

namespace dpkern {

// A "word" W is uint32_t or a vector of uint32_t lanes; comparisons give all ones or zero.
DPK_HD std::uint32_t mask_less(std::uint32_t a, std::uint32_t b) { return a < b ? ~0u : 0u; }
DPK_HD std::uint32_t mask_equal(std::uint32_t a, std::uint32_t b) { return a == b ? ~0u : 0u; }

template <class W>
DPK_HD W mask_less(const W& a, const W& b) {
  return reinterpret_cast<W>(a < b);
}
template <class W>
DPK_HD W mask_equal(const W& a, const W& b) {
  return reinterpret_cast<W>(a == b);
}

template <class W>
DPK_HD W select(const W& mask, const W& yes, const W& no) {
  return (mask & yes) | (~mask & no);
}

// The same number in every lane.
template <class W>
DPK_HD W broadcast(std::uint32_t x) {
  return W{} + x;
}

}  // namespace dpkern
