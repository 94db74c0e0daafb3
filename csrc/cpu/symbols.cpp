// Randomized response: every symbol keeps or changes by the value of one 64-bit word.

#include <algorithm>

#include "core/response.h"
#include "cpu/isa.h"
#include "cpu/noise.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"

namespace dpkern::cpu {
namespace {

constexpr int kPerBlock = 8;  // symbols of a cipher block
constexpr int kTileSymbols = kRowBlocks * kPerBlock;
constexpr std::int64_t kGrain = 32 * kTileSymbols;  // symbols worth a thread

// The move of each symbol of a tile, in the order of symbols; rows as `keystream_rows` makes them.
template <class Move>
DPK_INLINE inline void moves_of(const std::uint32_t* rows, std::uint32_t* moves, const Move& move) {
  for (int group = 0; group < kRowBlocks / kLanes; ++group) {
    const std::uint32_t* row = rows + group * 16 * kLanes;
    std::uint32_t* out = moves + group * kPerBlock * kLanes;
    for (int pair = 0; pair < kPerBlock; ++pair) {
      std::uint32_t moved[kLanes];
      for (int lane = 0; lane < kLanes; ++lane) {
        const std::uint64_t high = row[(2 * pair + 1) * kLanes + lane];
        moved[lane] = move(high << 32 | row[2 * pair * kLanes + lane]);
      }
      for (int lane = 0; lane < kLanes; ++lane) out[lane * kPerBlock + pair] = moved[lane];
    }
  }
}

// 1 for each symbol of a tile of two categories that changes, in the order of symbols: those of a
// block are the bytes of two words, made for all lanes at once.
DPK_INLINE inline void flips_of(const std::uint32_t* rows, std::uint64_t keep,
                                std::uint32_t* flips) {
  const auto high = static_cast<std::uint32_t>(keep >> 32), low = static_cast<std::uint32_t>(keep);
  for (int group = 0; group < kRowBlocks / kLanes; ++group) {
    std::uint32_t words[2][kLanes] = {};
    for (int pair = 0; pair < kPerBlock; ++pair) {
      const std::uint32_t* const lows = rows + (16 * group + 2 * pair) * kLanes;
      for (int lane = 0; lane < kLanes; ++lane) {
        const std::uint32_t top = lows[kLanes + lane];
        const std::uint32_t flip = (top > high) | ((top == high) & (lows[lane] >= low));
        words[pair / 4][lane] |= flip << (8 * (pair % 4));
      }
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      flips[2 * (group * kLanes + lane)] = words[0][lane];
      flips[2 * (group * kLanes + lane) + 1] = words[1][lane];
    }
  }
}

}  // namespace

// randomized[i] = the response to symbols[i], a category below `categories`. Symbol i takes words
// 2 (position + i) and 2 (position + i) + 1 of the keystream.
template <class T>
void randomize(const Randomize<T>& call, int threads) {
  const ResponseParams response =
      make_response_params(static_cast<std::uint32_t>(call.categories), call.keep);
  parallel_for(call.S, kGrain, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t index = begin; index < end;) {
      const std::uint64_t position = static_cast<std::uint64_t>(call.position + index);
      const int offset = static_cast<int>(position % kTileSymbols);
      const auto left =
          static_cast<int>(std::min<std::int64_t>(kTileSymbols - offset, end - index));
      alignas(64) std::uint32_t rows[kRowBlocks * kLanes];
      alignas(64) std::uint32_t moves[kTileSymbols];
      keystream_rows(call.stream, position / kTileSymbols * kRowBlocks, rows);
      versioned([&]() DPK_INLINE {
        const ResponseParams told = response;
        const T* from = call.symbols + index;
        T* to = call.randomized + index;
        if (told.categories == 2) {
          flips_of(rows, told.keep, moves);
          const auto* const flip = reinterpret_cast<const std::uint8_t*>(moves) + offset;
          for (int i = 0; i < left; ++i) to[i] = static_cast<T>(from[i] ^ flip[i]);
          return;
        }
        moves_of(rows, moves, [=](std::uint64_t u) { return response_shift(told, u); });
        const std::uint32_t* move = moves + offset;
        for (int i = 0; i < left; ++i) {
          const auto symbol = static_cast<std::uint32_t>(from[i]);
          to[i] = static_cast<T>(moved_symbol(symbol, move[i], told.categories));
        }
      });
      index += left;
    }
  });
}

template void randomize<std::uint8_t>(const Randomize<std::uint8_t>&, int);
template void randomize<std::int32_t>(const Randomize<std::int32_t>&, int);
template void randomize<std::int64_t>(const Randomize<std::int64_t>&, int);

}  // namespace dpkern::cpu
