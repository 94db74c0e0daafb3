// Weighted sums of linear gradients: one matrix product over samples and positions, with the
// factors folded into the packed copy of g.

#include <type_traits>
#include <vector>

#include "cpu/ghost_linear.h"
#include "cpu/ghost_tiles.h"
#include "cpu/linear_parts.h"
#include "cpu/sum_bfloat.h"

namespace dpkern::cpu {
namespace {

using namespace ghost;

constexpr std::int64_t kSteps = 256;  // positions of a packed block

// The used samples cut into blocks of at most `steps` positions.
template <class F>
std::vector<std::vector<Run<F>>> blocks_of(const F* a, const F* g, const F* factors,
                                           const LinearShape& shape, std::int64_t steps) {
  std::vector<std::vector<Run<F>>> blocks;
  std::int64_t room = 0;
  const auto add = [&](std::int64_t first, std::int64_t end, const Scales<F>& scales) {
    for (std::int64_t row = first; row < end;) {
      if (room == 0) blocks.emplace_back(), room = steps;
      const std::int64_t some = std::min(room, end - row);
      const Scales<F> own{scales.first + (row - first) * scales.step, scales.step};
      blocks.back().push_back({a + row * shape.inputs, g + row * shape.outputs, own, some});
      row += some, room -= some;
    }
  };
  for (std::int64_t b = 0; b < shape.batch;) {
    std::int64_t end = b + 1;
    if (factors[b] != 0 && shape.positions == 1) {
      while (end < shape.batch && factors[end] != 0) ++end;
      add(b, end, {factors + b, 1});
    } else if (factors[b] != 0) {
      add(b * shape.positions, end * shape.positions, {factors + b, 0});
    }
    b = end;
  }
  return blocks;
}

// out[rows, columns] += the products of one block.
template <class F, int kBytes>
DPK_INLINE inline void add_block(const std::vector<Run<F>>& runs, const LinearShape& shape,
                                 Range rows, Range columns, F* out) {
  using T = Tile<F, kBytes>;
  std::int64_t steps = 0;
  for (const Run<F>& run : runs) steps += run.count;
  const std::int64_t panels = (rows.end - rows.begin + T::kRows - 1) / T::kRows;
  const std::int64_t size = panel_size<T::kRows, F>(steps);
  F* const g = scratch<F, 4>(panels * size);
  F* const a = scratch<F, 5>(T::kColumns * steps);
  std::int64_t done = 0;
  for (const Run<F>& run : runs) {
    pack_panels<T::kRows, T::kWrittenRows>(run.g + rows.begin, run.count, rows.end - rows.begin,
                                           shape.outputs, run.factors, g + done * T::kRows, size);
    done += run.count;
  }
  for (std::int64_t column = columns.begin; column < columns.end; column += T::kColumns) {
    const std::int64_t wide = std::min<std::int64_t>(T::kColumns, columns.end - column);
    done = 0;
    for (const Run<F>& run : runs) {
      pack_panels<T::kColumns>(run.a + column, run.count, wide, shape.inputs, F{1},
                               a + done * T::kColumns, T::kColumns * steps);
      done += run.count;
    }
    for (std::int64_t panel = 0; panel < panels; ++panel) {
      const std::int64_t row = rows.begin + panel * T::kRows;
      const std::int64_t tall = std::min<std::int64_t>(T::kRows, rows.end - row);
      prefetch_rows<T::kColumns>(out + row * shape.inputs + column, tall, shape.inputs);
      T tile;
      tile.multiply(g + panel * size, a, steps);
      for (std::int64_t m = 0; m < tall; ++m) {
        add_row(tile.at[m], wide, out + (row + m) * shape.inputs + column);
      }
    }
  }
}

}  // namespace

template <class F>
void linear_sum(const LinearSum<F>& call, int threads) {
  const LinearShape shape = shape_of(call);
  bool by_tiles = false;
  if constexpr (std::is_same_v<F, float>) by_tiles = bfloat::takes_sum(shape);
  const std::int64_t steps = by_tiles ? bfloat::sum_block(shape) : kSteps;
  const auto blocks = blocks_of(call.a, call.g, call.factors, shape, steps);
  for_parts(shape, threads, [&](Range rows, Range columns) {
    for (const auto& runs : blocks) {
      if constexpr (std::is_same_v<F, float>) {
        if (by_tiles && bfloat::add_runs(runs, shape, rows, columns, call.out)) continue;
      }
      versioned_by_width([&](auto width) DPK_INLINE {
        add_block<F, decltype(width)::value>(runs, shape, rows, columns, call.out);
      });
    }
  });
}

template void linear_sum<float>(const LinearSum<float>&, int);
template void linear_sum<double>(const LinearSum<double>&, int);

}  // namespace dpkern::cpu
