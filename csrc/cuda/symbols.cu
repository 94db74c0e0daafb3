// Randomized response: a thread makes one cipher block, the words of eight symbols.

#include "core/chacha.h"
#include "core/response.h"
#include "cuda/device.cuh"

namespace dpkern::cuda {

template <class T>
__global__ void __launch_bounds__(kCipherThreads)
    symbols_kernel(Stream stream, std::uint64_t first, ResponseParams response, const T* x,
                   std::int64_t n, T* out) {
  const std::int64_t block = blockIdx.x * static_cast<std::int64_t>(kCipherThreads) + threadIdx.x;
  const std::int64_t index =
      block * kSymbolsPerCipherBlock - static_cast<std::int64_t>(first % kSymbolsPerCipherBlock);
  if (index >= n) return;
  std::uint32_t words[16];
  chacha_block(stream, stream.n0,
               first / kSymbolsPerCipherBlock + static_cast<std::uint64_t>(block), words);
  DPK_UNROLL
  for (int k = 0; k < kSymbolsPerCipherBlock; ++k) {
    const std::int64_t i = index + k;
    if (i < 0 || i >= n) continue;
    const std::uint64_t high = words[2 * k + 1];
    const std::uint32_t move = response_shift(response, high << 32 | words[2 * k]);
    out[i] =
        static_cast<T>(moved_symbol(static_cast<std::uint32_t>(x[i]), move, response.categories));
  }
}

}  // namespace dpkern::cuda
