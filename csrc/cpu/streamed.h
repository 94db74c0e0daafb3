#pragma once
// Large results written past the caches.

#include <algorithm>
#include <cstdint>

#include "cpu/isa.h"

#if DPK_X86
#include <immintrin.h>
#endif

namespace dpkern::cpu {

// So many results are for later: they pass by the caches, where the model's work is, and the
// processor need not read the lines that it is about to overwrite.
constexpr std::int64_t kStreamed = 1 << 20;

template <class T>
void copy_past_caches(const T* from, int count, T* to) {
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

// Streamed stores are seen by others in the order of what follows.
inline void end_of_streamed() {
#if DPK_X86
  _mm_sfence();
#endif
}

}  // namespace dpkern::cpu
