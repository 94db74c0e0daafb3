#pragma once
// One thread's share of a noise tile: lane l of 16 makes the 32 coordinates 16 k + l, from three
// cipher blocks, into shared memory, where a loop that is not unrolled can index them.

#include "core/lattice.h"
#include "cuda/device.cuh"

namespace dpkern::cuda {

constexpr int kTileBlocks = 8;              // minimum per multiprocessor: 64 registers a thread
constexpr int kPerThread = kTile / kLanes;  // coordinates

// One thread's lane in a tile of the tensor, which begins at position `first`. Its
// coordinate k is element index + 16 k, which may lie before the tensor or behind its end.
struct TileLane {
  std::uint64_t tile;
  int lane;
  std::int64_t index;

  // `piece`: which of the tiles that the tensor touches.
  __device__ __forceinline__ TileLane(std::uint64_t first, std::int64_t piece) {
    tile = first / kTile + static_cast<std::uint64_t>(piece);
    lane = static_cast<int>(threadIdx.x) % kLanes;
    index = static_cast<std::int64_t>(tile * kTile - first) + lane;
  }
};

// The piece of this thread, of all the tiles of the grid.
__device__ __forceinline__ std::int64_t piece_of_thread() {
  return blockIdx.x * static_cast<std::int64_t>(kTilesPerBlock) +
         static_cast<int>(threadIdx.x) / kLanes;
}

struct TileShared {
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
__device__ __forceinline__ void load_table(TileShared& room) {
  for (int i = static_cast<int>(threadIdx.x); i < 256; i += kTileThreads) {
    room.table[i] = Law::table()[i];
  }
  __syncthreads();
}

// draws[k][thread] = draw at position 512 tile + 16 k + lane.
template <class Law>
__device__ __forceinline__ void draw_lane(const Stream& stream, const TileLane& seat,
                                          TileShared& room) {
  const TableLookup lookup{room.table};
  std::int32_t* const mine = &room.draws[0][threadIdx.x];
  std::uint32_t words[48];
  std::uint32_t escapes = 0;
  DPK_UNROLL
  for (int q = 0; q < 3; ++q) {
    chacha_block(stream, stream.n0, 48 * seat.tile + static_cast<std::uint64_t>(16 * q + seat.lane),
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
    const std::uint64_t position =
        seat.tile * kTile + static_cast<std::uint64_t>(kLanes * k + seat.lane);
    std::int32_t& x = mine[k * kTileThreads];
    x = extend_escape<Law>(stream, position, x);
  }
}

// Each thread's block of rounding bits; half k of its words belongs to coordinate k.
struct RoundingRoom {
  std::uint32_t words[kPerThread / 2][kTileThreads];

  __device__ __forceinline__ void fill(const Stream& rounding, const TileLane& seat) {
    std::uint32_t block[16];
    chacha_block(rounding, rounding.n0, kLanes * seat.tile + static_cast<std::uint64_t>(seat.lane),
                 block);
    DPK_UNROLL
    for (int i = 0; i < 16; ++i) words[i][threadIdx.x] = block[i];
  }
  __device__ __forceinline__ std::uint32_t bits(int k) const {
    return rounding_bits(words[k >> 1][threadIdx.x], k);
  }
};

// v / u of a float sum, 0 if it is not finite, which `bad` counts.
template <class T>
__device__ __forceinline__ T finite_units(T value, T per_unit, int& bad) {
  const T units = value * per_unit;
  if (std::isfinite(units)) return units;
  ++bad;
  return T{0};
}

}  // namespace dpkern::cuda
