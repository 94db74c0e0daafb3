#pragma once
// Function multiversioning: one body, compiled once per instruction set, chosen at run time.

#include <cstdint>
#include <type_traits>

#if defined(__x86_64__)
#define DPK_X86 1
#define DPK_AVX2 __attribute__((target("arch=x86-64-v3")))
#define DPK_AVX512 __attribute__((target("arch=x86-64-v4")))
#define DPK_VNNI __attribute__((target("arch=x86-64-v4,avx512vnni")))
#define DPK_VBMI __attribute__((target("arch=x86-64-v4,avx512vnni,avx512vbmi")))
#else
#define DPK_X86 0
#endif
#define DPK_INLINE __attribute__((always_inline))

namespace dpkern::cpu {

enum class Isa : int {
  kBaseline = 0,
  kAvx2 = 1,
  kAvx512 = 2,
  kAvx512Vnni = 3,
  kAvx512Vbmi = 4,
  kAmx = 5
};

// The best instruction set of this processor.
Isa detected_isa();
// The one in use: the detected one unless `use_isa` lowered it.
Isa isa();
// False, and nothing changed, if this processor lacks it. For tests: no guarantee depends on it.
bool use_isa(Isa wanted);
// Whether Intel made this processor: its mathematics library prefers them.
bool is_intel();

// N lanes of one type (the width is a template argument, hence the class).
template <class T, int N>
struct VectorOf {
  typedef T type __attribute__((vector_size(N * sizeof(T))));
};
template <class T, int N>
using Vector = typename VectorOf<T, N>::type;

#if DPK_X86
template <class F>
DPK_AVX2 void call_avx2(const F& body) {
  body();
}
template <class F>
DPK_AVX512 void call_avx512(const F& body) {
  body();
}
#endif

// Run an always-inline callable compiled for the instruction set in use.
template <class F>
void versioned(const F& body) {
#if DPK_X86
  if (isa() >= Isa::kAvx512) return call_avx512(body);
  if (isa() == Isa::kAvx2) return call_avx2(body);
#endif
  body();
}

// The same for a body that takes the bytes of a vector register as an integral_constant.
template <int kBytes>
using Width = std::integral_constant<int, kBytes>;

template <class F>
void versioned_by_width(const F& body) {
#if DPK_X86
  if (isa() >= Isa::kAvx512) return call_avx512([&]() DPK_INLINE { body(Width<64>{}); });
  if (isa() == Isa::kAvx2) return call_avx2([&]() DPK_INLINE { body(Width<32>{}); });
#endif
  body(Width<16>{});
}

}  // namespace dpkern::cpu
