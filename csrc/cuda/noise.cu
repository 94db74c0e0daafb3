// The noise generator: 128 threads make eight tiles of 512 coordinates, sixteen threads a tile.

#include "core/cdt.h"
#include "core/clip_factor.h"
#include "core/lattice.h"
#include "cuda/device.cuh"
#include "cuda/draws.cuh"

namespace dpkern::cuda {

__global__ void __launch_bounds__(kCipherThreads)
    keystream_kernel(Stream stream, std::uint64_t first_block, std::int64_t blocks,
                     std::uint32_t* out) {
  const std::int64_t i = blockIdx.x * static_cast<std::int64_t>(kCipherThreads) + threadIdx.x;
  if (i >= blocks) return;
  std::uint32_t words[16];
  chacha_block(stream, stream.n0, first_block + static_cast<std::uint64_t>(i), words);
  DPK_UNROLL
  for (int k = 0; k < 16; ++k) out[16 * i + k] = words[k];
}

template <class Law>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks)
    draws_kernel(Stream stream, std::uint64_t first, std::int64_t n, std::int32_t* x) {
  __shared__ TileShared room;
  load_table<Law>(room);
  const TileLane seat(first, piece_of_thread());
  if (seat.index - seat.lane >= n) return;
  draw_lane<Law>(stream, seat, room);
  for (int k = 0; k < kPerThread; ++k) {
    const std::int64_t i = seat.index + kLanes * k;
    if (i >= 0 && i < n) x[i] = room.draws[k][threadIdx.x];
  }
}

__global__ void __launch_bounds__(kTileThreads, kTileBlocks)
    rounding_kernel(Stream rounding, std::uint64_t first, std::int64_t n, std::uint16_t* bits) {
  __shared__ RoundingRoom room;
  const TileLane seat(first, piece_of_thread());
  room.fill(rounding, seat);
  for (int k = 0; k < kPerThread; ++k) {
    const std::int64_t i = seat.index + kLanes * k;
    if (i >= 0 && i < n) bits[i] = static_cast<std::uint16_t>(room.bits(k));
  }
}

// Draws from a table of samples in reading order, entry `start` first: the cursor walks round it.
template <class Sample>
__global__ void __launch_bounds__(kFlatThreads)
    samples_kernel(const Sample* table, std::int64_t entries, std::int64_t start,
                   std::int32_t shift, std::int64_t n, std::int32_t* x) {
  const std::int64_t begin = blockIdx.x * static_cast<std::int64_t>(kUpdatePiece) + threadIdx.x;
  std::int64_t at = (start + begin) % entries;
  const std::int64_t further = kFlatThreads % entries;
  for (int k = 0; k < kUpdatePiece / kFlatThreads; ++k) {
    const std::int64_t i = begin + k * kFlatThreads;
    if (i >= n) return;
    x[i] = static_cast<std::int32_t>(static_cast<std::uint32_t>(table[at]) << shift);
    at += further;
    if (at >= entries) at -= entries;
  }
}

// Draws from a cumulative table: lane l of a tile makes coordinates 16 m + l from four cipher
// blocks, two words each.
template <class Law>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks)
    cdt_kernel(Stream stream, const std::uint32_t* words, std::int64_t boundaries,
               std::uint64_t first, std::int64_t n, std::int32_t* x) {
  __shared__ std::uint32_t guide[kGuide];
  for (int i = static_cast<int>(threadIdx.x); i < kGuide; i += kTileThreads) guide[i] = words[i];
  __syncthreads();
  const TileLane seat(first, piece_of_thread());
  if (seat.index - seat.lane >= n) return;
  const CdtTable table = cdt_table(words, boundaries);
  constexpr int kCdtGroups = kCdtWords * kTile / 256;  // of 16 blocks
  DPK_ROLLED
  for (int q = 0; q < kCdtGroups; ++q) {
    std::uint32_t block[16];
    const std::uint64_t counter =
        16 * kCdtGroups * seat.tile + static_cast<std::uint64_t>(16 * q + seat.lane);
    chacha_block(stream, stream.n0, counter, block);
    DPK_UNROLL
    for (int p = 0; p < 16 / kCdtWords; ++p) {
      const std::int64_t i = seat.index + kLanes * (16 / kCdtWords * q + p);
      if (i < 0 || i >= n) continue;
      const std::uint32_t own = block[kCdtWords * p], index = block[kCdtWords * p + 1];
      std::uint32_t undecided = 0;
      std::uint32_t magnitude = cdt_magnitude(index, guide[cdt_bucket(index)], undecided);
      if (undecided != 0) {
        magnitude = cdt_search(table, stream, first + static_cast<std::uint64_t>(i), index);
      }
      x[i] = static_cast<std::int32_t>(cdt_value<Law>(magnitude, own));
    }
  }
}

template <class T, class Law>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks)
    add_noise_integer_kernel(Stream stream, std::uint64_t first, std::int64_t n, T* x) {
  __shared__ TileShared room;
  load_table<Law>(room);
  const TileLane seat(first, piece_of_thread());
  if (seat.index - seat.lane >= n) return;
  draw_lane<Law>(stream, seat, room);
  for (int k = 0; k < kPerThread; ++k) {
    const std::int64_t i = seat.index + kLanes * k;
    if (i >= 0 && i < n) x[i] = release_integer(x[i], room.draws[k][threadIdx.x]);
  }
}

template <class T, class Law>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks)
    add_noise_float_kernel(Stream stream, Stream rounding, std::uint64_t first, std::int64_t n,
                           T per_unit, T cell, T* x, std::int64_t* nonfinite) {
  __shared__ TileShared room;
  __shared__ RoundingRoom rounded;
  load_table<Law>(room);
  const TileLane seat(first, piece_of_thread());
  if (seat.index - seat.lane >= n) return;
  draw_lane<Law>(stream, seat, room);
  rounded.fill(rounding, seat);
  int bad = 0;
  for (int k = 0; k < kPerThread; ++k) {
    const std::int64_t i = seat.index + kLanes * k;
    if (i < 0 || i >= n) continue;
    const T units = finite_units(x[i], per_unit, bad);
    x[i] = cell * release_float(units, rounded.bits(k), room.draws[k][threadIdx.x]);
  }
  if (bad != 0) add_atomically(nonfinite, std::int64_t{bad});
}

constexpr int kScaledBlocks = 6;  // minimum per multiprocessor

// The same with a noise scale for every coordinate.
template <class T, class Law>
__global__ void __launch_bounds__(kTileThreads, kScaledBlocks)
    add_noise_scaled_kernel(Stream stream, Stream rounding, std::uint64_t first, std::int64_t n,
                            const double* scales, T* x, std::int64_t* nonfinite) {
  __shared__ TileShared room;
  __shared__ RoundingRoom rounded;
  load_table<Law>(room);
  const TileLane seat(first, piece_of_thread());
  if (seat.index - seat.lane >= n) return;
  draw_lane<Law>(stream, seat, room);
  rounded.fill(rounding, seat);
  int bad = 0;
  for (int k = 0; k < kPerThread; ++k) {
    const std::int64_t i = seat.index + kLanes * k;
    if (i < 0 || i >= n) continue;
    const double scale = scales[i];
    const T per_unit = round_down<T>(static_cast<double>(kScaleUnits) / scale);
    const T units = finite_units(x[i], per_unit, bad);
    const T cell = static_cast<T>(scale / 64);
    x[i] = cell * release_float(units, rounded.bits(k), room.draws[k][threadIdx.x]);
  }
  if (bad != 0) add_atomically(nonfinite, std::int64_t{bad});
}

}  // namespace dpkern::cuda
