// The kernel of randomized response against that of the CPU, symbol for symbol.

#include "cpu/symbols.h"
#include "cuda.h"

namespace dpkern::test {
namespace {

template <class T>
std::int64_t compare(cuda::SymbolType type, std::uint32_t categories, std::uint64_t keep) {
  const Stream stream = counting_key(0x05000000, 3, 20);
  const Lies lies = lies_of(categories, keep);
  std::int64_t cases = 0;
  for (const std::int64_t n : {0, 1, 7, 2048, 5001}) {
    for (const std::uint64_t first : {0ull, 5ull, (1ull << 35) - 3}) {
      std::vector<T> x, want(static_cast<std::size_t>(n));
      for (std::int64_t i = 0; i < n; ++i) {
        x.push_back(static_cast<T>(static_cast<std::uint64_t>(i * 2654435761) % categories));
      }
      cpu::randomize(stream, first, lies, x.data(), n, want.data(), 1);
      in_both_orders([&](const std::string& order) {
        Shifted<T> from(x, 1), to(std::vector<T>(x.size()), 3);
        check_launch(
            cuda::randomize_symbols(stream, first, lies, type, from.data(), n, to.data(), nullptr),
            "symbols");
        check_same(to.values(), want, "symbols from " + std::to_string(first) + order);
        ++cases;
      });
    }
  }
  return cases;
}

}  // namespace

std::int64_t test_cuda_symbols() {
  constexpr std::uint64_t kHalf = std::uint64_t{1} << 63;
  // The most words for each lie of three, and the fewest of many.
  constexpr std::uint64_t kThird = ~std::uint64_t{0} / 3 + 1;
  return compare<std::uint8_t>(cuda::SymbolType::kUint8, 2, kHalf) +
         compare<std::uint8_t>(cuda::SymbolType::kUint8, 3, kThird) +
         compare<std::int32_t>(cuda::SymbolType::kInt32, 10, kHalf + 12345) +
         compare<std::int64_t>(cuda::SymbolType::kInt64, 1u << 30,
                               std::uint64_t{0} - ((1u << 30) - 1));
}

}  // namespace dpkern::test
