#include "cpu/sum_bfloat.h"

#include <algorithm>

#include "cpu/bfloat_tiles.h"
#include "cpu/parallel.h"

namespace dpkern::cpu::bfloat {
namespace {

constexpr std::int64_t kFewest = 16;  // positions that are worth filling up to tiles
constexpr std::int64_t kNarrow = 24;  // inputs or outputs that are

}  // namespace

bool takes_sum(const LinearShape& shape) {
  return isa() >= Isa::kAmx && shape.batch * shape.positions >= kFewest &&
         std::min(shape.inputs, shape.outputs) >= kNarrow;
}

#if DPK_X86

namespace {

using ghost::scratch;

constexpr std::int64_t kPacked = 3 << 17;      // bytes of both sides: they stay in a cache
constexpr std::int64_t kNear = 16 * kGrain;    // rows that meet all columns before the next ones
constexpr std::int64_t kLines = 4 * kColumns;  // columns that are packed together

// The positions of a block, from some column on.
struct Positions {
  const float* const* rows;  // filled up
  const float* factors;      // null: ones
  std::int64_t first;
  DPK_INLINE Positions from(std::int64_t column) const { return {rows, factors, column}; }
  DPK_INLINE const float* at(std::int64_t k) const { return rows[k] + first; }
  DPK_INLINE float factor(std::int64_t k) const { return factors == nullptr ? 1 : factors[k]; }
};

// One block: a product of its g, turned, and its a.
struct Work {
  const LinearShape& shape;
  Positions g, a;
  std::int64_t count;
  float* out;

  DPK_INLINE std::int64_t panel() const { return panel_bytes(count); }

  // Outputs as rows of the product, or inputs as columns of it; whether there are numbers beyond.
  template <bool kIsRow>
  DPK_AMX bool pack(Range own, std::uint8_t* to) const {
    bool found = false;
    for (std::int64_t c = own.begin; c < own.end; c += kLines) {
      const std::int64_t used = std::min(kLines, own.end - c);
      found |= pack_columns((kIsRow ? g : a).from(c), used, count, to, panel());
      std::uint8_t* const end = to + (used + kColumns - 1) / kColumns * panel();
      if constexpr (kIsRow) {
        for (std::uint8_t* tile = to; tile < end; tile += kTile) transpose(tile);
      }
      to = end;
    }
    return found;
  }
  // out[rows, columns] += the product of these panels.
  DPK_AMX void multiply_all(const std::uint8_t* left, Range rows, const std::uint8_t* right,
                            Range columns) const {
    const AmxTiles tiles;
    asm volatile("" ::: "memory");  // what the tiles are loaded from has been written
    for (std::int64_t first = rows.begin; first < rows.end; first += kNear) {
      const std::int64_t last = std::min(rows.end, first + kNear);
      for (std::int64_t column = columns.begin; column < columns.end; column += kUnit) {
        const std::int64_t wide = std::min(kUnit, columns.end - column);
        for (std::int64_t row = first; row < last; row += kGrain) {
          add_square(out + row * shape.inputs + column, shape.inputs, std::min(kGrain, last - row),
                     wide, nullptr, left + (row - rows.begin) / kTileRows * panel(),
                     right + (column - columns.begin) / kColumns * panel(), panel());
        }
      }
    }
  }
};

}  // namespace

std::int64_t sum_block(const LinearShape& shape) {
  const std::int64_t each = kTriple * ((shape.inputs + shape.outputs) / kColumns + 1);
  return std::clamp<std::int64_t>(kPacked / each, 4, 16) * kInner;
}

bool add_runs(const std::vector<Run<float>>& runs, const LinearShape& shape, Range rows,
              Range columns, float* out) {
  std::int64_t count = 0;
  for (const auto& run : runs) count += run.count;
  // Packing looks a tile ahead.
  const std::int64_t filled = ghost::round_up(count, kInner) + kInner;
  const auto** const a = scratch<const float*, 0>(filled);
  const auto** const g = scratch<const float*, 1>(filled);
  float* const factors = scratch<float, 2>(filled);
  std::int64_t at = 0;
  for (const auto& run : runs) {
    for (std::int64_t t = 0; t < run.count; ++t, ++at) {
      a[at] = run.a + t * shape.inputs, g[at] = run.g + t * shape.outputs;
      factors[at] = run.factors(t);
    }
  }
  std::fill(a + at, a + filled, a[at - 1]);
  std::fill(g + at, g + filled, g[at - 1]);
  std::fill(factors + at, factors + filled, 0.0f);
  const Work work{shape, {g, factors, 0}, {a, nullptr, 0}, count, out};
  const auto panels = [&](Range side) {
    return ghost::round_up(side.end - side.begin, kUnit) / kColumns * work.panel();
  };
  std::uint8_t* const left = scratch<std::uint8_t, 10>(panels(rows));
  std::uint8_t* const right = scratch<std::uint8_t, 11>(panels(columns));
  if (work.pack<true>(rows, left) || work.pack<false>(columns, right)) return false;
  work.multiply_all(left, rows, right, columns);
  return true;
}

#else

std::int64_t sum_block(const LinearShape&) { return 0; }
bool add_runs(const std::vector<Run<float>>&, const LinearShape&, Range, Range, float*) {
  return false;
}

#endif

}  // namespace dpkern::cpu::bfloat
