#pragma once
// Per-sample gradients that exist anyway: their norms, clip factors and weighted sums.

#include <cstdint>
#include <vector>

#include "core/layouts.h"

namespace dpkern::cpu {

// One parameter: rows [batch, columns] without gaps, and where its sum goes.
template <class F>
struct Explicit {
  const F* rows;
  std::int64_t columns;
  F* out;
};

// squares[b] = sum over all parameters of || rows[b] ||^2.
template <class F>
void explicit_norm(const std::vector<Explicit<F>>& parts, std::int64_t batch, double* squares,
                   int threads);

// out += sum_b factors[b] rows[b] for every parameter; a factor of 0 drops its row.
template <class F>
void contract(const std::vector<Explicit<F>>& parts, const F* factors, std::int64_t batch,
              int threads);

// norms[b] = scale sqrt(sum_k squares[k][b]) and the factor that clips the captured gradient,
// `scale` included, never rounded up; 0 where the norm is not finite.
template <class F>
void clip_factors(const std::vector<const double*>& squares, std::int64_t batch,
                  const ClipRule& rule, double* norms, F* factors);

}  // namespace dpkern::cpu
