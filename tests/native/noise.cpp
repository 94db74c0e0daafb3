// Noise against a second, scalar statement of the laws, one coordinate at a time.

#include "cpu/noise.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "check.h"
#include "core/lattice.h"
#include "core/tables.h"

namespace dpkern::test {
namespace {

using Block = std::vector<std::uint32_t>;

Block block_at(const Stream& stream, std::uint32_t n0, std::uint64_t counter) {
  Block block(16);
  chacha_block(stream, n0, counter, block.data());
  return block;
}

unsigned __int128 wide(const std::uint32_t words[4]) {
  unsigned __int128 value = 0;
  for (int i = 3; i >= 0; --i) value = (value << 32) | words[i];
  return value;
}

std::uint32_t magnitude_of(const std::uint32_t* table, std::uint32_t column, std::uint32_t t) {
  const std::uint32_t entry = table[column];
  return t < (entry & 0xffffu) ? column : entry >> 16;
}

// By counting where the kernels search.
std::uint32_t gaussian_tail(const Block& block) {
  std::uint32_t k = 255;
  for (const auto& bound : kGaussianTail) k += wide(block.data()) < wide(bound) ? 1 : 0;
  return k;
}

std::uint32_t laplace_tail(const Block& block) {
  std::uint32_t base = 255;
  for (int restart = 0; restart < 16; ++restart) {
    const std::uint32_t word = block[static_cast<std::size_t>(restart)];
    const std::uint32_t k = magnitude_of(kLaplaceTable, word >> 16 & 0xffu, word & 0xffffu);
    if (k != 255) return base + k;
    base += 255;
  }
  return base;
}

std::int32_t draw_at(const Stream& stream, Distribution law, std::uint64_t position) {
  const bool gaussian = law == Distribution::kGaussian;
  const std::uint64_t tile = position / kTile;
  const std::uint32_t j = static_cast<std::uint32_t>(position % kTile);
  const std::uint32_t set = j / 64, b = j % 64 / 16, lane = j % 16;
  std::uint32_t w[6];
  for (std::uint32_t i = 0; i < 6; ++i) {
    const std::uint32_t row = 6 * set + i;
    w[i] = block_at(stream, stream.n0, 48 * tile + 16 * (row / 16) + lane)[row % 16];
  }
  const std::uint32_t half = 16 * (b & 1);
  const std::uint32_t bits = w[2 + b / 2] >> half & 0xffffu;
  std::uint32_t k = magnitude_of(gaussian ? kGaussianTable : kLaplaceTable, w[4] >> 8 * b & 0xffu,
                                 w[b / 2] >> half & 0xffffu);
  if (k == 255) {
    const Block tail = block_at(stream, stream.n0 ^ 1u << 31, position);
    k = gaussian ? gaussian_tail(tail) : laplace_tail(tail);
  }
  const std::int64_t sign_and_size = bits >> 15 ? -1 - std::int64_t{k} : std::int64_t{k};
  const std::int64_t second = w[5] >> 8 * b & 0xffu;
  const std::int64_t offset = gaussian ? 64 * second + 32 : 1 << 13;
  return static_cast<std::int32_t>(sign_and_size * (1 << kFineBits) + (bits & 0x3fffu) + offset);
}

std::vector<std::int32_t> draws_at(const Stream& stream, Distribution law, std::uint64_t first,
                                   std::int64_t n) {
  std::vector<std::int32_t> draws;
  for (std::int64_t i = 0; i < n; ++i) {
    draws.push_back(draw_at(stream, law, first + static_cast<std::uint64_t>(i)));
  }
  return draws;
}

std::uint32_t rounding_at(const Stream& stream, std::uint64_t position) {
  const std::uint64_t lane = position % 16, half = position % kTile / 16;
  const Block block = block_at(stream, stream.n0, 16 * (position / kTile) + lane);
  return block[half / 2] >> 16 * (half % 2) & 0xffffu;
}

// floor((v + x) / 2^14), by the rounding of shifts in a type that cannot overflow.
std::int64_t released(__int128 v, std::int32_t x) {
  return static_cast<std::int64_t>((v + x) >> kFineBits);
}

void check_published_vectors() {
  // RFC 8439, 2.3.2: block 1 of nonce 000000090000004a00000000.
  const Block want = {0xe4e7f110, 0x15593bd1, 0x1fdd0f50, 0xc47120a3, 0xc7f4d1c7, 0x0368c033,
                      0x9aaa2204, 0x4e6cd4c3, 0x466482d2, 0x09aa9f07, 0x05d7c214, 0xa2028bd9,
                      0xd19c12b5, 0xb94e16de, 0xe883d0cb, 0x4e3c50a2};
  Block block(16);
  keystream(counting_key(0x4a000000, 0, 20), 0x0900000000000001, 1, block.data(), 1);
  check_same(block, want, "RFC 8439 block");

  const Stream stream = counting_key(0x4a000000, 0, 20);
  const auto x = draws_at(stream, Distribution::kGaussian, 0, 513);
  const std::vector<std::int32_t> first = {544225,  -103025, -629182, 288145,
                                           1601680, 1582540, -1893,   126620};
  check_same(std::vector<std::int32_t>(x.begin(), x.begin() + 8), first, "Gaussian oracle");
  check(x[511] == 593690 && x[512] == -106877, "Gaussian oracle across tiles");
  check(draw_at(stream, Distribution::kGaussian, 1657) == 4335169, "upper tail of the oracle");
  check(draw_at(stream, Distribution::kGaussian, 27196) == -4306196, "lower tail of the oracle");
}

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

std::int64_t compare_draws(const Stream& stream, Distribution law) {
  std::int64_t cases = 0;
  for (const Window& window : windows()) {
    const auto want = draws_at(stream, law, window.first, window.n);
    for_every_setting([&](int threads, const std::string& setting) {
      const std::string where = "draws from " + std::to_string(window.first) + setting;
      Shifted<std::int32_t> whole(std::vector<std::int32_t>(want.size()), 1);
      lattice_draws(stream, law, window.first, window.n, whole.data(), threads);
      check_same(whole.values(), want, where);

      Shifted<std::int32_t> chunks(std::vector<std::int32_t>(want.size()), 3);
      for (std::int64_t i = 0, step = 1; i < window.n; i += step, step = step * 3 + 1) {
        const std::int64_t count = std::min(step, window.n - i);
        lattice_draws(stream, law, window.first + static_cast<std::uint64_t>(i), count,
                      chunks.data() + i, threads);
      }
      check_same(chunks.values(), want, where + " in chunks");
      cases += 2;
    });
  }
  return cases;
}

template <class T>
std::int64_t compare_integers(const Stream& stream, Distribution law, const Window& window,
                              const std::vector<std::int32_t>& draws) {
  std::mt19937_64 random(7);
  std::vector<T> sums = {
      0, -1, 16383, -16384, std::numeric_limits<T>::max(), std::numeric_limits<T>::min()};
  sums.resize(static_cast<std::size_t>(window.n));
  for (std::size_t i = 6; i < sums.size(); ++i) sums[i] = static_cast<T>(random());
  std::vector<T> want;
  for (std::size_t i = 0; i < sums.size(); ++i) {
    want.push_back(static_cast<T>(released(sums[i], draws[i])));
  }
  std::int64_t cases = 0;
  for_every_setting([&](int threads, const std::string& setting) {
    Shifted<T> x(sums, 1);
    cpu::add_noise_integer(stream, law, Draws{}, window.first, window.n, x.data(), threads);
    check_same(x.values(), want, "integer noise" + setting);
    ++cases;
  });
  return cases;
}

template <class T>
std::int64_t compare_floats(const Stream& stream, const Stream& rounding, Distribution law,
                            const Window& window, const std::vector<std::int32_t>& draws) {
  using Limits = std::numeric_limits<T>;
  const double scale = 3.0;
  std::mt19937 random(11);
  std::normal_distribution<double> normal(0, 5);
  // The first four count as not finite: in units of u the largest number overflows.
  std::vector<T> sums = {
      Limits::infinity(), -Limits::infinity(), Limits::quiet_NaN(), Limits::max(), T{0}, -T{0},
      -Limits::min(),     Limits::denorm_min()};
  for (std::size_t i = sums.size(); i < draws.size(); ++i) {
    sums.push_back(static_cast<T>(i % 2 == 0 ? normal(random) : at_cell_edge(draws[i], scale)));
  }
  std::vector<double> cells;  // what should be released, in units of the cell
  for (std::size_t i = 0; i < sums.size(); ++i) {
    const double units = i < 4 ? 0.0 : static_cast<double>(sums[i]) * kScaleUnits / scale;
    const double up = rounding_at(rounding, window.first + i) / 65536.0;
    cells.push_back(std::floor((std::floor(units + up) + draws[i]) / (1 << kFineBits)));
  }
  std::vector<T> first;
  std::int64_t cases = 0;
  for_every_setting([&](int threads, const std::string& setting) {
    Shifted<T> x(sums, 1);
    const std::int64_t bad = cpu::add_noise_float(stream, rounding, law, Draws{}, window.first,
                                                  window.n, scale, x.data(), threads);
    check(bad == 4, "float noise counts non-finite entries" + setting);
    const auto got = x.values();
    if (first.empty()) first = got;
    check_same(got, first, "float noise" + setting);
    int missed = 0;
    for (std::size_t i = 0; i < got.size(); ++i) {
      const double found = static_cast<double>(got[i]) / (scale / 64);
      check(std::fabs(found - std::round(found)) <= std::fabs(found) * 1e-6,
            "float noise lies on the lattice" + setting);
      missed += std::fabs(found - cells[i]) > 0.01 ? 1 : 0;
      check(std::fabs(found - cells[i]) < 1.01, "float noise against the oracle" + setting);
    }
    // T does not always tell the two sides of an edge apart; wrong bits would fail a quarter.
    check(missed <= 4 + window.n / 500, "float noise away from the oracle" + setting);
    ++cases;
  });
  return cases;
}

// The whole numbers of devices release the bits of the general way, up to the largest they take.
std::int64_t compare_small() {
  std::mt19937_64 random(3);
  std::int64_t cases = 0;
  std::vector<float> units = {0.0f,           1e-45f,         1e-38f,   0x1p-24f,
                              0.5f,           0x1.fffffep-1f, 16383.5f, 0x1p14f,
                              0x1.fffffep13f, 0x1p23f + 0.5f, 0x1p24f,  0x1.fffffep29f};
  for (int exponent = -30; exponent < 30; ++exponent) {
    for (int i = 0; i < 200; ++i) {
      units.push_back(std::ldexp(1 + static_cast<float>(random() >> 41) * 0x1p-23f, exponent));
    }
  }
  for (const float size : units) {
    for (const float u : {size, -size}) {
      check(is_small(u), "small units");
      const auto x = static_cast<std::int32_t>(random() % (1u << 27)) - (1 << 26);
      for (const std::uint32_t bits :
           {0u, 1u, 0x8000u, 0xffffu, std::uint32_t(random() & 0xffff)}) {
        for (const std::int32_t draw : {x, -1, 0, -static_cast<std::int32_t>(std::floor(u)) - 1}) {
          const float want = release_float(u, bits, draw), got = release_small(u, bits, draw);
          check(std::memcmp(&want, &got, sizeof want) == 0, "small units are released alike");
          ++cases;
        }
      }
    }
  }
  for (const float u : {0x1p30f, -0x1p30f, std::numeric_limits<float>::infinity(),
                        std::numeric_limits<float>::quiet_NaN()}) {
    check(!is_small(u), "units that are not small");
  }
  return cases;
}

std::int64_t compare_keystream(const Stream& stream) {
  std::int64_t cases = 0;
  for (const std::int64_t blocks : {0, 1, 7, 3000}) {
    const std::uint64_t first = (1ull << 32) - 3;
    Block want;
    for (std::int64_t i = 0; i < blocks; ++i) {
      const Block block = block_at(stream, stream.n0, first + static_cast<std::uint64_t>(i));
      want.insert(want.end(), block.begin(), block.end());
    }
    for_every_setting([&](int threads, const std::string& setting) {
      Shifted<std::uint32_t> out(Block(want.size()), 1);
      keystream(stream, first, blocks, out.data(), threads);
      check_same(out.values(), want, "keystream" + setting);
      ++cases;
    });
  }
  return cases;
}

}  // namespace

std::int64_t test_noise() {
  check_published_vectors();
  std::int64_t cases = compare_small();
  for (const int rounds : {20, 12, 8}) {
    cases += compare_keystream(counting_key(0x4a000000, 5, rounds));
  }
  const Stream stream = counting_key(0x4a000000, 0, 20);
  const Stream rounding = counting_key(0x01000000, 9, 20);
  for (const Distribution law : {Distribution::kGaussian, Distribution::kLaplace}) {
    cases += compare_draws(stream, law);
    for (const Window& window : {Window{1650, 1030}, Window{3, 17000}}) {
      const auto draws = draws_at(stream, law, window.first, window.n);
      cases += compare_integers<std::int32_t>(stream, law, window, draws);
      cases += compare_integers<std::int64_t>(stream, law, window, draws);
      cases += compare_floats<float>(stream, rounding, law, window, draws);
      cases += compare_floats<double>(stream, rounding, law, window, draws);
    }
  }
  return cases;
}

}  // namespace dpkern::test
