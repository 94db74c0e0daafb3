#pragma once
// Cipher blocks of a noise tile, stored word by word.

#include "core/chacha.h"
#include "cpu/isa.h"

namespace dpkern::cpu {

template <int N>
using Words = Vector<std::uint32_t, N>;

// The blocks from `first` on, stored word by word: rows[16 group + word][lane] for groups of 16
// blocks. kSets vectors of N lanes are made at a time.
template <int N, int kSets, int kCount>
DPK_HD void block_rows(const Stream& stream, std::uint64_t first, std::uint32_t* rows) {
  static_assert(kCount % (N * kSets) == 0, "whole vectors");
  Words<N> lane{};
  for (int l = 0; l < N; ++l) lane[l] = static_cast<std::uint32_t>(l);
  for (int start = 0; start < kCount; start += N * kSets) {
    const std::uint64_t counter = first + static_cast<std::uint64_t>(start);
    const auto target = [&](int block) DPK_INLINE {
      return rows + 16 * kLanes * (block / kLanes) + block % kLanes;
    };
    if ((counter + N * kSets - 1) >> 32 != counter >> 32) {  // the vectors share their high half
      for (int i = 0; i < N * kSets; ++i) {
        std::uint32_t out[16];
        chacha_block(stream, stream.n0, counter + static_cast<std::uint64_t>(i), out);
        for (int word = 0; word < 16; ++word) target(start + i)[word * kLanes] = out[word];
      }
      continue;
    }
    Words<N> low[kSets];
    for (int set = 0; set < kSets; ++set) {
      low[set] = lane + (static_cast<std::uint32_t>(counter) + static_cast<std::uint32_t>(N * set));
    }
    Words<N> out[kSets][16];
    chacha_blocks<kSets>(stream, stream.n0, low, static_cast<std::uint32_t>(counter >> 32), out);
    for (int set = 0; set < kSets; ++set) {
      for (int word = 0; word < 16; ++word) {
        __builtin_memcpy(target(start + N * set) + word * kLanes, &out[set][word],
                         sizeof(Words<N>));
      }
    }
  }
}

}  // namespace dpkern::cpu
