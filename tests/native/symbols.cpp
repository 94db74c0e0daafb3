// Randomized response against its definition, one symbol at a time with division.

#include <algorithm>

#include "check.h"
#include "core/chacha.h"
#include "cpu/ops.h"

namespace dpkern::test {
namespace {

std::uint64_t word_at(const Stream& stream, std::uint64_t position) {
  std::uint32_t block[16];
  chacha_block(stream, stream.n0, position / 8, block);
  const std::uint64_t pair = position % 8;
  return static_cast<std::uint64_t>(block[2 * pair + 1]) << 32 | block[2 * pair];
}

std::uint64_t response(const Stream& stream, std::uint64_t position, std::uint64_t keep,
                       std::uint32_t categories, std::uint64_t x) {
  using Wide = unsigned __int128;
  const Wide u = word_at(stream, position), whole = Wide{1} << 64;
  if (u < keep) return x;
  const Wide width = (whole - keep) / (categories - 1);
  Wide lie = (u - keep) / width;
  if (lie > categories - 2) lie = categories - 2;
  return static_cast<std::uint64_t>((x + 1 + lie) % categories);
}

template <class T>
std::int64_t sweep(std::uint32_t categories) {
  const Stream stream = counting_key(0x03000000, 7, 20);
  std::int64_t cases = 0;
  // The fewest words for the truth, as many as for all lies, and all but one for each lie.
  const std::uint64_t least = ~std::uint64_t{0} / categories + 1;
  const std::uint64_t most = std::uint64_t{0} - (categories - 1);
  for (const std::uint64_t words : {least, std::uint64_t{1} << 63, most}) {
    const std::uint64_t keep = std::max(words, least);
    for (const std::int64_t n : {0, 1, 385, 25000}) {
      for (const std::int64_t first : {std::int64_t{5}, (std::int64_t{1} << 35) - 100}) {
        std::vector<T> x, want;
        for (std::int64_t i = 0; i < n; ++i) {
          const auto symbol = static_cast<std::uint64_t>(i * 2654435761) % categories;
          const auto position = static_cast<std::uint64_t>(first + i);
          x.push_back(static_cast<T>(symbol));
          want.push_back(static_cast<T>(response(stream, position, keep, categories, symbol)));
        }
        for_every_setting([&](int threads, const std::string& setting) {
          Shifted<T> from(x, 1), to(std::vector<T>(x.size()), 3);
          cpu::randomize<T>({from.data(), stream, keep, categories, first, to.data(), n}, threads);
          check_same(to.values(), want,
                     "symbols, " + std::to_string(categories) + " categories, " +
                         std::to_string(n) + setting);
          ++cases;
        });
      }
    }
  }
  return cases;
}

}  // namespace

std::int64_t test_symbols() {
  return sweep<std::uint8_t>(2) + sweep<std::uint8_t>(3) + sweep<std::uint8_t>(256) +
         sweep<std::int32_t>(2) + sweep<std::int64_t>(10) + sweep<std::int64_t>(1u << 30);
}

}  // namespace dpkern::test
