#pragma once
// The noise generator with counted words, shared by the counted kernels of noise and update.

#include "core/chacha.h"
#include "core/counted.h"
#include "core/lattice.h"

namespace dpkern {

using Word = Counted<std::uint32_t>;

// Stands before the core's own: the cipher counts as words, and inside only if it is open.
inline void chacha_block(const Stream& stream, std::uint32_t n0, std::uint64_t counter,
                         Word out[16]) {
  count(kRng, 16);
  const Counting inside(cipher_is_open ? current : nullptr);
  chacha_block<Word>(stream, n0, counter, out);
}

}  // namespace dpkern

namespace dpkern::counted {

using Draw = Counted<std::int32_t>;

// x[j] = draw at position 512 tile + j. Tiles are made whole, as in every kernel; a tile in which
// a draw escaped is searched, which counts as chance.
void draw_tile(const Stream& stream, Distribution law, std::uint64_t tile, Draw x[kTile]);

// The same from a source whose draws do not stand in memory. What a table holds is read for
// nothing, as the tables of the laws are; the search of a cumulative table counts as chance.
void draw_tile(const Draws& made, const Stream& stream, Distribution law, std::uint64_t tile,
               Draw x[kTile]);

// The 16 bits of each coordinate's rounding.
void rounding_tile(const Stream& stream, std::uint64_t tile, Word bits[kTile]);

}  // namespace dpkern::counted
