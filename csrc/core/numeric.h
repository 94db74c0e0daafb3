#pragma once
// Types and qualifiers by which one core function compiles for the host, for vectors of lanes and
// for a device.

#include "core/std.h"

#if defined(__CUDACC__)
// Device code only: the host side of a CUDA source does no arithmetic of its own.
#define DPK_HD static __device__ __forceinline__
#define DPK_ROLLED _Pragma("unroll 1")
#else
// Internal linkage as well as inlining: each instruction-set version gets its own copy, and no
// linker may merge an AVX-512 body into a baseline caller.
#define DPK_HD static inline __attribute__((always_inline))
#define DPK_ROLLED
#endif

namespace dpkern {

// A "word" W is uint32_t or a vector of uint32_t lanes; its signed twin has the same bits.
template <class W>
struct SignedTwin {
  typedef decltype(W{} < W{}) type;  // comparing vectors gives signed lanes
};
template <>
struct SignedTwin<std::uint32_t> {
  typedef std::int32_t type;
};
template <class W>
DPK_HD typename SignedTwin<W>::type as_signed(const W& x) {
  return (typename SignedTwin<W>::type)x;
}

// A word as an index into a table.
DPK_HD std::uint32_t index_of(std::uint32_t x) { return x; }

// All ones where a == b.
DPK_HD std::uint32_t mask_equal(std::uint32_t a, std::uint32_t b) { return a == b ? ~0u : 0u; }
template <class W>
DPK_HD W mask_equal(const W& a, const W& b) {
  return (W)(a == b);
}

// All ones where a < b; both below 2^31, because signed comparison is the cheap one on vectors.
DPK_HD std::uint32_t mask_less(std::uint32_t a, std::uint32_t b) { return a < b ? ~0u : 0u; }
template <class W>
DPK_HD W mask_less(const W& a, const W& b) {
  return (W)(as_signed(a) < as_signed(b));
}

template <class W>
DPK_HD W select(const W& mask, const W& yes, const W& no) {
  return (mask & yes) | (~mask & no);
}

// The top bit in every bit.
template <class W>
DPK_HD W spread_top_bit(const W& x) {
  return (W)(as_signed(x) >> 31);
}

// The same number in every lane.
template <class W>
DPK_HD W broadcast(std::uint32_t x) {
  return W{} + x;
}

}  // namespace dpkern
