#pragma once
// The integer noise laws (docs/noise.md), word for word: 48 random bits make one coordinate
//   X = K 2^14 + U1 + offset,   y = floor((v + X) / 2^14).
// Six consecutive keystream words w[0..5] of one lane serve its four coordinates b = 0..3.

#include <cmath>

#include "core/abi.h"
#include "core/chacha.h"
#include "core/numeric.h"
#include "core/tables.h"

namespace dpkern {

constexpr std::uint32_t kEscape = 255;         // the column that sends a draw into the tail
constexpr std::uint32_t kTailDomain = 1u << 31;  // nonce bit of the tail's own keystream

struct Gaussian {
  static constexpr const std::uint32_t* table = kGaussianTable;
  template <class W>
  DPK_HD W offset(const W& second_uniform) {
    return (second_uniform << 6) + 32u;
  }
};

struct Laplace {
  static constexpr const std::uint32_t* table = kLaplaceTable;
  template <class W>
  DPK_HD W offset(const W&) {
    return broadcast<W>(1u << (kFineBits - 1));
  }
};

// K = k or -1 - k by the sign bit of `bits`; its low 14 bits are U1.
template <class W>
DPK_HD W assemble(const W& magnitude, const W& bits, const W& offset) {
  const W sign = W{} - ((bits >> 15) & 1u);
  return ((magnitude ^ sign) << kFineBits) + (bits & 0x3fffu) + offset;
}

// Coordinate b of a lane, with `lookup(column)` giving the alias table's entry; `escaped` collects
// a mask of the lanes whose draw belongs to the tail and must be made again by `draw_tail`.
template <class Law, class W, class Lookup>
DPK_HD W draw(const W w[6], int b, const Lookup& lookup, W& escaped) {
  const int half = 16 * (b & 1);
  const W threshold = (w[b >> 1] >> half) & 0xffffu;
  const W bits = w[2 + (b >> 1)] >> half;
  const W column = (w[4] >> (8 * b)) & 0xffu;
  const W second_uniform = (w[5] >> (8 * b)) & 0xffu;
  const W entry = lookup(column, b);
  const W magnitude = select(mask_less(threshold, entry & 0xffffu), column, entry >> 16);
  escaped |= mask_equal(magnitude, broadcast<W>(kEscape));
  return assemble(magnitude, bits, Law::offset(second_uniform));
}

// k = 255 + #{t in 1..557 : R < N_t} with R the block's first 128 bits: N is decreasing.
DPK_HD std::uint32_t tail_magnitude(Gaussian, const std::uint32_t block[16]) {
  int low = 0;
  int high = kGaussianTailSize;
  while (low < high) {
    const int middle = (low + high) / 2;
    const std::uint32_t* bound = kGaussianTail[middle];
    bool below = false;
    for (int word = 3; word >= 0; --word) {
      if (block[word] != bound[word]) {
        below = block[word] < bound[word];
        break;
      }
    }
    if (below) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return kEscape + static_cast<std::uint32_t>(low);
}

// Memoryless: each escape starts the law again 255 further out, at most 16 times.
DPK_HD std::uint32_t tail_magnitude(Laplace, const std::uint32_t block[16]) {
  std::uint32_t base = kEscape;
  for (int restart = 0; restart < 16; ++restart, base += kEscape) {
    const std::uint32_t column = (block[restart] >> 16) & 0xffu;
    const std::uint32_t entry = kLaplaceTable[column];
    const std::uint32_t k = (block[restart] & 0xffffu) < (entry & 0xffffu) ? column : entry >> 16;
    if (k != kEscape) return base + k;
  }
  return base;
}

// The draw at `position` made again from scratch, tail included.
template <class Law>
DPK_HD std::int32_t draw_tail(const Stream& stream, std::uint64_t position,
                              const std::uint32_t w[6], int b) {
  std::uint32_t block[16];
  chacha_block(stream, stream.n0 ^ kTailDomain, position, block);
  const std::uint32_t bits = w[2 + (b >> 1)] >> (16 * (b & 1));
  const std::uint32_t second_uniform = (w[5] >> (8 * b)) & 0xffu;
  return static_cast<std::int32_t>(
      assemble(tail_magnitude(Law{}, block), bits, Law::offset(second_uniform)));
}

// A draw may only have escaped if it lies this far out; used to find escapes in a finished tile.
DPK_HD bool may_have_escaped(std::int32_t x) {
  constexpr std::int32_t far = 254 << kFineBits;
  return x >= far || x < -far;
}

// y = floor((v + X) / 2^14) without overflow for any v: the integer part of v moves past the carry.
template <class T>
DPK_HD T release_integer(T v, std::int32_t x) {
  constexpr T low_mask = (T{1} << kFineBits) - 1;
  const std::int32_t low = static_cast<std::int32_t>(v & low_mask);
  return (v >> kFineBits) + static_cast<T>((low + x) >> kFineBits);
}

// The float tier: v / u = `units` is rounded stochastically with 16 bits, then released. The split
// into cells and the rest keeps every step exact, so y is exact until it exceeds T's mantissa.
template <class T>
DPK_HD T release_float(T units, std::uint32_t rounding, std::int32_t x) {
  const T below = std::floor(units);
  const std::int32_t fraction = static_cast<std::int32_t>((units - below) * T{65536});
  const std::int32_t carry = fraction + static_cast<std::int32_t>(rounding) >= 65536 ? 1 : 0;
  const T cells = std::floor(below * (T{1} / (1 << kFineBits)));
  const std::int32_t low = static_cast<std::int32_t>(below - cells * T{1 << kFineBits}) + carry;
  return cells + static_cast<T>((low + x) >> kFineBits);
}

// Coordinate j of a tile takes half j div 16 (low first) of the block of lane j mod 16.
DPK_HD std::uint32_t rounding_bits(std::uint32_t word, int half) {
  return (word >> (16 * (half & 1))) & 0xffffu;
}

}  // namespace dpkern
