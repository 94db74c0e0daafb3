#pragma once
// Panels of floats as sums of three bfloat16 numbers, and their products by tiles: six of nine.
// What is left out is below 2^-22 of a product's size, as roundings are. docs/kernels.md.

#include "cpu/amx.h"

#if DPK_X86

#include <algorithm>
#include <cstdint>

#include "cpu/panels.h"

namespace dpkern::cpu::bfloat {

constexpr std::int64_t kInner = 32;    // entries of the inner dimension in a tile
constexpr std::int64_t kColumns = 16;  // of a tile
// Bytes of a tile and one line more: rows of tiles behind each other lie in different sets of the
// cache.
constexpr std::int64_t kTile = kTileRows * kTileBytes + 64;
constexpr int kParts = 3;
constexpr std::int64_t kTriple = kParts * kTile;
constexpr std::int64_t kGrain = 2 * kTileRows;  // rows that are multiplied together
constexpr std::int64_t kUnit = 2 * kColumns;    // columns that are

// Bytes of 16 rows or columns of that many entries.
DPK_INLINE inline std::int64_t panel_bytes(std::int64_t inner) {
  return (inner + kInner - 1) / kInner * kTriple;
}

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

// Columns [0, used) of rows [0, count), what a tile of rows is multiplied with: panels `size` bytes
// apart, some at a time, so that a row gives whole pieces of memory. `rows` has a pointer `at(k)`,
// also for some k beyond, and a `factor(k)`. Returns whether there are numbers beyond.
template <class Rows>
DPK_AMX DPK_INLINE inline bool pack_columns(const Rows& rows, std::int64_t used, std::int64_t count,
                                            std::uint8_t* to, std::int64_t size) {
  Beyond beyond;
  for (std::int64_t k = 0; k < count; k += kInner, to += kTriple) {
    for (std::int64_t r = 0; r < kInner / 2; ++r) {
      const std::int64_t low = k + r, high = low + kInner / 2;
      const float *const first = rows.at(low), *const second = rows.at(high);
      const float *const later = rows.at(low + kInner), *const last = rows.at(high + kInner);
      const float first_factor = rows.factor(low), second_factor = rows.factor(high);
      std::uint8_t* out = to + r * kTileBytes;
      for (std::int64_t c = 0; c < used; c += kColumns, out += size) {
        _mm_prefetch(later + c, _MM_HINT_T0);
        _mm_prefetch(last + c, _MM_HINT_T0);
        Floats x{}, y{};
        if (low < count) x = some(first + c, used - c) * first_factor;
        if (high < count) y = some(second + c, used - c) * second_factor;
        beyond.look(x), beyond.look(y);
        write_pairs(x, y, out);
      }
    }
  }
  return beyond.any();
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

// out [tall, wide] with rows `stride` numbers apart = the bias + the product of two panels of rows
// with two of columns, `size` bytes apart; += it where there is no bias.
DPK_AMX DPK_INLINE inline void add_square(float* out, std::int64_t stride, std::int64_t tall,
                                          std::int64_t wide, const float* bias,
                                          const std::uint8_t* left, const std::uint8_t* right,
                                          std::int64_t size) {
  constexpr auto kFloat = static_cast<std::int64_t>(sizeof(float));
  alignas(64) float copy[kGrain][kUnit];
  Square to{{{copy[0], copy[0] + kColumns}, {copy[16], copy[16] + kColumns}}, kUnit * kFloat};
  const bool whole = tall == kGrain && (wide == kUnit || wide == kColumns);
  if (whole) {
    float* const low = out + kTileRows * stride;
    to = {{{out, out + kColumns}, {low, low + kColumns}}, stride * kFloat};
  } else if (bias == nullptr) {
    for (std::int64_t m = 0; m < tall; ++m) std::copy_n(out + m * stride, wide, copy[m]);
    asm volatile("" ::: "memory");
  }
  Square start = to;
  if (bias != nullptr) {
    auto* const row = const_cast<float*>(bias);
    start = {{{row, row + kColumns}, {row, row + kColumns}}, 0};
  }
  const std::int64_t steps = size / kTriple;
  if (wide > kColumns) {
    multiply<true>(start, to, left, left + size, right, right + size, steps);
  } else {
    multiply<false>(start, to, left, left + size, right, right, steps);
  }
  if (whole) return;
  asm volatile("" ::: "memory");
  for (std::int64_t m = 0; m < tall; ++m) std::copy_n(copy[m], wide, out + m * stride);
}

}  // namespace dpkern::cpu::bfloat
#endif
