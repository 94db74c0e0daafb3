#pragma once
// What the native tests share: a check that stops the program, and the settings to sweep over.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "core/layouts.h"
#include "cpu/isa.h"
#include "cpu/ops.h"

namespace dpkern::test {

// Each returns the number of cases that it ran; a failed check ends the program.
std::int64_t test_noise();
std::int64_t test_clip();
std::int64_t test_coef();
std::int64_t test_ghost_dense();
std::int64_t test_update();
std::int64_t test_symbols();
std::int64_t test_counted();
std::int64_t test_project();
std::int64_t test_ghost_conv();
std::int64_t test_recurrent();
std::int64_t test_spectral();
std::int64_t test_emulator();

inline void check(bool holds, const std::string& what) {
  if (holds) return;
  std::fprintf(stderr, "native test failed: %s\n", what.c_str());
  std::exit(1);
}

// Bit for bit, so that NaN equals itself and 0 differs from -0.
template <class T>
void check_same(const std::vector<T>& got, const std::vector<T>& want, const std::string& what) {
  check(got.size() == want.size(), what + ": sizes differ");
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (std::memcmp(&got[i], &want[i], sizeof(T)) != 0) {
      check(false, what + ": element " + std::to_string(i) + " is " + std::to_string(got[i]) +
                       ", expected " + std::to_string(want[i]));
    }
  }
}

// A buffer on the heap whose data begins `skip` elements into it and ends exactly at its end:
// unaligned at the front, and any access past the end is seen by the address sanitizer.
template <class T>
class Shifted {
 public:
  Shifted(const std::vector<T>& values, std::size_t skip) : skip_(skip), all_(skip) {
    all_.insert(all_.end(), values.begin(), values.end());
    all_.shrink_to_fit();
  }
  T* data() { return all_.data() + skip_; }
  std::vector<T> values() const {
    return {all_.begin() + static_cast<std::ptrdiff_t>(skip_), all_.end()};
  }

 private:
  std::size_t skip_;
  std::vector<T> all_;
};

// The keystream whose test vectors are published: key bytes 00..1f.
inline Stream counting_key(std::uint32_t n0, std::uint32_t n1, int rounds) {
  Stream stream{};
  for (std::uint32_t i = 0; i < 8; ++i) stream.key[i] = 0x03020100u + 0x04040404u * i;
  stream.n0 = n0;
  stream.n1 = n1;
  stream.rounds = rounds;
  return stream;
}

// x[i] = the draw at position first + i.
inline void lattice_draws(const Stream& stream, Distribution law, std::uint64_t first,
                          std::int64_t n, std::int32_t* x, int threads) {
  cpu::lattice_draws({stream, static_cast<std::int64_t>(first), n, law, x}, threads);
}

// bits[i] = the 16 rounding bits at position first + i.
inline void rounding_draws(const Stream& stream, std::uint64_t first, std::int64_t n,
                           std::int16_t* bits, int threads) {
  cpu::rounding_bits({stream, static_cast<std::int64_t>(first), n, bits}, threads);
}

// Words of the blocks first .. first + blocks - 1.
inline void keystream(const Stream& stream, std::uint64_t first, std::int64_t blocks,
                      std::uint32_t* words, int threads) {
  auto* const out = reinterpret_cast<std::int32_t*>(words);
  cpu::keystream({stream, static_cast<std::int64_t>(first), blocks, out}, threads);
}

// A sum that, together with the draw x, lies half a fine unit below a cell's edge: whether it
// reaches the next cell is up to its rounding bits.
inline double at_cell_edge(std::int32_t x, double scale) {
  constexpr std::int32_t cell = 1 << kFineBits;
  const std::int32_t edge = (x + cell / 2) / cell * cell;
  return (edge - x - 0.5) * scale / static_cast<double>(kScaleUnits);
}

// body(threads, name) for every instruction set of this processor and several thread counts.
template <class F>
void for_every_setting(const F& body) {
  for (int isa = 0; isa <= static_cast<int>(cpu::detected_isa()); ++isa) {
    check(cpu::use_isa(static_cast<cpu::Isa>(isa)), "use_isa refused a supported instruction set");
    for (const int threads : {1, 3}) {
      body(threads, " [isa " + std::to_string(isa) + ", " + std::to_string(threads) + " threads]");
    }
  }
  cpu::use_isa(cpu::detected_isa());
}

}  // namespace dpkern::test
