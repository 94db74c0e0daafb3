#pragma once
// Parameters, read as one vector, moved to the nearest point of a ball or a simplex, in place.

#include <cstdint>
#include <vector>

namespace dpkern::cpu {

template <class F>
struct Part {
  F* values;
  std::int64_t size;
};

// x min(1, radius / ||x||), the norm and the product in float64; inside, nothing is written.
template <class F>
void project_ball(const std::vector<Part<F>>& parts, double radius, int threads);

// max(x - t, 0) with the t for which they add to `total`.
template <class F>
void project_simplex(const std::vector<Part<F>>& parts, double total, int threads);

}  // namespace dpkern::cpu
