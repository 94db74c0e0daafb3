#pragma once
// The noise of one tensor of floats, from any source of draws, shared by the counted kernels of
// noise, update and coefficients.

#include <vector>

#include "counted/factor.h"
#include "counted/kernels.h"
#include "counted/noise.h"
#include "cpu/tiles.h"

namespace dpkern::counted {

// 1 / u rounded down and the cell of one scale.
template <class T>
struct Grid {
  Counted<T> per_unit;
  Counted<T> cell;

  // One scale of all coordinates: made once.
  explicit Grid(double scale) {
    const cpu::Lattice<T> same(scale);
    per_unit = same.per_unit;
    cell = same.cell;
  }
  // The scale of one coordinate.
  explicit Grid(Counted<double> scale)
      : per_unit(round_down<T>(Counted<double>(kScaleUnits) / scale)), cell(scale / 64.0) {}
};

// The draws and rounding bits of one tensor, from the streams or prefetched.
class TensorNoise {
 public:
  TensorNoise(const UpdateNoise& noise, bool rounded)
      : noise_(noise),
        rounded_(rounded),
        in_memory_(noise.draws.source == DrawSource::kValues),
        values_(noise.draws.values, in_memory_ ? noise.draws.count : 0),
        bits_made_(noise.draws.rounding, noise.draws.rounding == nullptr ? 0 : noise.draws.count) {}

  void make(std::uint64_t first, std::int64_t n) {
    draws.assign(static_cast<std::size_t>(n), Draw{});
    bits.assign(static_cast<std::size_t>(rounded_ ? n : 0), Word{});
    cpu::for_tiles(first, 0, n, [&](const cpu::TilePart& part) {
      Draw tile[kTile];
      Word round[kTile];
      if (!in_memory_) draw_tile(noise_.draws, noise_.stream, noise_.law, part.tile, tile);
      const bool made = noise_.draws.rounding != nullptr;
      if (rounded_ && !made) rounding_tile(noise_.rounding, part.tile, round);
      for (int i = 0; i < part.count; ++i) {
        const auto at = static_cast<std::size_t>(part.index + i);
        const auto there = static_cast<std::int64_t>(first - noise_.draws.first) + part.index + i;
        draws[at] = in_memory_ ? values_[there] : tile[part.offset + i];
        if (!rounded_) continue;
        bits[at] =
            made ? Word(static_cast<std::uint16_t>(bits_made_.raw(there))) : round[part.offset + i];
      }
    });
  }

  std::vector<Draw> draws;
  std::vector<Word> bits;

 private:
  const UpdateNoise& noise_;
  bool rounded_;
  bool in_memory_;
  Operand<const std::int32_t> values_;
  Operand<const std::int16_t> bits_made_;
};

}  // namespace dpkern::counted
