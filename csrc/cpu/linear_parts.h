#pragma once
// What sums of linear gradients are made of, and how threads share them.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cpu/ghost_linear.h"
#include "cpu/isa.h"
#include "cpu/panels.h"
#include "cpu/parallel.h"

namespace dpkern::cpu {

// Positions that lie behind each other: of one sample, or one each of several.
template <class F>
struct Run {
  const F* a;
  const F* g;
  ghost::Scales<F> factors;
  std::int64_t count;
};

// As many threads as a sum is worth.
inline int useful_sum_threads(const LinearShape& shape, int threads) {
  constexpr std::int64_t kSmallest = 1 << 20;  // multiplications worth a thread
  const std::int64_t work = shape.batch * shape.positions * shape.inputs * shape.outputs;
  return useful_threads(work, kSmallest, threads);
}

// add(rows, columns) for parts of the output [p, d] that belong to one thread each. The longer side
// is cut, so that the copies of the other one stay small.
template <class F>
void for_parts(const LinearShape& shape, int threads, const F& add) {
  const int team = useful_sum_threads(shape, threads);
  const bool cut_columns = shape.inputs >= shape.outputs;
  const std::int64_t side = cut_columns ? shape.inputs : shape.outputs;
  // Whole tiles of every kind; few rows at a time, so that parts come out nearly equal.
  const std::int64_t unit = cut_columns || isa() >= Isa::kAmx ? 32 : 12;
  const std::int64_t units = (side + unit - 1) / unit;
  parallel_for(team, 1, team, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t part = begin; part < end; ++part) {
      const Range cut = part_of(units, static_cast<int>(part), team);
      const Range own{cut.begin * unit, std::min(side, cut.end * unit)};
      add(cut_columns ? Range{0, shape.outputs} : own, cut_columns ? own : Range{0, shape.inputs});
    }
  });
}

// add(rows, columns) for parts of a grid of panels; the longer side is shared among threads.
template <class F>
void for_panels(std::int64_t rows, std::int64_t columns, int threads, const F& add) {
  const bool by_columns = columns >= rows;
  parallel_for(std::max(columns, rows), 1, threads, [&](std::int64_t begin, std::int64_t end) {
    const Range own{begin, end};
    add(by_columns ? Range{0, rows} : own, by_columns ? own : Range{0, columns});
  });
}

// add(block, rows, columns, to) for all blocks of samples. Sums of integers do not depend on the
// order: where copies of them are small, a thread takes whole blocks and adds to a copy of its own,
// so that no operand is packed twice.
template <class Block, class F>
void for_blocks(const std::vector<Block>& blocks, const LinearShape& shape, std::int32_t* out,
                int threads, const F& add) {
  constexpr std::int64_t kMostCopied = 1 << 18;  // entries of all copies
  const std::int64_t entries = shape.inputs * shape.outputs;
  const auto count = static_cast<std::int64_t>(blocks.size());
  const int team = useful_sum_threads(shape, threads), copies = team - 1;
  if (copies == 0 || count < 2 * team || entries * copies > kMostCopied) {
    return for_parts(shape, threads, [&](Range rows, Range columns) {
      for (const Block& block : blocks) add(block, rows, columns, out);
    });
  }
  // All of the caller's: a thread's own memory may end with it.
  std::int32_t* const copied = ghost::scratch<std::int32_t, 13>(entries * copies);
  std::vector<std::int32_t*> sums(static_cast<std::size_t>(team));
  parallel_for(count, 1, team, [&](std::int64_t begin, std::int64_t end) {
    const int thread = thread_index();
    std::int32_t*& own = sums[static_cast<std::size_t>(thread)];
    if (own == nullptr) {
      own = thread == 0 ? out : copied + (thread - 1) * entries;
      if (thread != 0) std::fill_n(own, entries, 0);
    }
    for (std::int64_t i = begin; i < end; ++i) {
      add(blocks[static_cast<std::size_t>(i)], Range{0, shape.outputs}, Range{0, shape.inputs},
          own);
    }
  });
  parallel_for(entries, 1 << 14, team, [&](std::int64_t begin, std::int64_t end) {
    for (const std::int32_t* sum : sums) {
      if (sum == nullptr || sum == out) continue;
      for (std::int64_t i = begin; i < end; ++i) out[i] += sum[i];
    }
  });
}

}  // namespace dpkern::cpu
