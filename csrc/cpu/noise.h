#pragma once
// The noise generator by tiles of 512 coordinates, and the op that adds it to a tensor.

#include <cstdint>

#include "core/layouts.h"
#include "cpu/ops.h"
#include "cpu/tiles.h"

namespace dpkern::cpu {

// x[j] = draw at position 512 tile + j.
void draw_tile(const Stream& stream, Distribution law, std::uint64_t tile, std::int32_t x[kTile]);

// The same from any source; the stream and the law are those of a source without a table. A tile of
// prefetched values must be whole.
void draw_tile(const Draws& made, const Stream& stream, Distribution law, std::uint64_t tile,
               std::int32_t x[kTile]);

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

// The draws and rounding bits of one part of a tile after the other, from any source.
class NoiseTiles {
 public:
  NoiseTiles(const Stream& stream, Distribution law, const Stream& rounding, const Draws& made)
      : stream_(stream), law_(law), rounded_(rounding), made_(made) {}

  // X of the part's coordinates; valid until the next call.
  const std::int32_t* draws(const TilePart& part) {
    if (made_.source == DrawSource::kValues) return made_.values + place(part);
    draw_tile(made_, stream_, law_, part.tile, draws_);
    return draws_ + part.offset;
  }

  // The rounding bits of the part's coordinates; valid until the next call.
  const std::uint32_t* rounding(const TilePart& part) {
    if (made_.rounding != nullptr) {
      const std::int16_t* bits = made_.rounding + place(part);
      for (int i = 0; i < part.count; ++i) bits_[i] = static_cast<std::uint16_t>(bits[i]);
      return bits_;
    }
    rounded_.bits(part.tile, bits_);
    return bits_ + part.offset;
  }

 private:
  std::uint64_t place(const TilePart& part) const {
    return kTile * part.tile + static_cast<std::uint64_t>(part.offset) - made_.first;
  }

  const Stream& stream_;
  Distribution law_;
  RoundingTiles rounded_;
  const Draws& made_;
  alignas(64) std::int32_t draws_[kTile];
  alignas(64) std::uint32_t bits_[kTile];
};

// Integers: counts of u become counts of g. T = int32_t or int64_t.
template <class T>
void add_noise_integer(const Stream& stream, Distribution law, const Draws& made,
                       std::uint64_t first, std::int64_t n, T* x, int threads);

// Floats: rounded stochastically to u = scale / 2^20, noised, written as multiples of scale / 64.
// Returns how many entries were not finite (each counts as zero). T = float or double.
template <class T>
std::int64_t add_noise_float(const Stream& stream, const Stream& rounding, Distribution law,
                             const Draws& made, std::uint64_t first, std::int64_t n, double scale,
                             T* x, int threads);

}  // namespace dpkern::cpu
