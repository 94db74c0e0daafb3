#pragma once

#include <cstdint>

namespace dpkern::cpu {

// One parameter: rows [batch, columns] without gaps, and where their weighted sum goes.
template <class F>
struct Explicit {
  const F* rows;
  std::int64_t columns;
  F* out;
};

}  // namespace dpkern::cpu
