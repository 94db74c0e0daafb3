// The noise generator: 128 threads make eight tiles of 512 coordinates, sixteen threads a tile.
// Each kernel draws from a law, or from a noise source.

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
    draws_kernel(Draws draws, std::uint64_t first, std::int64_t n, std::int32_t* x) {
  __shared__ TileShared room;
  load_table<Law>(room);
  const TileLane seat(first, piece_of_thread());
  if (seat.index - seat.lane >= n) return;
  draw_lane<Law>(draws, seat, room);
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

template <class T, class Law>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks)
    add_noise_integer_kernel(Draws draws, std::uint64_t first, std::int64_t n, T* x) {
  __shared__ TileShared room;
  load_table<Law>(room);
  const TileLane seat(first, piece_of_thread());
  if (seat.index - seat.lane >= n) return;
  draw_lane<Law>(draws, seat, room);
  for (int k = 0; k < kPerThread; ++k) {
    const std::int64_t i = seat.index + kLanes * k;
    if (i >= 0 && i < n) x[i] = release_integer(x[i], room.draws[k][threadIdx.x]);
  }
}

template <class T, class Law>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks)
    add_noise_float_kernel(Draws draws, Stream rounding, std::uint64_t first, std::int64_t n,
                           T per_unit, T cell, T* x, std::int64_t* nonfinite) {
  __shared__ TileShared room;
  __shared__ RoundingRoom rounded;
  load_table<Law>(room);
  const TileLane seat(first, piece_of_thread());
  if (seat.index - seat.lane >= n) return;
  draw_lane<Law>(draws, seat, room);
  fill_bits<Law>(draws, rounding, seat, rounded);
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
    add_noise_scaled_kernel(Draws draws, Stream rounding, std::uint64_t first, std::int64_t n,
                            const double* scales, T* x, std::int64_t* nonfinite) {
  __shared__ TileShared room;
  __shared__ RoundingRoom rounded;
  load_table<Law>(room);
  const TileLane seat(first, piece_of_thread());
  if (seat.index - seat.lane >= n) return;
  draw_lane<Law>(draws, seat, room);
  fill_bits<Law>(draws, rounding, seat, rounded);
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
