#pragma once
// Weighted sum of rows that lie in memory: out += sum_b factors[b] rows[b].

#include <cstdint>

namespace dpkern::cpu {

// rows [batch, columns]; a factor of 0 drops its row.
template <class F>
void contract(const F* rows, const F* factors, std::int64_t batch, std::int64_t columns, F* out,
              int threads);

}  // namespace dpkern::cpu
