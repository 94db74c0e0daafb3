#pragma once
// What a transform of small maps reads: coefficients of a line, the maps, and the bins to keep.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cpu/isa.h"

namespace dpkern::cpu::spectral {

constexpr int kTogether = 5;  // frequencies of a tile: 10 sums of two rows hide the latency of FMA

// `count` values, `step` apart, on a circle of `n`.
template <class F>
struct Line {
  std::int64_t n, count, step;
  std::int64_t half;         // largest folded index
  bool split;                // whether k and n/2 - k share products
  std::int64_t frequencies;  // that are multiplied for
  std::int64_t evens, odds;  // folded indices of either class; all are even if nothing is split
  std::int64_t slots;        // frequencies * (split ? 2 : 1): k and its partner, one behind another
  std::vector<F> table;      // per tile: cosines, even and odd, then sines, even and odd

  // `turns`: cosines and sines of 2 pi m / n.
  Line(const std::int64_t* sizes, const double* turns)
      : Line(sizes[0], sizes[1], sizes[2], turns, sizes[0]) {}
  // `turns`: cosines and sines of 2 pi m / circle, a multiple of n.
  Line(std::int64_t values, std::int64_t used, std::int64_t apart, const double* turns,
       std::int64_t circle)
      : n(values), count(used), step(apart), half(count / 2) {
    split = n % 2 == 0 && step % 2 == 1;
    frequencies = (split ? n / 4 : n / 2) + 1;
    evens = (split ? half / 2 : half) + 1;
    odds = split ? (half + 1) / 2 : 0;
    slots = split ? 2 * frequencies : frequencies;
    table.reserve(static_cast<std::size_t>(frequencies * terms()));
    each_tile([&](std::int64_t first, int size) {
      for (const bool sines : {false, true}) {
        for (const bool odd : {false, true}) {
          const std::int64_t last = odd ? odds : evens;
          for (std::int64_t i = sines && !odd ? 1 : 0; i < last; ++i) {
            const std::int64_t j = split ? 2 * i + (odd ? 1 : 0) : i;
            for (int k = 0; k < size; ++k) {
              const std::int64_t turn = (first + k) * j * step % n * (circle / n);
              table.push_back(static_cast<F>(turns[sines ? circle + turn : turn]));
            }
          }
        }
      }
    });
  }
  std::int64_t tiles() const { return (frequencies + kTogether - 1) / kTogether; }
  // Coefficients per frequency.
  std::int64_t terms() const { return 2 * (evens + odds) - 1; }
  // Vectors of one transformed column. An odd number: stores that are a multiple of 4 KiB apart
  // fight for one set of the cache.
  std::int64_t plane() const { return 4 * (half + 1) | 1; }
  // Where folded index j stands: the even ones, then the odd ones.
  std::int64_t place(std::int64_t j) const {
    return !split ? j : j % 2 == 0 ? j / 2 : evens + j / 2;
  }
  // body(first frequency, frequencies) for tiles of nearly equal sizes.
  template <class Body>
  DPK_INLINE void each_tile(const Body& body) const {
    const std::int64_t all = tiles();
    std::int64_t first = 0;
    for (std::int64_t i = 0; i < all; ++i) {
      const std::int64_t size = frequencies / all + (i < frequencies % all ? 1 : 0);
      body(first, static_cast<int>(size));
      first += size;
    }
  }
};

// Maps of one operand, [B, channels, height, width] of which the first rows and columns are used.
template <class F>
struct Maps {
  static constexpr int kParts = 2;  // M and N of a slot

  const void* data;
  bool narrow;  // whether they are float
  std::int64_t samples, channels, height, width;
  Line<F> rows, columns;

  std::int64_t slots() const { return (columns.n / 2 + 1) * rows.slots; }
  // Vectors on the way to the powers of one map.
  std::int64_t room() const {
    return 2 * columns.count + 4 * (columns.half + 1) + (columns.n / 2 + 1) * rows.plane();
  }
};

// Retained bins of one operand: [R, B, 2, channels] from `count` bins that slots hold.
struct Kept {
  const std::int64_t* bins;  // [slots, 2]: which bin is X(+ky), X(-ky), or -1
  const std::int64_t* from;  // [R]: the bin
  const double* turn;        // [R, 4]: Re = t0 A + t1 B, Im = t2 A + t3 B of the bin A - i B
  void* out;                 // of the maps' type
  std::int64_t count, R;
  // Without powers: whether a tile holds a bin, [columns, tiles of a column] (long columns have no
  // tiles), and how many columns there are up to the last that does.
  const char* tiles = nullptr;
  std::int64_t columns = 0;

  // Vectors of one channel's bins, an odd number as that of a transformed column.
  std::int64_t plane() const { return 2 * count | 1; }
  // Those of as many channels as a vector has lanes.
  std::int64_t room(std::int64_t lanes) const { return lanes * plane(); }
};

}  // namespace dpkern::cpu::spectral
