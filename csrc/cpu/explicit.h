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

}  // namespace dpkern::cpu
