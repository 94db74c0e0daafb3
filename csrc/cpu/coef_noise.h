#pragma once
// The draws and rounding bits of the noise of coefficients, tile by tile.

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "core/coef.h"
#include "cpu/isa.h"
#include "cpu/noise.h"
#include "cpu/tiles.h"

namespace dpkern::cpu {

// The noise scale of the coefficients of one row.
inline double scale_of(const CoefNoise& noise, std::int64_t row) {
  if (noise.scales == nullptr) return noise.scale;
  return noise.wide_scales ? static_cast<const double*>(noise.scales)[row]
                           : static_cast<double>(static_cast<const float*>(noise.scales)[row]);
}

// The position of the quadratic coefficients, behind `count` linear ones.
inline std::uint64_t quadratic_position(const CoefNoise& noise, std::int64_t count) {
  return (noise.linear + static_cast<std::uint64_t>(count) + kTile - 1) / kTile * kTile;
}

// Draws and rounding bits of positions that grow, at most a tile of them at a time. The two kinds
// of coefficients cut tiles at different places: a tile is kept until it was used to its end.
class NoiseWindow {
 public:
  explicit NoiseWindow(const CoefNoise& noise)
      : stream_(noise.stream), rounded_(noise.rounding), made_(noise.draws) {}

  // Bits = uint32_t, or int16_t if they were prefetched.
  template <class Bits>
  struct Part {
    const std::int32_t* draws;
    const Bits* rounding;
  };

  // Valid until the next call.
  template <class Bits>
  Part<Bits> at(std::uint64_t position, int count) {
    const std::uint64_t place = position - made_.first;
    if constexpr (std::is_same_v<Bits, std::int16_t>) {
      return {made_.values + place, made_.rounding + place};
    } else {
      const std::uint64_t offset = position % kTile;
      hold(position / kTile, static_cast<int>(offset) + count > kTile);
      return {made_in_memory() ? made_.values + place : draws_ + offset, bits_ + offset};
    }
  }

 private:
  static constexpr std::uint64_t kNone = ~std::uint64_t{0};

  bool made_in_memory() const { return made_.source == DrawSource::kValues; }

  void hold(std::uint64_t tile, bool and_next) {
    if (first_ != tile) {
      if (second_ == tile) {
        std::copy(draws_ + kTile, draws_ + 2 * kTile, draws_);
        std::copy(bits_ + kTile, bits_ + 2 * kTile, bits_);
      } else {
        make(tile, 0);
      }
      first_ = tile;
    }
    if (and_next && second_ != tile + 1) {
      make(tile + 1, kTile);
      second_ = tile + 1;
    }
  }
  void make(std::uint64_t tile, int at) {
    if (!made_in_memory()) draw_tile(made_, stream_, Distribution::kLaplace, tile, draws_ + at);
    rounded_.bits(tile, bits_ + at);
  }

  const Stream& stream_;
  RoundingTiles rounded_;
  const Draws& made_;
  std::uint64_t first_ = kNone;   // the tile in the first half
  std::uint64_t second_ = kNone;  // and in the second
  alignas(64) std::int32_t draws_[2 * kTile];
  alignas(64) std::uint32_t bits_[2 * kTile];
};

}  // namespace dpkern::cpu
