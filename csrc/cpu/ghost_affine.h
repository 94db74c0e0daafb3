#pragma once
// Backward of normalisation layers: input gradient and per-sample gradients of scale and shift in
// one pass over g and x. F is float or double; `weight` may be null (ones).

#include <cstdint>

namespace dpkern::cpu {

// g, x, dx [batch, rows, columns]; mean, rstd [batch, rows]; dweight, dbias [batch, columns].
// Null `dbias` (`mean` is not read): root-mean-square normalisation.
template <class F>
struct LayerNorm {
  const F *g, *x, *mean, *rstd, *weight;
  F *dx, *dweight, *dbias;
  std::int64_t batch, rows, columns;
};
template <class F>
void layer_norm_backward(const LayerNorm<F>& norm, int threads);

// g, x, dx [batch, groups * channels, places]; mean, rstd [batch, groups]; dweight, dbias
// [batch, groups * channels].
template <class F>
struct GroupNorm {
  const F *g, *x, *mean, *rstd, *weight;
  F *dx, *dweight, *dbias;
  std::int64_t batch, groups, channels, places;
};
template <class F>
void group_norm_backward(const GroupNorm<F>& norm, int threads);

}  // namespace dpkern::cpu
