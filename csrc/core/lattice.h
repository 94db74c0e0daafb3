#pragma once
// The integer noise distributions (docs/noise.md), word for word: 48 random bits make one
// coordinate
//   X = K 2^14 + U1 + offset,   y = floor((v + X) / 2^14).
// Six consecutive keystream words w[0..5] of one lane serve its four coordinates b = 0..3.

#include "core/chacha.h"
#include "core/layouts.h"
#include "core/numeric.h"
#include "core/tables.h"

namespace dpkern {

constexpr std::uint32_t kEscape = 255;           // the column that sends a draw into the tail
constexpr std::uint32_t kTailDomain = 1u << 31;  // nonce bit of the tail's own keystream

struct Gaussian {
  DPK_HD constexpr const std::uint32_t* table() { return kGaussianTable; }
  // 64 U2 + 32, with U2 = byte b of the word.
  template <class W>
  DPK_HD W offset(const W& word, int b) {
    const W shifted = b == 0 ? word << 6 : word >> (8 * b - 6);
    return (shifted & 0x3fc0u) + 32u;
  }
};

struct Laplace {
  DPK_HD constexpr const std::uint32_t* table() { return kLaplaceTable; }
  template <class W>
  DPK_HD W offset(const W&, int) {
    return broadcast<W>(1u << (kFineBits - 1));
  }
};

// K = k or -1 - k by the top bit of half b mod 2 of the word, whose low 14 bits are U1.
template <class W>
DPK_HD W assemble(const W& magnitude, const W& word, int b, const W& offset) {
  const bool high = (b & 1) != 0;
  const W sign = spread_top_bit(high ? word : word << 16);
  const W uniform = (high ? word >> 16 : word) & 0x3fffu;
  return ((magnitude ^ sign) << kFineBits) + uniform + offset;
}

// Coordinate b of a lane, with `lookup(column)` giving the alias table's entry; `escaped` collects
// a mask of the lanes whose draw belongs to the tail and must be made again by `draw_tail`.
template <class Law, class W, class Lookup>
DPK_HD W draw(const W w[6], int b, const Lookup& lookup, W& escaped) {
  const W threshold = (w[b >> 1] >> (16 * (b & 1))) & 0xffffu;
  const W column = (w[4] >> (8 * b)) & 0xffu;
  const W entry = lookup(column, b);
  const W magnitude = select(mask_less(threshold, entry & 0xffffu), column, entry >> 16);
  escaped |= mask_equal(magnitude, broadcast<W>(kEscape));
  return assemble(magnitude, w[2 + (b >> 1)], b, Law::offset(w[5], b));
}

// k = 255 + #{t in 1..557 : R < N_t} with R the block's first 128 bits: N is decreasing.
template <class W>
DPK_HD W tail_magnitude(Gaussian, const W block[16]) {
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
  return W(kEscape + static_cast<std::uint32_t>(low));
}

// Memoryless: each escape starts the law again 255 further out, at most 16 times.
template <class W>
DPK_HD W tail_magnitude(Laplace, const W block[16]) {
  std::uint32_t base = kEscape;
  for (int restart = 0; restart < 16; ++restart, base += kEscape) {
    const W column = (block[restart] >> 16) & 0xffu;
    const W entry = kLaplaceTable[index_of(column)];
    const W k = (block[restart] & 0xffffu) < (entry & 0xffffu) ? column : entry >> 16;
    if (k != kEscape) return base + k;
  }
  return W(base);
}

// The draw at `position` made again from scratch, tail included.
template <class Law, class W>
DPK_HD typename SignedTwin<W>::type draw_tail(const Stream& stream, std::uint64_t position,
                                              const W w[6], int b) {
  W block[16];
  chacha_block(stream, stream.n0 ^ kTailDomain, position, block);
  const W magnitude = tail_magnitude(Law{}, block);
  return as_signed(assemble(magnitude, w[2 + (b >> 1)], b, Law::offset(w[5], b)));
}

// The same from the draw itself, whose magnitude is that of the escape, 255: the tail moves it
// outward and leaves the rest.
template <class Law>
DPK_HD std::int32_t extend_escape(const Stream& stream, std::uint64_t position, std::int32_t x) {
  std::uint32_t block[16];
  chacha_block(stream, stream.n0 ^ kTailDomain, position, block);
  const std::uint32_t further = tail_magnitude(Law{}, block) - kEscape;
  const std::int32_t distance = static_cast<std::int32_t>(further << kFineBits);
  return x < 0 ? x - distance : x + distance;
}

// A draw may only have escaped if it lies this far out; used to find escapes in a finished tile.
template <class I>
DPK_HD bool may_have_escaped(I x) {
  constexpr std::int32_t far = 254 << kFineBits;
  return x >= far || x < -far;
}

// y = floor((v + X) / 2^14) without overflow for any v: the integer part of v moves past the carry.
template <class T, class I>
DPK_HD T release_integer(T v, I x) {
  constexpr T low_mask{(1 << kFineBits) - 1};
  const I low = static_cast<I>(v & low_mask);
  return (v >> kFineBits) + static_cast<T>((low + x) >> kFineBits);
}

// Float arithmetic: v / u = `units` is rounded stochastically with 16 bits, then released. The
// split into cells and the rest keeps every step exact, so y is exact until it exceeds T's
// mantissa.
template <class T, class U, class I>
DPK_HD T release_float(T units, U rounding, I x) {
  using std::floor;
  const T below = floor(units);
  const I fraction = static_cast<I>((units - below) * T{65536});
  const I carry = fraction + static_cast<I>(rounding) >= 65536 ? 1 : 0;
  const T cells = floor(below * T{1.0 / (1 << kFineBits)});
  const I low = static_cast<I>(below - cells * T{1 << kFineBits}) + carry;
  return cells + static_cast<T>((low + x) >> kFineBits);
}

// Whether `release_small` takes these units.
DPK_HD bool is_small(float units) { return std::fabs(units) < 0x1p30f; }

// The bits of `release_float` with whole numbers of 32 bits, in half of a device's instructions:
// floor(units), the carry and X add up to less than 2^31.
DPK_HD float release_small(float units, std::uint32_t rounding, std::int32_t x) {
  const auto below = static_cast<std::int32_t>(std::floor(units));
  const auto fraction =
      static_cast<std::uint32_t>((units - static_cast<float>(below)) * 65536.0f) + rounding;
  const std::int32_t carry = static_cast<std::int32_t>(fraction >> 16);
  return static_cast<float>((below + carry + x) >> kFineBits);
}

// Coordinate j of a tile takes half j div 16 (low first) of the block of lane j mod 16.
template <class W>
DPK_HD W rounding_bits(W word, int half) {
  return (word >> (16 * (half & 1))) & 0xffffu;
}

}  // namespace dpkern
