#pragma once

#include <cstdint>

namespace dpkern::cpu {

// One parameter: rows [batch, columns] without gaps, and where their weighted sum goes.
template <class F, class S = F>
struct Explicit {
  const F* rows;
  std::int64_t columns;
  S* out;
};

// out [batch, outputs] = the sums of g [batch, positions, outputs] over positions, in an order that
// depends on the number of positions alone.
template <class F>
void sum_positions(const F* g, std::int64_t batch, std::int64_t positions, std::int64_t outputs,
                   F* out, int threads);

}  // namespace dpkern::cpu
