// Randomized response: a thread makes one cipher block, the words of eight symbols.

#include "core/chacha.h"
#include "core/lies.h"
#include "cuda/device.cuh"

namespace dpkern::cuda {

constexpr int kSymbolThreads = 256;
constexpr int kSymbolsPerBlock = 8;  // of the cipher

template <class T>
__global__ void __launch_bounds__(kSymbolThreads)
    symbols_kernel(Stream stream, std::uint64_t first, Lies lies, const T* x, std::int64_t n,
                   T* out) {
  const std::int64_t block = blockIdx.x * static_cast<std::int64_t>(kSymbolThreads) + threadIdx.x;
  const std::int64_t index =
      block * kSymbolsPerBlock - static_cast<std::int64_t>(first % kSymbolsPerBlock);
  if (index >= n) return;
  std::uint32_t words[16];
  chacha_block(stream, stream.n0, first / kSymbolsPerBlock + static_cast<std::uint64_t>(block),
               words);
  DPK_UNROLL
  for (int k = 0; k < kSymbolsPerBlock; ++k) {
    const std::int64_t i = index + k;
    if (i < 0 || i >= n) continue;
    const std::uint64_t high = words[2 * k + 1];
    const std::uint32_t move = lie_of(lies, high << 32 | words[2 * k]);
    out[i] = static_cast<T>(moved_symbol(static_cast<std::uint32_t>(x[i]), move, lies.categories));
  }
}

}  // namespace dpkern::cuda

#if !defined(__CUDACC_RTC__)
#include "cuda/launch.h"
#include "cuda/preload.h"

namespace dpkern::cuda {
namespace {

template <class T>
Error randomize_of(const Stream& stream, std::uint64_t first, const Lies& lies, const void* x,
                   std::int64_t n, void* out, CudaStream cuda) {
  const std::int64_t span = static_cast<std::int64_t>(first % kSymbolsPerBlock) + n;
  DPK_LAUNCH_FLAT(symbols_kernel<T>, blocks_of(span, kSymbolThreads * kSymbolsPerBlock),
                  kSymbolThreads, cuda, stream, first, lies, static_cast<const T*>(x), n,
                  static_cast<T*>(out));
  return cudaGetLastError();
}

}  // namespace

Error randomize_symbols(const Stream& stream, std::uint64_t first, const Lies& lies,
                        SymbolType type, const void* x, std::int64_t n, void* out,
                        CudaStream cuda) {
  if (n == 0) return cudaSuccess;
  switch (type) {
    case SymbolType::kUint8:
      return randomize_of<std::uint8_t>(stream, first, lies, x, n, out, cuda);
    case SymbolType::kInt32:
      return randomize_of<std::int32_t>(stream, first, lies, x, n, out, cuda);
    case SymbolType::kInt64:
      return randomize_of<std::int64_t>(stream, first, lies, x, n, out, cuda);
  }
  return cudaSuccess;
}

Error preload_symbols() {
  return load_kernels(symbols_kernel<std::uint8_t>, symbols_kernel<std::int32_t>,
                      symbols_kernel<std::int64_t>);
}

}  // namespace dpkern::cuda
#endif
