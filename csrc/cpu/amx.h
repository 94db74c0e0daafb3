#pragma once
// Tiles of Intel's AMX: 16 rows of 64 bytes, whose products 16 instructions of AVX-512 would make.

#include "cpu/isa.h"

#if DPK_X86
#include <immintrin.h>

#include <cstdint>

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
    _tile_loadconfig(&config);
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

}  // namespace dpkern::cpu
#endif
