#include "cpu/exact_bfloat.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "cpu/amx.h"
#include "cpu/exact.h"
#include "cpu/linear_parts.h"
#include "cpu/panels.h"

namespace dpkern::cpu::exact {
namespace {

constexpr std::int64_t kPositions = 32;  // of a tile
constexpr std::int64_t kFewest = 24;     // positions that are worth filling up to tiles
constexpr std::int64_t kNarrow = 16;     // inputs or outputs that fill one

std::int64_t steps_of(const LinearShape& shape) {
  return (shape.positions + kPositions - 1) / kPositions;
}

}  // namespace

bool by_bfloat(const LinearShape& shape) {
  return isa() >= Isa::kAmx && shape.positions >= kFewest &&
         std::min(shape.inputs, shape.outputs) >= kNarrow;
}

double bfloat_error(const LinearShape& shape, const PositionNorms& norms) {
  // A number beyond may have no bfloat16 next to it.
  if (!(norms.largest < 0x1p127 && norms.products < std::numeric_limits<float>::max())) {
    return std::numeric_limits<double>::infinity();
  }
  // Three products a position, their sums, and those of the tiles: whatever their order.
  const double roundings = static_cast<double>(3 * kPositions * steps_of(shape) + 8);
  constexpr double kLeftOut = 3.02 * 0x1p-16;
  const double d = static_cast<double>(shape.inputs), p = static_cast<double>(shape.outputs);
  const double flushed =
      kFlushed<float> * (2 * roundings * std::sqrt(d * p) + 4 * std::sqrt(d) * norms.outputs +
                         4 * std::sqrt(p) * norms.inputs);
  const double chain = chain_error<float>(3 * kPositions * steps_of(shape) + 8, norms.products);
  return 1.001 * kLeftOut * norms.products + 1.016 * chain + 1.001 * flushed;
}

#if DPK_X86

namespace {

using ghost::load;
using ghost::scratch;

constexpr std::int64_t kTile = kTileRows * kTileBytes;  // bytes
constexpr std::int64_t kBlock = 256;                    // positions of whole samples
constexpr std::int64_t kChunk = 16;                     // panels of rows that stay in a cache

using Integers = Vector<std::int32_t, kTileRows>;

// Two numbers in each lane, the first one in the low half: their nearest bfloat16 numbers, and
// those nearest to what is left.
struct Pairs {
  Words near, rest;
};

DPK_INLINE inline Pairs pairs_of(Floats x, Floats y) {
  const Words first = nearest(x), second = nearest(y);
  const Words left = nearest(x - reinterpret_cast<Floats>(first)),
              right = nearest(y - reinterpret_cast<Floats>(second));
  return {first >> 16 | second, left >> 16 | right};
}

// One sample's columns [0, count) as panels of 16, two tiles for each step: rows of a product (its
// positions are turned into columns), or columns of one.
template <bool kIsRow>
DPK_AMX DPK_INLINE inline void pack(const float* from, const LinearShape& shape,
                                    std::int64_t stride, std::int64_t count, std::uint8_t* to,
                                    std::int64_t panel) {
  constexpr std::int64_t kLines = 4;   // panels whose rows are read together
  constexpr std::int64_t kAhead = 16;  // positions
  const Floats none{};
  for (std::int64_t first = 0; first < shape.positions; first += kPositions, to += 2 * kTile) {
    for (std::int64_t c = 0; c < count; c += kLines * kTileRows) {
      const std::int64_t end = std::min(count, c + kLines * kTileRows);
      const float* row = from + first * stride;
      for (std::int64_t r = 0; r < kTileRows; ++r, row += 2 * stride) {
        const std::int64_t left = shape.positions - first - 2 * r;
        std::uint8_t* out = to + c / kTileRows * panel + r * kTileBytes;
        for (std::int64_t k = c; k < end; k += kTileRows, out += panel) {
          _mm_prefetch(row + k + kAhead * stride, _MM_HINT_T0);
          _mm_prefetch(row + k + (kAhead + 1) * stride, _MM_HINT_T0);
          const Pairs pairs = pairs_of(left > 0 ? some(row + k, end - k) : none,
                                       left > 1 ? some(row + stride + k, end - k) : none);
          __builtin_memcpy(out, &pairs.near, kTileBytes);
          __builtin_memcpy(out + kTile, &pairs.rest, kTileBytes);
        }
      }
      if constexpr (kIsRow) {
        for (std::int64_t k = c; k < end; k += kTileRows) {
          transpose(to + k / kTileRows * panel);
          transpose(to + k / kTileRows * panel + kTile);
        }
      }
    }
  }
}

struct alignas(64) FloatTile {
  float at[kTileRows][kTileRows];
};

// A tile of one sample's gradient. The number of a tile register has to be written out.
#define DPK_MULTIPLY(into)                                                          \
  _tile_zero(into);                                                                 \
  for (std::int64_t k = 0; k < steps; ++k, left += 2 * kTile, right += 2 * kTile) { \
    _tile_loadd(4, left, kTileBytes);                                               \
    _tile_loadd(6, right, kTileBytes);                                              \
    _tile_loadd(7, right + kTile, kTileBytes);                                      \
    _tile_loadd(5, left + kTile, kTileBytes);                                       \
    _tile_dpbf16ps(into, 4, 6);                                                     \
    _tile_dpbf16ps(into, 4, 7);                                                     \
    _tile_dpbf16ps(into, 5, 6);                                                     \
  }                                                                                 \
  _tile_stored(into, to.at, kTileBytes)

template <bool kOdd>
DPK_INLINE inline void multiply(const std::uint8_t* left, const std::uint8_t* right,
                                std::int64_t steps, FloatTile& to) {
  if constexpr (kOdd) {
    DPK_MULTIPLY(1);
  } else {
    DPK_MULTIPLY(0);
  }
}

#undef DPK_MULTIPLY

DPK_INLINE inline void add(const FloatTile& tile, float factor, Integers total[kTileRows]) {
#pragma GCC unroll 16
  for (int m = 0; m < kTileRows; ++m) {
    total[m] += __builtin_convertvector(factor * load<Floats>(tile.at[m]), Integers);
  }
}

// Samples whose positions are multiplied together, by their numbers in the batch.
using Block = std::vector<std::int64_t>;

std::vector<Block> blocks_of(const float* factors, const LinearShape& shape) {
  const auto most = static_cast<std::size_t>(std::max<std::int64_t>(1, kBlock / shape.positions));
  std::vector<Block> blocks;
  for (std::int64_t b = 0; b < shape.batch; ++b) {
    if (factors[b] == 0) continue;
    if (blocks.empty() || blocks.back().size() == most) blocks.emplace_back();
    blocks.back().push_back(b);
  }
  return blocks;
}

// to [tall, wide] += one tile of the block's integers.
DPK_INLINE inline void add_tile(const Block& block, const float* factors, const std::uint8_t* left,
                                const std::uint8_t* right, std::int64_t steps, std::int64_t tall,
                                std::int64_t wide, std::int64_t stride, std::int32_t* to) {
  Integers total[kTileRows] = {};
  FloatTile even, odd;
  const std::size_t count = block.size();
  const std::int64_t size = 2 * kTile * steps;
  const auto factor = [&](std::size_t i) DPK_INLINE { return factors[block[i]]; };
  // The tile before is truncated while the next one is multiplied.
  multiply<false>(left, right, steps, even);
  for (std::size_t i = 1; i + 1 < count; i += 2) {
    left += size, right += size;
    multiply<true>(left, right, steps, odd);
    add(even, factor(i - 1), total);
    left += size, right += size;
    multiply<false>(left, right, steps, even);
    add(odd, factor(i), total);
  }
  if (count % 2 == 0) {
    multiply<true>(left + size, right + size, steps, odd);
    add(even, factor(count - 2), total);
    add(odd, factor(count - 1), total);
  } else {
    add(even, factor(count - 1), total);
  }
  if (tall == kTileRows && wide == kTileRows) {
#pragma GCC unroll 16
    for (int m = 0; m < kTileRows; ++m, to += stride) {
      total[m] += load<Integers>(to);
      __builtin_memcpy(to, total + m, sizeof(Integers));
    }
    return;
  }
  std::int32_t sums[kTileRows][kTileRows];
  __builtin_memcpy(sums, total, sizeof(sums));
  for (std::int64_t m = 0; m < tall; ++m, to += stride) {
    for (std::int64_t c = 0; c < wide; ++c) to[c] += sums[m][c];
  }
}

// out[rows, columns] += the integers of one block.
DPK_AMX void add_block(const float* a, const float* g, const float* factors, const Block& block,
                       const LinearShape& shape, Range rows, Range columns, std::int32_t* out) {
  const std::int64_t steps = steps_of(shape), size = 2 * kTile * steps;
  const auto samples = static_cast<std::int64_t>(block.size());
  // One line more: panels begin in different sets of the cache.
  const std::int64_t panel = samples * size + kTileBytes;
  const std::int64_t column_panels = (columns.end - columns.begin + kTileRows - 1) / kTileRows;
  std::uint8_t* const left = scratch<std::uint8_t, 8>(kChunk * panel);
  std::uint8_t* const right = scratch<std::uint8_t, 9>(column_panels * panel);
  for (std::int64_t b = 0; b < samples; ++b) {
    const float* const from =
        a + block[static_cast<std::size_t>(b)] * shape.positions * shape.inputs;
    pack<false>(from + columns.begin, shape, shape.inputs, columns.end - columns.begin,
                right + b * size, panel);
  }
  const AmxTiles tiles;
  for (std::int64_t first = rows.begin; first < rows.end; first += kChunk * kTileRows) {
    const std::int64_t last = std::min(rows.end, first + kChunk * kTileRows);
    for (std::int64_t b = 0; b < samples; ++b) {
      const float* const from =
          g + block[static_cast<std::size_t>(b)] * shape.positions * shape.outputs;
      pack<true>(from + first, shape, shape.outputs, last - first, left + b * size, panel);
    }
    asm volatile("" ::: "memory");  // what the tiles are loaded from has been written
    for (std::int64_t j = 0; j < column_panels; ++j) {
      const std::int64_t column = columns.begin + j * kTileRows;
      for (std::int64_t row = first; row < last; row += kTileRows) {
        std::int32_t* const to = out + row * shape.inputs + column;
        const std::int64_t tall = std::min<std::int64_t>(kTileRows, last - row);
        if (tall == kTileRows) ghost::prefetch_rows<kTileRows>(to, kTileRows, shape.inputs);
        add_tile(block, factors, left + (row - first) / kTileRows * panel, right + j * panel, steps,
                 tall, std::min<std::int64_t>(kTileRows, columns.end - column), shape.inputs, to);
      }
    }
  }
}

}  // namespace

void add_by_bfloat(const float* a, const float* g, const float* factors, const LinearShape& shape,
                   std::int32_t* out, int threads) {
  const auto blocks = blocks_of(factors, shape);
  for_blocks(blocks, shape, out, threads,
             [&](const Block& block, Range rows, Range columns, std::int32_t* to) {
               add_block(a, g, factors, block, shape, rows, columns, to);
             });
}

#else

void add_by_bfloat(const float*, const float*, const float*, const LinearShape&, std::int32_t*,
                   int) {}

#endif

}  // namespace dpkern::cpu::exact
