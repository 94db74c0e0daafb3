// The noise kernels against those of the CPU, bit for bit.

#include <limits>
#include <random>

#include "cpu/noise.h"
#include "cpu/tiles.h"
#include "cuda.h"

namespace dpkern::test {
namespace {

constexpr double kScale = 3.0;

struct Window {
  std::uint64_t first;
  std::int64_t n;
};

std::vector<Window> windows() {
  const std::uint64_t carry = (1ull << 32) / 48 * kTile;  // block counters pass 2^32 in its tile
  return {{0, 0},      {0, 1},    {511, 2},     {3, 509},          {512, 512},
          {100, 1100}, {1657, 1}, {27100, 200}, {carry - 5, 1200}, {(1ull << 41) + 17, 700},
          {77, 20000}};
}

std::int64_t compare_keystream() {
  std::int64_t cases = 0;
  for (const int rounds : {20, 12, 8}) {
    const Stream stream = counting_key(0x4a000000, 5, rounds);
    for (const std::int64_t blocks : {0, 1, 7, 3000}) {
      const std::uint64_t first = (1ull << 32) - 3;
      std::vector<std::uint32_t> want(static_cast<std::size_t>(16 * blocks));
      cpu::keystream(stream, first, blocks, want.data(), 1);
      in_both_orders([&](const std::string& order) {
        Shifted<std::uint32_t> out(std::vector<std::uint32_t>(want.size()), 1);
        check_launch(cuda::keystream(stream, first, blocks, out.data(), nullptr), "keystream");
        check_same(out.values(), want, "keystream" + order);
        ++cases;
      });
    }
  }
  return cases;
}

std::int64_t compare_draws(const Stream& stream, Distribution law, const Window& window) {
  std::vector<std::int32_t> want(static_cast<std::size_t>(window.n));
  cpu::lattice_draws(stream, law, window.first, window.n, want.data(), 1);
  in_both_orders([&](const std::string& order) {
    Shifted<std::int32_t> x(std::vector<std::int32_t>(want.size()), 1);
    check_launch(cuda::lattice_draws(stream, law, window.first, window.n, x.data(), nullptr),
                 "draws");
    check_same(x.values(), want, "draws from " + std::to_string(window.first) + order);
  });
  return 2;
}

std::int64_t compare_rounding(const Stream& rounding, const Window& window) {
  std::vector<std::uint16_t> want;
  cpu::RoundingTiles tiles(rounding);
  cpu::for_tiles(window.first, 0, window.n, [&](const cpu::TilePart& part) {
    std::uint32_t bits[kTile];
    tiles.bits(part.tile, bits);
    want.insert(want.end(), bits + part.offset, bits + part.offset + part.count);
  });
  in_both_orders([&](const std::string& order) {
    Shifted<std::uint16_t> bits(std::vector<std::uint16_t>(want.size()), 3);
    check_launch(cuda::rounding_bits(rounding, window.first, window.n, bits.data(), nullptr),
                 "rounding bits");
    check_same(bits.values(), want, "rounding bits" + order);
  });
  return 2;
}

template <class T>
std::int64_t compare_integers(const Stream& stream, Distribution law, const Window& window) {
  std::mt19937_64 random(7);
  std::vector<T> sums = {0, -1, std::numeric_limits<T>::max(), std::numeric_limits<T>::min()};
  sums.resize(static_cast<std::size_t>(window.n));
  for (std::size_t i = 4; i < sums.size(); ++i) sums[i] = static_cast<T>(random());
  std::vector<T> want = sums;
  cpu::add_noise_integer(stream, law, cpu::Ahead{}, window.first, window.n, want.data(), 1);
  const NoisedType type = sizeof(T) == 4 ? NoisedType::kInt32 : NoisedType::kInt64;
  in_both_orders([&](const std::string& order) {
    Shifted<T> x(sums, 1);
    check_launch(cuda::add_noise(stream, stream, law, window.first, window.n, type, 0, 0, x.data(),
                                 nullptr, nullptr),
                 "integer noise");
    check_same(x.values(), want, "integer noise" + order);
  });
  return 2;
}

template <class T>
std::int64_t compare_floats(const Stream& stream, const Stream& rounding, Distribution law,
                            const Window& window) {
  using Limits = std::numeric_limits<T>;
  std::mt19937 random(11);
  std::normal_distribution<double> normal(0, 5);
  std::vector<T> sums = {
      Limits::infinity(), -Limits::infinity(), Limits::quiet_NaN(), Limits::max(), T{0}, -T{0},
      -Limits::min(),     Limits::denorm_min()};
  std::vector<std::int32_t> draws(static_cast<std::size_t>(window.n));
  cpu::lattice_draws(stream, law, window.first, window.n, draws.data(), 1);
  for (std::size_t i = sums.size(); i < draws.size(); ++i) {
    sums.push_back(static_cast<T>(i % 2 == 0 ? normal(random) : at_cell_edge(draws[i], kScale)));
  }
  sums.resize(draws.size());
  std::vector<T> want = sums;
  const std::int64_t bad = cpu::add_noise_float(stream, rounding, law, cpu::Ahead{}, window.first,
                                                window.n, kScale, want.data(), 1);
  const cpu::Lattice<T> lattice(kScale);
  const NoisedType type = sizeof(T) == 4 ? NoisedType::kFloat : NoisedType::kDouble;
  in_both_orders([&](const std::string& order) {
    Shifted<T> x(sums, 1);
    std::int64_t nonfinite = 100;
    check_launch(cuda::add_noise(stream, rounding, law, window.first, window.n, type,
                                 static_cast<double>(lattice.per_unit),
                                 static_cast<double>(lattice.cell), x.data(), &nonfinite, nullptr),
                 "float noise");
    check_same(x.values(), want, "float noise" + order);
    check(nonfinite == 100 + bad, "float noise counts non-finite entries" + order);
  });
  return 2;
}

}  // namespace

std::int64_t test_cuda_noise() {
  std::int64_t cases = compare_keystream();
  const Stream stream = counting_key(0x4a000000, 0, 20);
  const Stream rounding = counting_key(0x01000000, 9, 20);
  for (const Window& window : windows()) cases += compare_rounding(rounding, window);
  for (const Distribution law : {Distribution::kGaussian, Distribution::kLaplace}) {
    for (const Window& window : windows()) {
      cases += compare_draws(stream, law, window);
      cases += compare_integers<std::int32_t>(stream, law, window);
      cases += compare_integers<std::int64_t>(stream, law, window);
      cases += compare_floats<float>(stream, rounding, law, window);
      cases += compare_floats<double>(stream, rounding, law, window);
    }
  }
  check(cuda::preload() == 0, "every kernel is there");
  emulator::fail_next(2);
  std::int32_t x = 0;
  check(cuda::lattice_draws(stream, Distribution::kGaussian, 0, 1, &x, nullptr) == 2,
        "a failed launch is reported");
  return cases;
}

}  // namespace dpkern::test
