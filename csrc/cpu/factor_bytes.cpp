#include "cpu/factor_bytes.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "cpu/amx.h"
#include "cpu/linear_parts.h"
#include "cpu/panels.h"
#include "cpu/parallel.h"

namespace dpkern::cpu::exact {

#if DPK_X86

namespace {

using ghost::load;
using ghost::scratch;

constexpr std::int64_t kGroup = 4;                      // samples whose bytes lie side by side
constexpr std::int64_t kStep = kTileBytes;              // samples of a tile
constexpr std::int64_t kTile = kTileRows * kTileBytes;  // bytes
// Groups that a thread rounds at a time: those of a tile, whose lines no other one writes to then.
constexpr std::int64_t kGrain = kStep / kGroup;

using Bytes = Vector<std::int32_t, kTileRows>;  // a byte of four samples in each lane

// x = 256 high + low, both signed bytes: |x| <= 2^14 + 1. Small integers have no high byte.
struct Halves {
  Bytes low, high;
};

DPK_INLINE inline Halves halves_of(const std::int16_t* const rows[kGroup], std::int64_t at) {
  Halves made{};
#pragma GCC unroll 4
  for (int i = 0; i < kGroup; ++i) {
    const Bytes x =
        __builtin_convertvector((load<Vector<std::int16_t, kTileRows>>(rows[i] + at)), Bytes);
    made.low |= (x & 0xff) << (8 * i);
    made.high |= (((x + 128) >> 8) & 0xff) << (8 * i);
  }
  return made;
}

// One operand: panels of 16 rows or columns, each with two tiles for every 64 samples.
class Operand {
 public:
  Operand(std::int64_t size, std::int64_t samples, std::int8_t* at)
      : panels_(panels_of(size)),
        steps_((samples + kStep - 1) / kStep),
        at_(at),
        high_(static_cast<std::size_t>(panels_)) {}

  static std::int64_t panels_of(std::int64_t size) { return (size + kTileRows - 1) / kTileRows; }
  static std::int64_t bytes(std::int64_t size, std::int64_t samples) {
    return panels_of(size) * ((samples + kStep - 1) / kStep) * 2 * kTile;
  }
  std::int64_t panels() const { return panels_; }
  std::int64_t steps() const { return steps_; }
  // The tile of low bytes; that of the high ones is next to it.
  std::int8_t* tile(std::int64_t panel, std::int64_t step) const {
    return at_ + (panel * steps_ + step) * 2 * kTile;
  }
  // Whether a sample's integers in the panel have high bytes.
  bool has_high(std::int64_t panel) const {
    return high_[static_cast<std::size_t>(panel)].load(std::memory_order_relaxed);
  }
  void note_high(std::int64_t panel) const {
    high_[static_cast<std::size_t>(panel)].store(true, std::memory_order_relaxed);
  }

 private:
  std::int64_t panels_, steps_;
  std::int8_t* at_;
  mutable std::vector<std::atomic<bool>> high_;
};

// Writes a group of four samples: as one row of each tile (columns of the product), or as four
// bytes of each row (rows of the product).
template <bool kIsRow>
DPK_AMX DPK_INLINE inline void pack(const Operand& to, const std::int16_t* const rows[kGroup],
                                    std::int64_t group) {
  constexpr std::int64_t kGroups = kStep / kGroup;
  const std::int64_t step = group / kGroups, place = group % kGroups;
  for (std::int64_t panel = 0; panel < to.panels(); ++panel) {
    const Halves halves = halves_of(rows, panel * kTileRows);
    std::int8_t* const tile = to.tile(panel, step);
    const auto high = reinterpret_cast<__m512i>(halves.high);
    if (_mm512_test_epi32_mask(high, high) != 0) to.note_high(panel);
    if constexpr (kIsRow) {
      __builtin_memcpy(tile + place * kTileBytes, &halves.low, kTileBytes);
      __builtin_memcpy(tile + kTile + place * kTileBytes, &halves.high, kTileBytes);
    } else {
      std::int32_t low[kTileRows], high[kTileRows];
      __builtin_memcpy(low, &halves.low, sizeof(low));
      __builtin_memcpy(high, &halves.high, sizeof(high));
      std::int8_t* to_row = tile + kGroup * place;
      for (int m = 0; m < kTileRows; ++m, to_row += kTileBytes) {
        __builtin_memcpy(to_row, low + m, kGroup);
        __builtin_memcpy(to_row + kTile, high + m, kGroup);
      }
    }
  }
}

// Sums of products of low bytes, of low with high ones, and of high ones.
struct Sums {
  alignas(64) std::int32_t low[kTileRows][kTileRows];
  alignas(64) std::int32_t mixed[kTileRows][kTileRows];
  alignas(64) std::int32_t high[kTileRows][kTileRows];
};

// The products of two panels, each with high bytes or without.
template <bool kLeftHigh, bool kRightHigh>
DPK_INLINE inline void multiply(const std::int8_t* left, const std::int8_t* right,
                                std::int64_t steps, Sums& sums) {
  _tile_zero(0);
  if constexpr (kLeftHigh || kRightHigh) _tile_zero(1);
  if constexpr (kLeftHigh && kRightHigh) _tile_zero(2);
  for (std::int64_t k = 0; k < steps; ++k, left += 2 * kTile, right += 2 * kTile) {
    _tile_loadd(4, left, kTileBytes);
    _tile_loadd(6, right, kTileBytes);
    _tile_dpbssd(0, 4, 6);
    if constexpr (kLeftHigh) {
      _tile_loadd(5, left + kTile, kTileBytes);
      _tile_dpbssd(1, 5, 6);
    }
    if constexpr (kRightHigh) {
      _tile_loadd(7, right + kTile, kTileBytes);
      _tile_dpbssd(1, 4, 7);
    }
    if constexpr (kLeftHigh && kRightHigh) _tile_dpbssd(2, 5, 7);
  }
  _tile_stored(0, sums.low, kTileBytes);
  if constexpr (kLeftHigh || kRightHigh) _tile_stored(1, sums.mixed, kTileBytes);
  if constexpr (kLeftHigh && kRightHigh) _tile_stored(2, sums.high, kTileBytes);
}

// to [tall, wide] += the sums, modulo 2^32, in which the result fits.
template <bool kMixed, bool kHigh>
DPK_INLINE inline void add(const Sums& sums, std::int64_t tall, std::int64_t wide,
                           std::int64_t stride, std::int32_t* to) {
  for (std::int64_t m = 0; m < tall; ++m, to += stride) {
    Words total = load<Words>(sums.low[m]);
    if constexpr (kMixed) total += load<Words>(sums.mixed[m]) << 8;
    if constexpr (kHigh) total += load<Words>(sums.high[m]) << 16;
    if (wide == kTileRows) {
      total += load<Words>(to);
      __builtin_memcpy(to, &total, sizeof(total));
    } else {
      std::uint32_t some[kTileRows];
      __builtin_memcpy(some, &total, sizeof(some));
      for (std::int64_t c = 0; c < wide; ++c) {
        to[c] = static_cast<std::int32_t>(static_cast<std::uint32_t>(to[c]) + some[c]);
      }
    }
  }
}

// Panels of either operand that stay in the first cache together.
constexpr std::int64_t kNear = 2;

// out += the products of these panels.
DPK_AMX void add_products(const Operand& left, const Operand& right, const LinearShape& shape,
                          Range rows, Range columns, std::int32_t* out) {
  const AmxTiles tiles;
  asm volatile("" ::: "memory");  // what the tiles are loaded from has been written
  const std::int64_t steps = left.steps();
  Sums sums;
  const auto add_tile = [&](std::int64_t i, std::int64_t j) DPK_INLINE {
    const std::int64_t tall = std::min<std::int64_t>(kTileRows, shape.outputs - i * kTileRows);
    const std::int64_t wide = std::min<std::int64_t>(kTileRows, shape.inputs - j * kTileRows);
    std::int32_t* const to = out + i * kTileRows * shape.inputs + j * kTileRows;
    if (tall == kTileRows) ghost::prefetch_rows<kTileRows>(to, kTileRows, shape.inputs);
    const std::int8_t *const a = left.tile(i, 0), *const b = right.tile(j, 0);
    const bool left_high = left.has_high(i), right_high = right.has_high(j);
    if (left_high && right_high) {
      multiply<true, true>(a, b, steps, sums);
      add<true, true>(sums, tall, wide, shape.inputs, to);
    } else if (left_high) {
      multiply<true, false>(a, b, steps, sums);
      add<true, false>(sums, tall, wide, shape.inputs, to);
    } else if (right_high) {
      multiply<false, true>(a, b, steps, sums);
      add<true, false>(sums, tall, wide, shape.inputs, to);
    } else {
      multiply<false, false>(a, b, steps, sums);
      add<false, false>(sums, tall, wide, shape.inputs, to);
    }
  };
  for (std::int64_t j = columns.begin; j < columns.end; j += kNear) {
    const std::int64_t last = std::min(j + kNear, columns.end);
    for (std::int64_t i = rows.begin; i < rows.end; i += kNear) {
      for (std::int64_t m = i; m < std::min(i + kNear, rows.end); ++m) {
        for (std::int64_t n = j; n < last; ++n) add_tile(m, n);
      }
    }
  }
}

// The integers of a group: rows of inputs, then rows of output gradients.
template <class F>
DPK_AVX512 void round_group(const Samples<F>& samples, Range numbers, std::int16_t* rows,
                            std::int64_t wide, std::int64_t tall) {
  if (numbers.begin >= numbers.end) return;
  samples.round(numbers, rows, wide, rows + kGroup * wide, tall);
}

DPK_AMX void pack_group(const Operand& left, const Operand& right,
                        const std::int16_t* const inputs[kGroup],
                        const std::int16_t* const outputs[kGroup], std::int64_t group) {
  pack<false>(left, outputs, group);
  pack<true>(right, inputs, group);
}

}  // namespace

template <class F>
void add_by_bytes(const Samples<F>& samples, std::int32_t* out, int threads) {
  const LinearShape& shape = samples.shape;
  const Operand left(shape.outputs, samples.count,
                     scratch<std::int8_t, 6>(Operand::bytes(shape.outputs, samples.count)));
  const Operand right(shape.inputs, samples.count,
                      scratch<std::int8_t, 7>(Operand::bytes(shape.inputs, samples.count)));
  // Whole tiles: what no sample has is zero.
  parallel_for(
      left.steps() * kStep / kGroup, kGrain, threads, [&](std::int64_t begin, std::int64_t end) {
        const std::int64_t wide = right.panels() * kTileRows, tall = left.panels() * kTileRows;
        std::int16_t* const rows = scratch<std::int16_t, 0>(kGroup * (wide + tall));
        const std::int16_t *inputs[kGroup], *outputs[kGroup];
        for (std::int64_t i = 0; i < kGroup; ++i) {
          inputs[i] = rows + i * wide;
          outputs[i] = rows + kGroup * wide + i * tall;
        }
        for (std::int64_t group = begin; group < end; ++group) {
          std::fill_n(rows, kGroup * (wide + tall), std::int16_t{0});
          const Range numbers{group * kGroup, std::min(samples.count, (group + 1) * kGroup)};
          round_group(samples, numbers, rows, wide, tall);
          pack_group(left, right, inputs, outputs, group);
        }
      });
  for_panels(left.panels(), right.panels(), threads, [&](Range rows, Range columns) {
    add_products(left, right, shape, rows, columns, out);
  });
}

#else

template <class F>
void add_by_bytes(const Samples<F>&, std::int32_t*, int) {}

#endif

template void add_by_bytes<float>(const Samples<float>&, std::int32_t*, int);
template void add_by_bytes<double>(const Samples<double>&, std::int32_t*, int);

}  // namespace dpkern::cpu::exact
