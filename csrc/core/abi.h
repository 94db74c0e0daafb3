#pragma once
// The plain structs and codes that cross the boundary between Python, host code and devices.

#include "core/std.h"

namespace dpkern {

constexpr int kTile = 512;                     // coordinates per noise tile
constexpr int kLanes = 16;                     // cipher blocks side by side in a tile
constexpr int kFineBits = 14;                  // output cell g = 2^14 u
constexpr std::int64_t kScaleUnits = 1 << 20;  // certified scale in units of u

// One keystream: 256-bit key, 64-bit nonce, number of rounds. The counter is the position.
struct Stream {
  std::uint32_t key[8];
  std::uint32_t n0;
  std::uint32_t n1;
  int rounds;  // 20, 12 or 8
};

enum class Distribution : int { kGaussian = 0, kLaplace = 1 };

}  // namespace dpkern
