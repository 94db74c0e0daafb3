// Norms, clip factors and weighted sums of per-sample gradients that are materialized.

#include "core/clip_factor.h"
#include "cuda/rows.cuh"

namespace dpkern::cuda {

// squares[row] = sum of the row's partial powers, by one warp, in a fixed order.
__global__ void __launch_bounds__(kFactorThreads)
    square_kernel(const double* partial, std::int64_t chunks, std::int64_t batch, double* squares) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t row =
      blockIdx.x * static_cast<std::int64_t>(kFactorThreads / kWarp) + threadIdx.x / 32;
  if (row >= batch) return;
  double sum = 0;
  for (std::int64_t chunk = lane; chunk < chunks; chunk += 32) sum += partial[row * chunks + chunk];
  sum = warp_sum(sum);
  if (lane == 0) squares[row] = sum;
}

template <class F>
__global__ void __launch_bounds__(kFactorThreads)
    clip_factors_kernel(const double* const* squares, std::int64_t count, std::int64_t batch,
                        ClipRule rule, double* norms, F* factors) {
  const std::int64_t b = blockIdx.x * static_cast<std::int64_t>(kFactorThreads) + threadIdx.x;
  if (b >= batch) return;
  double square = 0;
  for (std::int64_t k = 0; k < count; ++k) square += squares[k][b];
  const double norm = std::sqrt(square) * rule.scale;
  const double factor =
      std::isfinite(norm) ? clip_factor(norm, rule.max_norm, rule.automatic) : 0.0;
  norms[b] = norm;
  factors[b] = round_down<F>(factor * rule.scale);
}

}  // namespace dpkern::cuda
