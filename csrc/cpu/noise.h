#pragma once
// The noise generator by tiles of 512 coordinates, and the op that adds it to a tensor.

#include <cstdint>

#include "core/abi.h"

namespace dpkern::cpu {

// x[j] = draw at position 512 tile + j.
void draw_tile(const Stream& stream, Distribution law, std::uint64_t tile, std::int32_t x[kTile]);

// Cipher blocks that are made at a time: three groups of 16 lanes.
constexpr int kRowBlocks = 48;

// The blocks first .. first + 47 word by word: rows[kLanes (16 group + word) + lane] is a word of
// block first + 16 group + lane.
void keystream_rows(const Stream& stream, std::uint64_t first,
                    std::uint32_t rows[kRowBlocks * kLanes]);

// 16 rounding bits for each coordinate of a tile, see core/lattice.h `rounding_bits`. A tile takes
// 16 blocks; they are made for three neighbouring tiles at a time, which hides the cipher's
// latency.
class RoundingTiles {
 public:
  explicit RoundingTiles(const Stream& stream) : stream_(stream) {}
  void bits(std::uint64_t tile, std::uint32_t out[kTile]);

 private:
  static constexpr std::uint64_t kNone = ~std::uint64_t{0};

  const Stream& stream_;
  std::uint64_t made_ = kNone;  // the tiles 3 made_ .. 3 made_ + 2 are in `rows_`
  alignas(64) std::uint32_t rows_[3 * 16 * kLanes];
};

// out[0 .. 16 blocks) = keystream words in the order of RFC 8439.
void keystream(const Stream& stream, std::uint64_t first_block, std::int64_t blocks,
               std::uint32_t* out, int threads);

// x[i] = draw at position first + i.
void lattice_draws(const Stream& stream, Distribution law, std::uint64_t first, std::int64_t n,
                   std::int32_t* x, int threads);

// Integers: counts of u become counts of g. T = int32_t or int64_t.
template <class T>
void add_noise_integer(const Stream& stream, Distribution law, std::uint64_t first, std::int64_t n,
                       T* x, int threads);

// Floats: rounded stochastically to u = scale / 2^20, noised, written as multiples of scale / 64.
// Returns how many entries were not finite (each counts as zero). T = float or double.
template <class T>
std::int64_t add_noise_float(const Stream& stream, const Stream& rounding, Distribution law,
                             std::uint64_t first, std::int64_t n, double scale, T* x, int threads);

}  // namespace dpkern::cpu
