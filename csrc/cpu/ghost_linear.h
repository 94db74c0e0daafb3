#pragma once
// Per-sample gradients of linear layers, sum_t g[b,t,:] outer a[b,t,:], from a [B, T, d] and
// g [B, T, p]: norms, gradients, weighted sums. F is float or double.

#include <cstdint>

namespace dpkern::cpu {

struct LinearShape {
  std::int64_t batch;
  std::int64_t positions;  // T
  std::int64_t inputs;     // d
  std::int64_t outputs;    // p
};

enum class NormRoute : int { kAuto = 0, kRankOne = 1, kGram = 2, kDirect = 3 };

// squares[b] >= the squared norm, and tight (docs/ghost.md); not finite for a sample that is not.
template <class F>
void linear_norm(const F* a, const F* g, const LinearShape& shape, NormRoute route, double* squares,
                 int threads);

// grads [B, p, d] and the squares of these rounded numbers.
template <class F>
void linear_gradient(const F* a, const F* g, const LinearShape& shape, F* grads, double* squares,
                     int threads);

// out [p, d] += sum_b factors[b] grad_b; a factor of 0 drops the sample.
template <class F>
void linear_sum(const F* a, const F* g, const F* factors, const LinearShape& shape, F* out,
                int threads);

}  // namespace dpkern::cpu
