#pragma once
// ChaCha (RFC 8439 block function; 20, 12 or 8 rounds) over a word type W: uint32_t makes one block
// per set, a vector of n lanes makes n blocks side by side. Several sets in flight hide latency.

#include "core/layouts.h"
#include "core/numeric.h"

namespace dpkern {

template <int kBits, class W>
DPK_HD void rotate_left(W& x) {
#if !defined(__CUDACC__)
  // AVX2 has no rotation, but by whole bytes it is one shuffle instead of three operations.
  if constexpr (kBits % 8 == 0 && sizeof(W) == 32) {
    typedef std::uint8_t Bytes __attribute__((vector_size(32)));
    Bytes from{};
    for (int i = 0; i < 32; ++i) {
      from[i] = static_cast<std::uint8_t>((i & ~3) | ((i + 4 - kBits / 8) & 3));
    }
    x = reinterpret_cast<W>(__builtin_shuffle(reinterpret_cast<Bytes>(x), from));
    return;
  }
#endif
  x = (x << kBits) | (x >> (32 - kBits));
}

template <class W>
DPK_HD void quarter_round(W& a, W& b, W& c, W& d) {
  a += b, d ^= a, rotate_left<16>(d);
  c += d, b ^= c, rotate_left<12>(b);
  a += b, d ^= a, rotate_left<8>(d);
  c += d, b ^= c, rotate_left<7>(b);
}

template <int kSets, class W>
DPK_HD void quarter_rounds(W x[kSets][16], int a, int b, int c, int d) {
  for (int set = 0; set < kSets; ++set) quarter_round(x[set][a], x[set][b], x[set][c], x[set][d]);
}

template <int kSets, class W>
DPK_HD void column_round(W x[kSets][16]) {
  quarter_rounds<kSets>(x, 0, 4, 8, 12);
  quarter_rounds<kSets>(x, 1, 5, 9, 13);
  quarter_rounds<kSets>(x, 2, 6, 10, 14);
  quarter_rounds<kSets>(x, 3, 7, 11, 15);
}

template <int kSets, class W>
DPK_HD void diagonal_round(W x[kSets][16]) {
  quarter_rounds<kSets>(x, 0, 5, 10, 15);
  quarter_rounds<kSets>(x, 1, 6, 11, 12);
  quarter_rounds<kSets>(x, 2, 7, 8, 13);
  quarter_rounds<kSets>(x, 3, 4, 9, 14);
}

// out[set][0..15] = the words of the block(s) with counters low[set] + 2^32 high; `rounds` is even.
template <int kSets, class W>
DPK_HD void chacha_rounds(const Stream& stream, int rounds, std::uint32_t n0, const W low[kSets],
                          std::uint32_t high, W out[kSets][16]) {
  W start[16] = {broadcast<W>(0x61707865u), broadcast<W>(0x3320646eu),  // "expand 32-byte k"
                 broadcast<W>(0x79622d32u), broadcast<W>(0x6b206574u)};
  for (int i = 0; i < 8; ++i) start[4 + i] = broadcast<W>(stream.key[i]);
  start[13] = broadcast<W>(high);
  start[14] = broadcast<W>(n0);
  start[15] = broadcast<W>(stream.n1);
  W x[kSets][16];
  for (int i = 0; i < 16; ++i) x[0][i] = i == 12 ? low[0] : start[i];
  // Only the first column holds the counter: after one round of the others, all sets still agree.
  quarter_round(x[0][1], x[0][5], x[0][9], x[0][13]);
  quarter_round(x[0][2], x[0][6], x[0][10], x[0][14]);
  quarter_round(x[0][3], x[0][7], x[0][11], x[0][15]);
  for (int set = 1; set < kSets; ++set) {
    for (int i = 0; i < 16; ++i) x[set][i] = i == 12 ? low[set] : x[0][i];
  }
  quarter_rounds<kSets>(x, 0, 4, 8, 12);
  diagonal_round<kSets>(x);
  DPK_ROLLED
  for (int round = 2; round < rounds; round += 2) {
    column_round<kSets>(x);
    diagonal_round<kSets>(x);
  }
  for (int set = 0; set < kSets; ++set) {
    for (int i = 0; i < 16; ++i) out[set][i] = x[set][i] + (i == 12 ? low[set] : start[i]);
  }
}

template <int kSets, class W>
DPK_HD void chacha_blocks(const Stream& stream, std::uint32_t n0, const W low[kSets],
                          std::uint32_t high, W out[kSets][16]) {
#if defined(__CUDACC__)
  chacha_rounds<kSets>(stream, stream.rounds, n0, low, high, out);
#else
  // Each number of rounds is a constant where this is inlined.
  if (stream.rounds == 20) {
    chacha_rounds<kSets>(stream, 20, n0, low, high, out);
  } else if (stream.rounds == 12) {
    chacha_rounds<kSets>(stream, 12, n0, low, high, out);
  } else {
    chacha_rounds<kSets>(stream, 8, n0, low, high, out);
  }
#endif
}

// One block.
template <class W>
DPK_HD void chacha_block(const Stream& stream, std::uint32_t n0, std::uint64_t counter, W out[16]) {
  const W low[1] = {broadcast<W>(static_cast<std::uint32_t>(counter))};
  W block[1][16];
  chacha_blocks<1>(stream, n0, low, static_cast<std::uint32_t>(counter >> 32), block);
  for (int i = 0; i < 16; ++i) out[i] = block[0][i];
}

}  // namespace dpkern
