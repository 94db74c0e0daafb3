// The noise generator: 128 threads make eight tiles of 512 coordinates, sixteen threads a tile.

#include "core/lattice.h"
#include "cuda/device.cuh"
#include "cuda/draws.cuh"

namespace dpkern::cuda {

constexpr int kCipherThreads = 256;

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
  __shared__ TileRoom room;
  load_table<Law>(room);
  const TileSeat seat(first, piece_of_thread());
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
  const TileSeat seat(first, piece_of_thread());
  room.fill(rounding, seat);
  for (int k = 0; k < kPerThread; ++k) {
    const std::int64_t i = seat.index + kLanes * k;
    if (i >= 0 && i < n) bits[i] = static_cast<std::uint16_t>(room.bits(k));
  }
}

template <class T, class Law>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks)
    add_noise_integer_kernel(Stream stream, std::uint64_t first, std::int64_t n, T* x) {
  __shared__ TileRoom room;
  load_table<Law>(room);
  const TileSeat seat(first, piece_of_thread());
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
  __shared__ TileRoom room;
  __shared__ RoundingRoom rounded;
  load_table<Law>(room);
  const TileSeat seat(first, piece_of_thread());
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

}  // namespace dpkern::cuda

#if !defined(__CUDACC_RTC__)
#include "cuda/launch.h"
#include "cuda/preload.h"

namespace dpkern::cuda {
namespace {

// Blocks for the tiles that [first, first + n) touches.
unsigned int tile_blocks(std::uint64_t first, std::int64_t n) {
  return blocks_of(static_cast<std::int64_t>(first % kTile) + n, kTile * kTilesPerBlock);
}

template <class Law>
Error add_noise_of(const Stream& stream, const Stream& rounding, std::uint64_t first,
                   std::int64_t n, NoisedType type, double per_unit, double cell, void* x,
                   std::int64_t* nonfinite, CudaStream cuda) {
  const unsigned int grid = tile_blocks(first, n);
  switch (type) {
    case NoisedType::kInt32:
      DPK_LAUNCH((add_noise_integer_kernel<std::int32_t, Law>), grid, kTileThreads, cuda, stream,
                 first, n, static_cast<std::int32_t*>(x));
      break;
    case NoisedType::kInt64:
      DPK_LAUNCH((add_noise_integer_kernel<std::int64_t, Law>), grid, kTileThreads, cuda, stream,
                 first, n, static_cast<std::int64_t*>(x));
      break;
    case NoisedType::kFloat:
      DPK_LAUNCH((add_noise_float_kernel<float, Law>), grid, kTileThreads, cuda, stream, rounding,
                 first, n, static_cast<float>(per_unit), static_cast<float>(cell),
                 static_cast<float*>(x), nonfinite);
      break;
    case NoisedType::kDouble:
      DPK_LAUNCH((add_noise_float_kernel<double, Law>), grid, kTileThreads, cuda, stream, rounding,
                 first, n, per_unit, cell, static_cast<double*>(x), nonfinite);
      break;
  }
  return cudaGetLastError();
}

}  // namespace

Error keystream(const Stream& stream, std::uint64_t first_block, std::int64_t blocks,
                std::uint32_t* out, CudaStream cuda) {
  if (blocks == 0) return cudaSuccess;
  DPK_LAUNCH_FLAT(keystream_kernel, blocks_of(blocks, kCipherThreads), kCipherThreads, cuda, stream,
                  first_block, blocks, out);
  return cudaGetLastError();
}

Error lattice_draws(const Stream& stream, Distribution law, std::uint64_t first, std::int64_t n,
                    std::int32_t* x, CudaStream cuda) {
  if (n == 0) return cudaSuccess;
  const unsigned int grid = tile_blocks(first, n);
  if (law == Distribution::kGaussian) {
    DPK_LAUNCH(draws_kernel<Gaussian>, grid, kTileThreads, cuda, stream, first, n, x);
  } else {
    DPK_LAUNCH(draws_kernel<Laplace>, grid, kTileThreads, cuda, stream, first, n, x);
  }
  return cudaGetLastError();
}

Error rounding_bits(const Stream& rounding, std::uint64_t first, std::int64_t n,
                    std::uint16_t* bits, CudaStream cuda) {
  if (n == 0) return cudaSuccess;
  DPK_LAUNCH_FLAT(rounding_kernel, tile_blocks(first, n), kTileThreads, cuda, rounding, first, n,
                  bits);
  return cudaGetLastError();
}

Error add_noise(const Stream& stream, const Stream& rounding, Distribution law, std::uint64_t first,
                std::int64_t n, NoisedType type, double per_unit, double cell, void* x,
                std::int64_t* nonfinite, CudaStream cuda) {
  if (n == 0) return cudaSuccess;
  const auto run =
      law == Distribution::kGaussian ? &add_noise_of<Gaussian> : &add_noise_of<Laplace>;
  return run(stream, rounding, first, n, type, per_unit, cell, x, nonfinite, cuda);
}

Error preload_noise() {
  return load_kernels(
      keystream_kernel, draws_kernel<Gaussian>, draws_kernel<Laplace>, rounding_kernel,
      add_noise_integer_kernel<std::int32_t, Gaussian>,
      add_noise_integer_kernel<std::int32_t, Laplace>,
      add_noise_integer_kernel<std::int64_t, Gaussian>,
      add_noise_integer_kernel<std::int64_t, Laplace>, add_noise_float_kernel<float, Gaussian>,
      add_noise_float_kernel<float, Laplace>, add_noise_float_kernel<double, Gaussian>,
      add_noise_float_kernel<double, Laplace>);
}

}  // namespace dpkern::cuda
#endif
