#pragma once
// One thread's share of a noise tile: lane l of 16 makes the 32 coordinates 16 k + l into shared
// memory, where a loop that is not unrolled can index them. They are a law's, from three cipher
// blocks, or a source's.

#include "core/cdt.h"
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

// In the place of a law: whatever source the `Draws` name.
struct Source {};
template <>
__device__ __forceinline__ void load_table<Source>(TileShared&) {
  __syncthreads();
}

// Draws that lie in memory; positions beside them are nobody's.
__device__ __forceinline__ void copy_lane(const Draws& draws, std::uint64_t position,
                                          std::int32_t* mine) {
  for (int k = 0; k < kPerThread; ++k, position += kLanes) {
    const std::uint64_t at = position - draws.first;
    mine[k * kTileThreads] = at < static_cast<std::uint64_t>(draws.count) ? draws.values[at] : 0;
  }
}

// Samples in reading order: the cursor walks round the table.
template <class Sample>
__device__ __forceinline__ void read_lane(const Draws& draws, std::uint64_t position,
                                          std::int32_t* mine) {
  const Sample* const table = static_cast<const Sample*>(draws.table);
  const std::int64_t from_first = static_cast<std::int64_t>(position - draws.first);
  std::int64_t at = (from_first % draws.entries + draws.cursor) % draws.entries;
  if (at < 0) at += draws.entries;
  const std::int64_t further = kLanes % draws.entries;
  for (int k = 0; k < kPerThread; ++k) {
    mine[k * kTileThreads] =
        static_cast<std::int32_t>(static_cast<std::uint32_t>(table[at]) << draws.shift);
    at += further;
    if (at >= draws.entries) at -= draws.entries;
  }
}

// Magnitudes from a cumulative table, by four cipher blocks of two words each.
__device__ __forceinline__ void look_up_lane(const Draws& draws, const TileLane& seat,
                                             std::int32_t* mine) {
  constexpr int kGroups = kCdtWords * kTile / 256;  // of 16 blocks
  constexpr int kEach = 16 / kCdtWords;             // coordinates of a block
  const CdtTable table = cdt_table(draws.table, draws.entries);
  DPK_ROLLED
  for (int q = 0; q < kGroups; ++q) {
    std::uint32_t block[16];
    const std::uint64_t counter =
        16 * kGroups * seat.tile + static_cast<std::uint64_t>(16 * q + seat.lane);
    chacha_block(draws.stream, draws.stream.n0, counter, block);
    DPK_UNROLL
    for (int p = 0; p < kEach; ++p) {
      const int k = kEach * q + p;
      const std::uint32_t own = block[kCdtWords * p], index = block[kCdtWords * p + 1];
      std::uint32_t undecided = 0;
      std::uint32_t magnitude = cdt_magnitude(index, table.guide[cdt_bucket(index)], undecided);
      if (undecided != 0) {
        const std::uint64_t position =
            seat.tile * kTile + static_cast<std::uint64_t>(kLanes * k + seat.lane);
        magnitude = cdt_search(table, draws.stream, position, index);
      }
      const std::uint32_t x = draws.law == Distribution::kGaussian
                                  ? cdt_value<Gaussian>(magnitude, own)
                                  : cdt_value<Laplace>(magnitude, own);
      mine[k * kTileThreads] = static_cast<std::int32_t>(x);
    }
  }
}

__device__ __forceinline__ void source_lane(const Draws& draws, const TileLane& seat,
                                            TileShared& room) {
  std::int32_t* const mine = &room.draws[0][threadIdx.x];
  const std::uint64_t position = seat.tile * kTile + static_cast<std::uint64_t>(seat.lane);
  switch (draws.source) {
    case DrawSource::kStream:
      return;
    case DrawSource::kValues:
      return copy_lane(draws, position, mine);
    case DrawSource::kSamples16:
      return read_lane<std::int16_t>(draws, position, mine);
    case DrawSource::kSamples32:
      return read_lane<std::int32_t>(draws, position, mine);
    case DrawSource::kCdt:
      return look_up_lane(draws, seat, mine);
  }
}

// draws[k][thread] = draw at position 512 tile + 16 k + lane.
template <class Law>
__device__ __forceinline__ void draw_lane(const Draws& draws, const TileLane& seat,
                                          TileShared& room) {
  const Stream& stream = draws.stream;
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

template <>
__device__ __forceinline__ void draw_lane<Source>(const Draws& draws, const TileLane& seat,
                                                  TileShared& room) {
  source_lane(draws, seat, room);
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

// The bits of a tile's positions: the rounding stream's.
template <class Law>
__device__ __forceinline__ void fill_bits(const Draws&, const Stream& rounding,
                                          const TileLane& seat, RoundingRoom& rounded) {
  rounded.fill(rounding, seat);
}

__device__ __forceinline__ const std::uint16_t* bits_made(const Draws& draws) {
  return reinterpret_cast<const std::uint16_t*>(draws.rounding);
}

// Of a source: those that it has made ahead, if any.
template <>
__device__ __forceinline__ void fill_bits<Source>(const Draws& draws, const Stream& rounding,
                                                  const TileLane& seat, RoundingRoom& rounded) {
  if (draws.rounding == nullptr) return rounded.fill(rounding, seat);
  const std::uint64_t first =
      seat.tile * kTile + static_cast<std::uint64_t>(seat.lane) - draws.first;
  for (int k = 0; k < kPerThread; k += 2) {
    std::uint32_t word = 0;
    for (int half = 0; half < 2; ++half) {
      const std::uint64_t at = first + static_cast<std::uint64_t>(kLanes * (k + half));
      const bool own = at < static_cast<std::uint64_t>(draws.count);
      if (own) word |= static_cast<std::uint32_t>(bits_made(draws)[at]) << (16 * half);
    }
    rounded.words[k / 2][threadIdx.x] = word;
  }
}

// v / u of a float sum, 0 if it is not finite, which `bad` counts.
template <class T>
__device__ __forceinline__ T finite_units(T value, T per_unit, int& bad) {
  const T units = value * per_unit;
  if (std::isfinite(units)) return units;
  ++bad;
  return T{0};
}

}  // namespace dpkern::cuda
