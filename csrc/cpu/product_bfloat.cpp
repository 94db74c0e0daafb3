#include "cpu/product_bfloat.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "cpu/amx.h"
#include "cpu/panels.h"
#include "cpu/parallel.h"

namespace dpkern::cpu {
namespace {

constexpr std::int64_t kInner = 32;    // entries of the inner dimension in a tile
constexpr std::int64_t kFewest = 8;    // that are worth filling one up
constexpr std::int64_t kColumns = 16;  // of a tile

}  // namespace

bool by_bfloat(const Matmul<float>& call) { return isa() >= Isa::kAmx && call.K >= kFewest; }

#if DPK_X86

namespace {

using ghost::scratch;

// Bytes of a tile and one line more: rows of tiles behind each other lie in different sets of the
// cache.
constexpr std::int64_t kTile = kTileRows * kTileBytes + 64;
constexpr int kParts = 3;
constexpr std::int64_t kTriple = kParts * kTile;
constexpr std::int64_t kBlock = 512;            // entries of the inner dimension at a time, at most
constexpr std::int64_t kGrain = 2 * kTileRows;  // rows
constexpr std::int64_t kTogether = 4 * kGrain;  // rows that meet a panel of columns in a cache
constexpr std::int64_t kAhead = 2;              // rows that are asked for early
constexpr std::int64_t kUnit = 2 * kColumns;    // columns
constexpr std::int64_t kWidest = 4096;          // columns that are packed at a time
constexpr std::int64_t kSmallest = 1 << 20;     // multiplications worth a thread

// Numbers next to the largest float, infinities and NaN.
struct Beyond {
  Words found{};
  DPK_INLINE void look(Floats x) {
    const Words bits = reinterpret_cast<Words>(x) & 0x7fffffffu;
    found = bits > found ? bits : found;
  }
  DPK_AMX DPK_INLINE bool any() const {
    const auto limit = _mm512_set1_epi32(0x7f000000);
    return _mm512_cmpge_epu32_mask(reinterpret_cast<__m512i>(found), limit) != 0;
  }
};

// Three numbers whose sum x is, in the high halves of lanes: each is the nearest bfloat16 number to
// what the ones before leave.
DPK_INLINE inline void split(Floats x, Words parts[kParts]) {
  for (int i = 0; i < kParts; ++i) {
    parts[i] = nearest(x);
    x -= reinterpret_cast<Floats>(parts[i]);
  }
}

// Pairs of numbers, the first one in the low half of a lane: a row of each of three tiles.
DPK_INLINE inline void write_pairs(Floats x, Floats y, std::uint8_t* to) {
  Words first[kParts], second[kParts];
  split(x, first), split(y, second);
  for (int i = 0; i < kParts; ++i) {
    const Words pairs = first[i] >> 16 | second[i];
    __builtin_memcpy(to + i * kTile, &pairs, kTileBytes);
  }
}

// Rows [0, used) of [*, stride], entries [0, count): tiles whose row holds entries l and l + 16 of
// each 32 in lane l. Returns the rows with numbers beyond as bits.
DPK_AMX DPK_INLINE inline std::uint32_t pack_rows(const float* from, std::int64_t used,
                                                  std::int64_t count, std::int64_t stride,
                                                  std::uint8_t* to) {
  std::uint32_t flagged = 0;
  for (std::int64_t m = 0; m < kTileRows; ++m) {
    Beyond beyond;
    const float* const row = from + m * stride;
    std::uint8_t* out = to + m * kTileBytes;
    for (std::int64_t k = 0; k < count; k += kInner, out += kTriple) {
      _mm_prefetch(row + k + kAhead * stride, _MM_HINT_T0);
      _mm_prefetch(row + k + kAhead * stride + kTileRows, _MM_HINT_T0);
      Floats x{}, y{};
      if (m < used) x = some(row + k, count - k), y = some(row + k + 16, count - k - 16);
      beyond.look(x), beyond.look(y);
      write_pairs(x, y, out);
    }
    if (beyond.any()) flagged |= 1u << m;
  }
  return flagged;
}

// The same of columns [0, used) of [count, stride]: what a tile of rows is multiplied with.
DPK_AMX DPK_INLINE inline std::uint32_t pack_columns(const float* from, std::int64_t used,
                                                     std::int64_t count, std::int64_t stride,
                                                     std::uint8_t* to) {
  Beyond beyond;
  for (std::int64_t k = 0; k < count; k += kInner, to += kTriple) {
    for (std::int64_t r = 0; r < kInner / 2; ++r) {
      Floats x{}, y{};
      if (k + r < count) x = some(from + (k + r) * stride, used);
      if (k + r + 16 < count) y = some(from + (k + r + 16) * stride, used);
      beyond.look(x), beyond.look(y);
      write_pairs(x, y, to + r * kTileBytes);
    }
  }
  return beyond.any() ? 1 : 0;
}

// 16 columns of w, [K, M] or stored [M, K]: entries `inner` of each.
DPK_AMX std::uint32_t pack_right(const Matmul<float>& call, std::int64_t column, Range inner,
                                 std::uint8_t* to) {
  const std::int64_t used = call.M - column, count = inner.end - inner.begin;
  if (!call.w_transposed) {
    return pack_columns(call.w + inner.begin * call.M + column, used, count, call.M, to);
  }
  const std::uint32_t found =
      pack_rows(call.w + column * call.K + inner.begin, used, count, call.K, to);
  for (std::int64_t k = 0; k < count; k += kInner) {
    for (int i = 0; i < kParts; ++i) transpose(to + (k / kInner * kParts + i) * kTile);
  }
  return found;
}

// Four tiles of the result, or the left two of them. The number of a tile register has to be
// written out.
struct Square {
  float* at[2][2];
  std::int64_t stride;  // bytes
};

#define DPK_LOAD_LEFT(part)                          \
  _tile_loadd(4, left + (part) * kTile, kTileBytes); \
  _tile_loadd(5, below + (part) * kTile, kTileBytes)
#define DPK_LOAD_RIGHT(part)                          \
  _tile_loadd(6, right + (part) * kTile, kTileBytes); \
  if (kWide) _tile_loadd(7, next + (part) * kTile, kTileBytes)
#define DPK_MULTIPLY                  \
  _tile_dpbf16ps(0, 4, 6);            \
  _tile_dpbf16ps(1, 5, 6);            \
  if (kWide) _tile_dpbf16ps(2, 4, 7); \
  if (kWide) _tile_dpbf16ps(3, 5, 7)

// += the product of two panels of rows and two of columns.
template <bool kWide>
DPK_AMX DPK_INLINE inline void multiply(const std::uint8_t* left, const std::uint8_t* below,
                                        const std::uint8_t* right, const std::uint8_t* next,
                                        std::int64_t steps) {
  for (std::int64_t k = 0; k < steps; ++k) {
    DPK_LOAD_LEFT(0);
    DPK_LOAD_RIGHT(2);
    DPK_MULTIPLY;
    DPK_LOAD_RIGHT(1);
    DPK_MULTIPLY;
    DPK_LOAD_RIGHT(0);
    DPK_MULTIPLY;
    DPK_LOAD_LEFT(2);
    DPK_MULTIPLY;
    DPK_LOAD_LEFT(1);
    DPK_MULTIPLY;
    DPK_LOAD_RIGHT(1);
    DPK_MULTIPLY;
    left += kTriple, below += kTriple, right += kTriple, next += kTriple;
  }
}

#undef DPK_LOAD_LEFT
#undef DPK_LOAD_RIGHT
#undef DPK_MULTIPLY

template <bool kWide>
DPK_AMX DPK_INLINE inline void multiply(const Square& from, const Square& to,
                                        const std::uint8_t* left, const std::uint8_t* below,
                                        const std::uint8_t* right, const std::uint8_t* next,
                                        std::int64_t steps) {
  _tile_loadd(0, from.at[0][0], from.stride);
  _tile_loadd(1, from.at[1][0], from.stride);
  if (kWide) _tile_loadd(2, from.at[0][1], from.stride);
  if (kWide) _tile_loadd(3, from.at[1][1], from.stride);
  multiply<kWide>(left, below, right, next, steps);
  _tile_stored(0, to.at[0][0], to.stride);
  _tile_stored(1, to.at[1][0], to.stride);
  if (kWide) _tile_stored(2, to.at[0][1], to.stride);
  if (kWide) _tile_stored(3, to.at[1][1], to.stride);
}

// One block of the inner dimension and of columns: panels of these behind each other.
struct Work {
  const Matmul<float>& call;
  const float* bias;  // filled up to whole units
  Range inner, columns;
  std::int64_t steps;
  const std::uint8_t* right;

  // out[rows, columns] = bias + the product, or += it from the second block on.
  DPK_AMX DPK_INLINE void add_square(const std::uint8_t* left, Range rows,
                                     std::int64_t column) const {
    const std::int64_t panel = steps * kTriple;
    const std::uint8_t* const below = left + panel;
    const std::uint8_t* const from = right + (column - columns.begin) / kColumns * panel;
    const std::uint8_t* const next = from + panel;
    const std::int64_t tall = rows.end - rows.begin;
    const std::int64_t wide = std::min(kUnit, columns.end - column);
    float* const out = call.out + rows.begin * call.M + column;
    const bool fresh = inner.begin == 0;
    alignas(64) float copy[kGrain][kUnit];
    Square to{{{copy[0], copy[0] + kColumns}, {copy[16], copy[16] + kColumns}},
              kUnit * static_cast<std::int64_t>(sizeof(float))};
    const bool whole = tall == kGrain && (wide == kUnit || wide == kColumns);
    if (whole) {
      ghost::prefetch_rows<kUnit>(out, kGrain, call.M);
      float* const low = out + kTileRows * call.M;
      to = {{{out, out + kColumns}, {low, low + kColumns}},
            call.M * static_cast<std::int64_t>(sizeof(float))};
    } else if (!fresh) {
      for (std::int64_t m = 0; m < tall; ++m) std::copy_n(out + m * call.M, wide, copy[m]);
    }
    Square start = to;
    if (fresh) {
      auto* const row = const_cast<float*>(bias + column);
      start = {{{row, row + kColumns}, {row, row + kColumns}}, 0};
    }
    if (wide > kColumns) {
      multiply<true>(start, to, left, below, from, next, steps);
    } else {
      multiply<false>(start, to, left, below, from, next, steps);
    }
    if (whole) return;
    asm volatile("" ::: "memory");
    for (std::int64_t m = 0; m < tall; ++m) std::copy_n(copy[m], wide, out + m * call.M);
  }

  // All columns of some rows; notes those with numbers beyond.
  DPK_AMX void run(Range rows, std::uint32_t* beyond) const {
    const std::int64_t panel = steps * kTriple, count = inner.end - inner.begin;
    std::uint8_t* const left = scratch<std::uint8_t, 10>(kTogether / kTileRows * panel);
    const AmxTiles tiles;
    for (std::int64_t first = rows.begin; first < rows.end; first += kTogether) {
      const std::int64_t end = std::min(rows.end, first + kTogether);
      for (std::int64_t row = first; row < ghost::round_up(end - first, kGrain) + first;
           row += kTileRows) {
        beyond[row / kTileRows] |= pack_rows(
            call.x + row * call.K + inner.begin, std::clamp<std::int64_t>(end - row, 0, kTileRows),
            count, call.K, left + (row - first) / kTileRows * panel);
      }
      asm volatile("" ::: "memory");  // what the tiles are loaded from has been written
      for (std::int64_t column = columns.begin; column < columns.end; column += kUnit) {
        for (std::int64_t row = first; row < end; row += kGrain) {
          add_square(left + (row - first) / kTileRows * panel, {row, std::min(end, row + kGrain)},
                     column);
        }
      }
    }
  }
};

}  // namespace

void matmul_by_bfloat(const Matmul<float>& call, int threads,
                      void (*other)(const Matmul<float>&, int)) {
  const int team = useful_threads(call.N * call.K * call.M, kSmallest, threads);
  const std::int64_t blocks = (call.K + kBlock - 1) / kBlock;
  const std::int64_t most = (call.K + blocks * kInner - 1) / (blocks * kInner);
  const std::int64_t filled = ghost::round_up(call.M, kUnit);
  std::uint8_t* const right =
      scratch<std::uint8_t, 11>(std::min(filled, kWidest) / kColumns * most * kTriple);
  float* const bias = scratch<float, 12>(filled);
  std::fill_n(bias, filled, 0.0f);
  if (call.bias != nullptr) std::copy_n(call.bias, call.M, bias);
  std::vector<std::uint32_t> beyond(
      static_cast<std::size_t>(ghost::round_up(call.N, kGrain) / kTileRows));
  for (std::int64_t first = 0; first < call.M; first += kWidest) {
    const Range columns{first, std::min(call.M, first + kWidest)};
    for (std::int64_t k = 0; k < call.K; k += most * kInner) {
      const Range inner{k, std::min(call.K, k + most * kInner)};
      const std::int64_t steps = (inner.end - inner.begin + kInner - 1) / kInner;
      std::atomic<std::uint32_t> found{0};
      const std::int64_t panels = (columns.end - columns.begin + kColumns - 1) / kColumns;
      parallel_for(panels, 2, team, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) {
          std::uint8_t* const to = right + i * steps * kTriple;
          found.fetch_or(pack_right(call, columns.begin + i * kColumns, inner, to),
                         std::memory_order_relaxed);
        }
      });
      if (found.load() != 0) return other(call, threads);
      const Work work{call, bias, inner, columns, steps, right};
      parallel_for(call.N, kGrain, team, [&](std::int64_t begin, std::int64_t end) {
        work.run({begin, end}, beyond.data());
      });
    }
  }
  for (std::int64_t row = 0; row < call.N; ++row) {
    const std::uint32_t rows = beyond[static_cast<std::size_t>(row / kTileRows)];
    if ((rows >> (row % kTileRows) & 1) == 0) continue;
    Matmul<float> one = call;
    one.x += row * call.K, one.out += row * call.M, one.N = 1;
    other(one, 1);
  }
}

#else

void matmul_by_bfloat(const Matmul<float>& call, int threads,
                      void (*other)(const Matmul<float>&, int)) {
  other(call, threads);
}

#endif

}  // namespace dpkern::cpu
