#pragma once
// The noise of coefficients: where its draws and rounding bits come from, tile by tile.

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cpu/coef.h"
#include "cpu/isa.h"
#include "cpu/tiles.h"

namespace dpkern::cpu {

// Draws and rounding bits of positions that grow, at most a tile of them at a time. The two kinds
// of coefficients cut tiles at different places: a tile is kept until it was used to its end.
class NoiseWindow {
 public:
  explicit NoiseWindow(const CoefNoise& noise)
      : stream_(noise.stream), rounded_(noise.rounding), ahead_(noise.ahead) {}

  // Bits = uint32_t, or int16_t if they were made ahead.
  template <class Bits>
  struct Part {
    const std::int32_t* draws;
    const Bits* rounding;
  };

  // Valid until the next call.
  template <class Bits>
  Part<Bits> at(std::uint64_t position, int count) {
    const std::uint64_t place = position - ahead_.first;
    if constexpr (std::is_same_v<Bits, std::int16_t>) {
      return {ahead_.values + place, ahead_.rounding + place};
    } else {
      const std::uint64_t offset = position % kTile;
      hold(position / kTile, static_cast<int>(offset) + count > kTile);
      return {ahead_.values == nullptr ? draws_ + offset : ahead_.values + place, bits_ + offset};
    }
  }

 private:
  static constexpr std::uint64_t kNone = ~std::uint64_t{0};

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
    if (ahead_.values == nullptr) draw_tile(stream_, Distribution::kLaplace, tile, draws_ + at);
    rounded_.bits(tile, bits_ + at);
  }

  const Stream& stream_;
  RoundingTiles rounded_;
  const Ahead& ahead_;
  std::uint64_t first_ = kNone;   // the tile in the first half
  std::uint64_t second_ = kNone;  // and in the second
  alignas(64) std::int32_t draws_[2 * kTile];
  alignas(64) std::uint32_t bits_[2 * kTile];
};

}  // namespace dpkern::cpu
