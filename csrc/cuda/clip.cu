// Per-sample norms and clipped sums of explicit per-sample gradients. The gradients are read twice:
// for the norms, and for the sums. Integer sums are verified afterwards: a sample with integers
// that exceed the bound M of a clip group, which only rounding at the bound can cause, is scaled
// down.

#include "core/clip_factor.h"
#include "cuda/rows.cuh"

namespace dpkern::cuda {

// Norms of one row by one warp, and from them its clip factors; 0 for a row that is not finite.
template <class Value>
__global__ void __launch_bounds__(kFactorThreads, 8)
    factor_kernel(Rows all, Clip<Value> clip, const double* partial) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t row =
      blockIdx.x * static_cast<std::int64_t>(kFactorThreads / kWarp) + threadIdx.x / 32;
  if (row >= all.rows) return;
  const double* powers = partial + row * all.chunks;
  double* norms = clip.norms + row * all.count;
  double total = 0;
  for (std::int64_t task = 0; task < all.count; ++task) {
    const std::int64_t begin = all.tasks[task].first_chunk;
    const std::int64_t end = task + 1 < all.count ? all.tasks[task + 1].first_chunk : all.chunks;
    double power = 0;
    for (std::int64_t chunk = begin + lane; chunk < end; chunk += 32) power += powers[chunk];
    power = warp_sum(power);
    total += power;
    if (lane == 0) norms[task] = clip.p == 2 ? std::sqrt(power) : power;
  }
  if (!clip.has_sums) return;
  __syncwarp();
  const bool finite = std::isfinite(total);
  const double together = clip.p == 2 ? std::sqrt(total) : total;
  const bool per_layer = clip.style == Style::kPerLayer;
  for (std::int64_t task = lane; task < all.count; task += 32) {
    const ClipBound& bound = clip.bounds[task];
    const double norm = per_layer ? norms[task] : together;
    const double factor =
        finite ? clip_factor(norm, bound.max_norm, clip.style == Style::kAutomatic) : 0;
    clip.factors[row * all.count + task] =
        round_down<Value>(clip.exact ? factor * bound.per_unit : factor);
    if (clip.exact && per_layer) clip.powers[row * all.count + task] = 0;
  }
  if (clip.exact && !per_layer && lane == 0) clip.powers[row] = 0;
}

__device__ __forceinline__ std::int64_t most_power(const ClipBound& bound, int p) {
  return p == 2 ? bound.unit_bound * bound.unit_bound : bound.unit_bound;
}

// The factor after `times` shrinkings.
template <class Value>
__device__ __forceinline__ Value shrunk(Value factor, int times) {
  for (int i = 0; i < times; ++i) factor *= Value(1 - 0x1p-16);
  return factor;
}

// One block per row; all but a few find their row's integers within M and end at once.
template <class G, class S, class Value>
__global__ void __launch_bounds__(kRowThreads) repair_kernel(Rows all, Clip<Value> clip) {
  __shared__ std::int64_t room[kWarps];
  const std::int64_t row = blockIdx.x;
  const bool per_layer = clip.style == Style::kPerLayer;
  bool kept = true;
  for (std::int64_t group = 0; group < (per_layer ? all.count : 1); ++group) {
    const std::int64_t power = clip.powers[per_layer ? row * all.count + group : row];
    if (power > most_power(clip.bounds[group], clip.p)) kept = false;
  }
  if (kept) return;
  const auto row_of = [&](const RowTask& task) {
    return static_cast<const G*>(task.rows) + row * task.columns;
  };
  const Value* factors = clip.factors + row * all.count;
  int times = 0;
  while (!kept) {
    ++times;
    kept = true;
    std::int64_t power = 0;
    for (std::int64_t index = 0; index < all.count; ++index) {
      const RowTask& task = all.tasks[index];
      const Value factor = shrunk(factors[index], times);
      std::int64_t mine = 0;
      if (factor != 0) {
        for (std::int64_t i = threadIdx.x; i < task.columns; i += kRowThreads) {
          mine += power_of(Term<S, Value>::of(factor * value_of(row_of(task)[i])), clip.p);
        }
      }
      if (per_layer) power = 0;
      power += block_sum(mine, room);
      const bool group_ends = per_layer || index + 1 == all.count;
      if (group_ends && power > most_power(clip.bounds[index], clip.p)) kept = false;
    }
  }
  for (std::int64_t index = 0; index < all.count; ++index) {
    const RowTask& task = all.tasks[index];
    if (factors[index] == 0) continue;
    const Value factor = shrunk(factors[index], times);
    for (std::int64_t i = threadIdx.x; i < task.columns; i += kRowThreads) {
      const Value x = value_of(row_of(task)[i]);
      const std::int32_t before = Term<S, Value>::of(factors[index] * x);
      const std::int32_t after = Term<S, Value>::of(factor * x);
      if (after != before) {
        add_atomically(static_cast<S*>(task.sum) + i, static_cast<S>(after - before));
      }
    }
  }
}

}  // namespace dpkern::cuda
