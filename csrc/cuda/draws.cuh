#pragma once
// One thread's share of a noise tile: lane l of 16 makes the 32 coordinates 16 k + l, from three
// cipher blocks, into shared memory, where a loop that is not unrolled can index them.

#include "core/lattice.h"
#include "cuda/device.cuh"

namespace dpkern::cuda {

constexpr int kTileThreads = 128;  // of a block
constexpr int kTileBlocks = 8;     // on a multiprocessor, at least: 64 registers a thread
constexpr int kTilesPerBlock = kTileThreads / kLanes;
constexpr int kPerThread = kTile / kLanes;  // coordinates

struct TileRoom {
  std::uint32_t table[256];
  std::int32_t draws[kPerThread][kTileThreads];  // [k][thread]: no two threads share a bank
};

struct TableLookup {
  const std::uint32_t* table;
  __device__ __forceinline__ std::uint32_t operator()(std::uint32_t column, int) const {
    return table[column];
  }
};

// All threads of the block, before the first draw.
template <class Law>
__device__ __forceinline__ void load_table(TileRoom& room) {
  for (int i = static_cast<int>(threadIdx.x); i < 256; i += kTileThreads) {
    room.table[i] = Law::table()[i];
  }
  __syncthreads();
}

// draws[k][thread] = draw at position 512 tile + 16 k + lane.
template <class Law>
__device__ __forceinline__ void draw_lane(const Stream& stream, std::uint64_t tile, int lane,
                                          TileRoom& room) {
  const TableLookup lookup{room.table};
  std::int32_t* const mine = &room.draws[0][threadIdx.x];
  std::uint32_t words[48];
  std::uint32_t escapes = 0;
  DPK_UNROLL
  for (int q = 0; q < 3; ++q) {
    chacha_block(stream, stream.n0, 48 * tile + static_cast<std::uint64_t>(16 * q + lane),
                 words + 16 * q);
    DPK_UNROLL
    for (int group = 0; group < 8; ++group) {   // four coordinates from six words
      if ((6 * group + 5) / 16 != q) continue;  // the last of them is in another block
      DPK_UNROLL
      for (int b = 0; b < 4; ++b) {
        std::uint32_t escaped = 0;
        const std::uint32_t x = draw<Law>(words + 6 * group, b, lookup, escaped);
        const int k = 4 * group + b;
        mine[k * kTileThreads] = static_cast<std::int32_t>(x);
        escapes |= escaped & (1u << k);
      }
    }
  }
  for (; escapes != 0; escapes &= escapes - 1) {  // one thread in 450
    const int k = __ffs(static_cast<int>(escapes)) - 1;
    const std::uint64_t position = tile * kTile + static_cast<std::uint64_t>(kLanes * k + lane);
    std::int32_t& x = mine[k * kTileThreads];
    x = extend_escape<Law>(stream, position, x);
  }
}

// The block whose half k belongs to this lane's coordinate k.
__device__ __forceinline__ void rounding_block(const Stream& rounding, std::uint64_t tile, int lane,
                                               std::uint32_t words[16]) {
  chacha_block(rounding, rounding.n0, kLanes * tile + static_cast<std::uint64_t>(lane), words);
}

}  // namespace dpkern::cuda
