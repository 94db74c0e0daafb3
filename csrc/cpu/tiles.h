#pragma once
// The walk over a range of coordinates tile by tile, and the lattice of one tensor.

#include <algorithm>
#include <cstdint>

#include "core/layouts.h"
#include "core/scale.h"

namespace dpkern::cpu {

// `count` coordinates from `offset` on of noise tile `tile`; the first is element `index`.
struct TilePart {
  std::uint64_t tile;
  std::int64_t index;
  int offset;
  int count;
};

// body(part) for elements [begin, end) of a tensor with element 0 at position `first`.
template <class F>
void for_tiles(std::uint64_t first, std::int64_t begin, std::int64_t end, const F& body) {
  for (std::int64_t index = begin; index < end;) {
    const std::uint64_t position = first + static_cast<std::uint64_t>(index);
    const int offset = static_cast<int>(position % kTile);
    const int count = static_cast<int>(std::min<std::int64_t>(kTile - offset, end - index));
    body(TilePart{position / kTile, index, offset, count});
    index += count;
  }
}

// The lattice of a certified noise scale (core/scale.h).
template <class T>
struct Lattice {
  T per_unit;
  T cell;

  explicit Lattice(double scale) : per_unit(per_unit_of<T>(scale)), cell(cell_of<T>(scale)) {}
  T units(T value) const { return value * per_unit; }
};

}  // namespace dpkern::cpu
