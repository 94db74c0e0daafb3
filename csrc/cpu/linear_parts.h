#pragma once
// What sums of linear gradients are made of, and how threads share them.

#include <algorithm>
#include <cstdint>

#include "cpu/ghost_linear.h"
#include "cpu/isa.h"
#include "cpu/parallel.h"

namespace dpkern::cpu {

// A run of positions of one sample.
template <class F>
struct Run {
  const F* a;
  const F* g;
  F factor;
  std::int64_t count;
};

// add(rows, columns) for parts of the output [p, d] that belong to one thread each. The longer side
// is cut, so that the copies of the other one stay small.
template <class F>
void for_parts(const LinearShape& shape, int threads, const F& add) {
  constexpr std::int64_t kSmallest = 1 << 20;  // multiplications worth a thread
  const std::int64_t work = shape.batch * shape.positions * shape.inputs * shape.outputs;
  const int team = useful_threads(work, kSmallest, threads);
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

}  // namespace dpkern::cpu
