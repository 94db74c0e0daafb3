// The noise generator: 128 threads make eight tiles of 512 coordinates, sixteen threads a tile.

#include "core/lattice.h"
#include "cuda/device.cuh"
#include "cuda/draws.cuh"

namespace dpkern::cuda {

constexpr int kCipherThreads = 256;

// This thread's tile and lane, and the element at which the tile's first coordinate of the lane
// stands; element i is at position first + i.
struct TileSeat {
  std::uint64_t tile;
  int lane;
  std::int64_t index;

  __device__ __forceinline__ explicit TileSeat(std::uint64_t first) {
    const int thread = static_cast<int>(threadIdx.x);
    tile = first / kTile + blockIdx.x * static_cast<std::uint64_t>(kTilesPerBlock) +
           static_cast<std::uint64_t>(thread / kLanes);
    lane = thread % kLanes;
    index = static_cast<std::int64_t>(tile * kTile - first) + lane;
  }
};

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
  const TileSeat seat(first);
  if (seat.index - seat.lane >= n) return;
  draw_lane<Law>(stream, seat.tile, seat.lane, room);
  for (int k = 0; k < kPerThread; ++k) {
    const std::int64_t i = seat.index + kLanes * k;
    if (i >= 0 && i < n) x[i] = room.draws[k][threadIdx.x];
  }
}

#if !defined(__CUDACC_RTC__)
}  // namespace dpkern::cuda

#include "cuda/launch.h"

namespace dpkern::cuda {
namespace {

// Blocks for the tiles that [first, first + n) touches.
unsigned int tile_blocks(std::uint64_t first, std::int64_t n) {
  return blocks_of(static_cast<std::int64_t>(first % kTile) + n, kTile * kTilesPerBlock);
}

}  // namespace

Error keystream(const Stream& stream, std::uint64_t first_block, std::int64_t blocks,
                std::uint32_t* out, CudaStream cuda) {
  if (blocks == 0) return 0;
  DPK_LAUNCH_FLAT(keystream_kernel, blocks_of(blocks, kCipherThreads), kCipherThreads, cuda, stream,
                  first_block, blocks, out);
  return cudaGetLastError();
}

Error lattice_draws(const Stream& stream, Distribution law, std::uint64_t first, std::int64_t n,
                    std::int32_t* x, CudaStream cuda) {
  if (n == 0) return 0;
  const unsigned int grid = tile_blocks(first, n);
  if (law == Distribution::kGaussian) {
    DPK_LAUNCH(draws_kernel<Gaussian>, grid, kTileThreads, cuda, stream, first, n, x);
  } else {
    DPK_LAUNCH(draws_kernel<Laplace>, grid, kTileThreads, cuda, stream, first, n, x);
  }
  return cudaGetLastError();
}
#endif

}  // namespace dpkern::cuda
