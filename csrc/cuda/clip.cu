// Per-sample norms and clipped sums of explicit per-sample gradients. The gradients are read twice:
// for the norms, and for the sums. Integer sums are proved afterwards: a sample whose integers
// exceed the bound M of a clip group (rounding at the very edge) is replaced by a smaller one.

#include "core/clip_factor.h"
#include "cuda/rows.cuh"

namespace dpkern::cuda {

constexpr int kFactorThreads = 128;

// What a call computes: norms[row, task], and for the sums factors[row, task] and, exact arithmetic
// only, the powers of each row's integers by clip group: [row] or, per layer, [row, task].
template <class Value>
struct Clip {
  Style style;
  int p;
  bool has_sums;
  bool exact;
  const ClipBound* bounds;
  double* norms;
  Value* factors;
  std::int64_t* powers;
};

// Norms of one row by one warp, and from them its clip factors; 0 for a row that is not finite.
template <class Value>
__global__ void __launch_bounds__(kFactorThreads, 8)
    factor_kernel(Rows all, Clip<Value> clip, const double* partial) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t row =
      blockIdx.x * static_cast<std::int64_t>(kFactorThreads / 32) + threadIdx.x / 32;
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

#if !defined(__CUDACC_RTC__)
#include "cuda/launch.h"
#include "cuda/preload.h"

namespace dpkern::cuda {
namespace {

// The arrays of a call in its workspace, and how much of that they take.
template <class Value>
struct Arrays {
  double* partial_powers;
  Value* factors;
  std::int64_t* powers;
  Value* partial_sums;
  std::int64_t splits = 1;
  std::int64_t bytes;

  Arrays(const Rows& all, Arithmetic arithmetic, void* workspace) {
    Workspace room(workspace);
    const bool has_sums = arithmetic != Arithmetic::kNormOnly;
    const bool floats = arithmetic == Arithmetic::kFloat;
    if (has_sums) splits = splits_of(all);
    partial_powers = room.take<double>(all.rows * all.chunks);
    factors = room.take<Value>(has_sums ? all.rows * all.count : 0);
    powers = room.take<std::int64_t>(has_sums && !floats ? all.rows * all.count : 0);
    partial_sums = room.take<Value>(floats && splits > 1 ? splits * all.columns : 0);
    bytes = room.used();
  }
};

template <class G, class S>
Error add_sums(const Rows& all, const Clip<typename ValueOf<G>::Type>& clip,
               const Arrays<typename ValueOf<G>::Type>& arrays, CudaStream cuda) {
  typedef typename ValueOf<G>::Type Value;
  const bool per_layer = clip.style == Style::kPerLayer;
  const Factors<Value> factors{arrays.factors, all.count, 1};
  const Powers powers{arrays.powers, per_layer ? all.count : 1, per_layer ? 1 : 0, clip.p};
  const dim3 grid(blocks_of(all.chunks * kBlocksPerChunk, 1),
                  static_cast<unsigned int>(arrays.splits));
  DPK_LAUNCH((sum_kernel<G, S, Value>), grid, kRowThreads, cuda, all, factors, arrays.partial_sums,
             powers);
  if (const Error error = cudaGetLastError(); error != cudaSuccess) return error;
  if constexpr (Term<S, Value>::kExact) {
    DPK_LAUNCH((repair_kernel<G, S, Value>), blocks_of(all.rows, 1), kRowThreads, cuda, all, clip);
  } else if (arrays.splits > 1) {
    DPK_LAUNCH_FLAT(combine_kernel<Value>, blocks_of(all.chunks, 1), kRowThreads, cuda, all,
                    arrays.splits, arrays.partial_sums);
  }
  return cudaGetLastError();
}

template <class G>
Error clip_sum_of(const ClipPlan& plan, const Rows& all, const ClipBound* bounds, double* norms,
                  void* workspace, CudaStream cuda) {
  typedef typename ValueOf<G>::Type Value;
  const Arrays<Value> arrays(all, plan.arithmetic, workspace);
  const bool has_sums = plan.arithmetic != Arithmetic::kNormOnly;
  const bool exact = has_sums && plan.arithmetic != Arithmetic::kFloat;
  const Clip<Value> clip{plan.style, plan.p, has_sums,       exact,
                         bounds,     norms,  arrays.factors, arrays.powers};
  if (all.chunks > 0) {
    DPK_LAUNCH(power_kernel<G>, blocks_of(all.rows * all.chunks, 1), kRowThreads, cuda, all, plan.p,
               arrays.partial_powers);
    if (const Error error = cudaGetLastError(); error != cudaSuccess) return error;
  }
  DPK_LAUNCH(factor_kernel<Value>, blocks_of(all.rows, kFactorThreads / 32), kFactorThreads, cuda,
             all, clip, arrays.partial_powers);
  if (const Error error = cudaGetLastError(); error != cudaSuccess || all.chunks == 0) return error;
  switch (plan.arithmetic) {
    case Arithmetic::kNormOnly:
      return cudaSuccess;
    case Arithmetic::kFloat:
      return add_sums<G, Value>(all, clip, arrays, cuda);
    case Arithmetic::kExact32:
      return add_sums<G, std::int32_t>(all, clip, arrays, cuda);
    case Arithmetic::kExact64:
      return add_sums<G, std::int64_t>(all, clip, arrays, cuda);
  }
  return cudaSuccess;
}

Rows rows_of(const RowTable& table, const ClipPlan& plan) {
  return {table.tasks, table.count, table.chunks, table.columns, plan.rows};
}

template <class G>
Error preload_type() {
  typedef typename ValueOf<G>::Type Value;
  return load_kernels(power_kernel<G>, factor_kernel<Value>, combine_kernel<Value>,
                      sum_kernel<G, Value, Value>, sum_kernel<G, std::int32_t, Value>,
                      sum_kernel<G, std::int64_t, Value>, repair_kernel<G, std::int32_t, Value>,
                      repair_kernel<G, std::int64_t, Value>);
}

}  // namespace

std::int64_t clip_workspace(const ClipPlan& plan, GradType type, const RowTable& table) {
  const Rows all = rows_of(table, plan);
  if (all.rows == 0 || all.count == 0) return 0;
  return type == GradType::kDouble ? Arrays<double>(all, plan.arithmetic, nullptr).bytes
                                   : Arrays<float>(all, plan.arithmetic, nullptr).bytes;
}

Error clip_sum(const ClipPlan& plan, GradType type, const RowTable& table, const ClipBound* bounds,
               double* norms, void* workspace, CudaStream cuda) {
  const Rows all = rows_of(table, plan);
  if (all.rows == 0 || all.count == 0) return cudaSuccess;
  const auto run = type == GradType::kFloat    ? &clip_sum_of<float>
                   : type == GradType::kDouble ? &clip_sum_of<double>
                                               : &clip_sum_of<Bfloat16>;
  return run(plan, all, bounds, norms, workspace, cuda);
}

Error preload_clip() {
  for (const auto load : {&preload_type<float>, &preload_type<double>, &preload_type<Bfloat16>}) {
    if (const Error error = load(); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace dpkern::cuda
#endif
