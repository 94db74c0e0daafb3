#pragma once
// Non-temporal stores for large results.

#include <algorithm>
#include <cstdint>

#include "cpu/isa.h"

#if DPK_X86
#include <immintrin.h>
#endif

namespace dpkern::cpu {

// From this many elements on, results are written with non-temporal stores: they would evict the
// model's working set, and full-line stores avoid the read for ownership.
constexpr std::int64_t kNonTemporalMin = 1 << 20;

template <class T>
void nontemporal_copy(const T* from, int count, T* to) {
#if DPK_X86
  const int bytes = count * static_cast<int>(sizeof(T));
  if (bytes % 16 == 0 && reinterpret_cast<std::uintptr_t>(to) % 16 == 0) {
    const auto* source = reinterpret_cast<const char*>(from);
    auto* target = reinterpret_cast<char*>(to);
    for (int i = 0; i < bytes; i += 16) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(target + i),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i)));
    }
    return;
  }
#endif
  std::copy(from, from + count, to);
}

// Order non-temporal stores before the stores that follow, for other cores.
inline void nontemporal_fence() {
#if DPK_X86
  _mm_sfence();
#endif
}

}  // namespace dpkern::cpu
