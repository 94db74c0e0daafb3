#pragma once
// Noise from a cumulative table of a law (docs/noise_tables.md), word for word: two random words
// make one coordinate,
//   X = K 2^14 + U1 + offset,   K = k or -1 - k,   k = #{j : C_j <= W},
// however many bits W and the boundaries C_j have. The first word is sign (bit 15), U1 (bits 0 to
// 13) and U2 (bits 16 to 23), the second one the first 32 bits of W. Its other bits are only made
// for a draw whose first 32 bits are those of a boundary: they have a keystream of their own.

#include "core/lattice.h"

namespace dpkern {

constexpr int kCdtWords = 2;   // random words of a draw
constexpr int kEdgeBits = 20;  // of a word, behind those that choose the bucket
constexpr std::uint32_t kEdgeMask = (1u << kEdgeBits) - 1;
constexpr std::uint32_t kManyEdges = 1u << 31;  // a bucket with two boundaries or more

static_assert(kGuide == 1 << (32 - kEdgeBits), "a word chooses its bucket by its first bits");

// The table in memory, one array behind the other.
//   guide: k of a bucket's first word, times 2^20, and the last 20 bits of the one boundary in it;
//          all ones where there is none, and with kManyEdges where there are several
//   heads: the first 32 bits of each boundary
//   tails: the next 96 bits, three words each, the lowest first
struct CdtTable {
  const std::uint32_t* guide;
  const std::uint32_t* heads;
  const std::uint32_t* tails;
  std::int64_t count;
};

DPK_HD CdtTable cdt_table(const void* words, std::int64_t count) {
  const auto* const guide = static_cast<const std::uint32_t*>(words);
  return {guide, guide + kGuide, guide + kGuide + count, count};
}

template <class W>
DPK_HD W cdt_bucket(const W& index) {
  return index >> kEdgeBits;
}

// k by the guide's entry alone; `undecided` gets a mask of the lanes that `cdt_search` must decide.
template <class W>
DPK_HD W cdt_magnitude(const W& index, const W& entry, W& undecided) {
  const W low = index & kEdgeMask;
  const W edge = entry & kEdgeMask;
  undecided = mask_equal(low, edge) | spread_top_bit(entry);
  return ((entry & ~kManyEdges) >> kEdgeBits) - mask_less(edge, low);
}

// Whether a boundary's last 96 bits are more than those of the block.
DPK_HD bool cdt_above(const std::uint32_t tail[3], const std::uint32_t block[16]) {
  for (int word = 2; word >= 0; --word) {
    if (tail[word] != block[word]) return tail[word] > block[word];
  }
  return false;
}

// k of the draw at `position`, whatever the guide says of its bucket.
DPK_HD std::uint32_t cdt_search(const CdtTable& table, const Stream& stream, std::uint64_t position,
                                std::uint32_t index) {
  std::int64_t k = (table.guide[cdt_bucket(index)] & ~kManyEdges) >> kEdgeBits;
  while (k < table.count && table.heads[k] < index) ++k;
  if (k == table.count || table.heads[k] != index) return static_cast<std::uint32_t>(k);
  std::uint32_t block[16];
  chacha_block(stream, stream.n0 ^ kTailDomain, position, block);
  while (k < table.count && table.heads[k] == index && !cdt_above(table.tails + 3 * k, block)) ++k;
  return static_cast<std::uint32_t>(k);
}

// X of a magnitude and a draw's first word.
template <class Law, class W>
DPK_HD W cdt_value(const W& magnitude, const W& word) {
  return assemble(magnitude, word, 0, Law::offset(word, 2));
}

}  // namespace dpkern
