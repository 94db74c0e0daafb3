#pragma once
// Tiles of Intel's AMX: 16 rows of 64 bytes, whose products 16 instructions of AVX-512 would make.

#include "cpu/isa.h"

#if DPK_X86
#include <immintrin.h>

#include <cstdint>
#include <utility>

#define DPK_AMX \
  __attribute__((target("arch=x86-64-v4,avx512vnni,avx512bf16,amx-tile,amx-int8,amx-bf16")))

namespace dpkern::cpu {

constexpr int kTileRows = 16;
constexpr int kTileBytes = 64;

// Eight whole tiles, for as long as it lives.
class AmxTiles {
 public:
  DPK_AMX AmxTiles() {
    Config config;
    // The intrinsic names eight bytes of it: what is written to the others could be left out.
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  DPK_AMX ~AmxTiles() { _tile_release(); }
  AmxTiles(const AmxTiles&) = delete;
  AmxTiles& operator=(const AmxTiles&) = delete;

 private:
  struct alignas(64) Config {
    std::uint8_t palette = 1, start = 0, reserved[14] = {};
    std::uint16_t bytes[16] = {kTileBytes, kTileBytes, kTileBytes, kTileBytes,
                               kTileBytes, kTileBytes, kTileBytes, kTileBytes};
    std::uint8_t rows[16] = {kTileRows, kTileRows, kTileRows, kTileRows,
                             kTileRows, kTileRows, kTileRows, kTileRows};
  };
};

using Floats = Vector<float, kTileRows>;
using Words = Vector<std::uint32_t, kTileRows>;

// The first `count` of 16 numbers, and zeros.
DPK_AMX DPK_INLINE inline Floats some(const float* from, std::int64_t count) {
  if (count >= kTileRows) return reinterpret_cast<Floats>(_mm512_loadu_ps(from));
  if (count <= 0) return Floats{};
  const auto mask = static_cast<__mmask16>((1u << count) - 1);
  return reinterpret_cast<Floats>(_mm512_maskz_loadu_ps(mask, from));
}

// The nearest bfloat16 number, in the high half of each lane.
DPK_INLINE inline Words nearest(Floats x) {
  return (reinterpret_cast<Words>(x) + 0x8000u) & 0xffff0000u;
}

template <int kBit, int... l>
DPK_INLINE inline void exchange(Words& x, Words& y, std::integer_sequence<int, l...>) {
  const Words low = __builtin_shufflevector(x, y, ((l & kBit) == 0 ? l : 16 + l - kBit)...);
  const Words high = __builtin_shufflevector(x, y, ((l & kBit) == 0 ? l + kBit : 16 + l)...);
  x = low;
  y = high;
}

template <int kBit>
DPK_INLINE inline void transpose_by(Words rows[kTileRows]) {
#pragma GCC unroll 16
  for (int i = 0; i < kTileRows; ++i) {
    if ((i & kBit) == 0) {
      exchange<kBit>(rows[i], rows[i + kBit], std::make_integer_sequence<int, kTileRows>{});
    }
  }
}

// Rows of lanes become columns.
DPK_INLINE inline void transpose(std::uint8_t* tile) {
  Words rows[kTileRows];
#pragma GCC unroll 16
  for (int m = 0; m < kTileRows; ++m) __builtin_memcpy(rows + m, tile + m * kTileBytes, kTileBytes);
  transpose_by<8>(rows);
  transpose_by<4>(rows);
  transpose_by<2>(rows);
  transpose_by<1>(rows);
#pragma GCC unroll 16
  for (int m = 0; m < kTileRows; ++m) __builtin_memcpy(tile + m * kTileBytes, rows + m, kTileBytes);
}

}  // namespace dpkern::cpu
#endif
