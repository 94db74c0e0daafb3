// Per-sample norms and clipped sums of explicit per-sample gradients. The gradients are read twice:
// for the norms, and for the sums; rows that fit a block's registers are read once. Integer sums
// are verified afterwards: a sample with integers that exceed the bound M of a clip group, which
// only rounding at the bound can cause, is scaled down.

#include "core/clip_factor.h"
#include "cuda/rows.cuh"

namespace dpkern::cuda {

// Norms of one row by one warp, and from them its clip factors; 0 for a row that is not finite.
// `powers`: of the row's chunks.
template <class Value>
__device__ __forceinline__ void factors_of_row(const Rows& all, const Clip<Value>& clip,
                                               std::int64_t row, const double* powers) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  double* norms = clip.norms + row * all.count;
  double total = 0;
  for (std::int64_t task = 0; task < all.count; ++task) {
    const std::int64_t begin = all.tasks[task].first_chunk;
    const std::int64_t end = task + 1 < all.count ? all.tasks[task + 1].first_chunk : all.chunks;
    double power = 0;
    for (std::int64_t chunk = begin + lane; chunk < end; chunk += kWarp) power += powers[chunk];
    power = warp_sum(power);
    total += power;
    if (lane == 0) norms[task] = clip.p == 2 ? std::sqrt(power) : power;
  }
  if (!clip.has_sums) return;
  __syncwarp();
  const bool finite = std::isfinite(total);
  const double together = clip.p == 2 ? std::sqrt(total) : total;
  const bool per_layer = clip.style == Style::kPerLayer;
  for (std::int64_t task = lane; task < all.count; task += kWarp) {
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

template <class Value>
__global__ void __launch_bounds__(kFactorThreads, 8)
    factor_kernel(Rows all, Clip<Value> clip, const double* partial) {
  const std::int64_t row =
      blockIdx.x * static_cast<std::int64_t>(kFactorThreads / kWarp) + threadIdx.x / kWarp;
  if (row < all.rows) factors_of_row(all, clip, row, partial + row * all.chunks);
}

// A chunk of every row, as a block that holds rows finds it.
struct HeldChunk {
  const void* rows;  // entry 0 of the chunk in row 0
  std::int64_t stride;
  std::int32_t size;  // columns
  std::int64_t first_column;
  std::int64_t task;
};

// Entries as registers hold them while they are on their way: nothing waits for them yet.
__device__ __forceinline__ float loaded(float x) { return x; }
__device__ __forceinline__ std::uint32_t loaded(Bfloat16 x) { return x.bits; }
__device__ __forceinline__ float arrived(float x) { return x; }
__device__ __forceinline__ float arrived(std::uint32_t bits) { return __uint_as_float(bits << 16); }

// A thread's share of kHeld chunks of a row: column i of a chunk is kRowThreads i + thread, which
// no row is too narrow or unaligned for.
template <class G, int kHeld>
struct HeldRow {
  static constexpr int kEach = static_cast<int>(kChunk) / kRowThreads;
  decltype(loaded(G{})) x[kHeld][kEach];

  // One condition for each load, which then needs no copy of what was there: without `some`, or
  // where a chunk has no column, that stays.
  __device__ __forceinline__ void load(const HeldChunk* chunks, std::int64_t row, bool some) {
    DPK_UNROLL
    for (int c = 0; c < kHeld; ++c) {
      const int left = some ? chunks[c].size - static_cast<int>(threadIdx.x) : 0;
      const G* from = static_cast<const G*>(chunks[c].rows) + row * chunks[c].stride + threadIdx.x;
      DPK_UNROLL
      for (int i = 0; i < kEach; ++i) {
        if (i * kRowThreads < left) x[c][i] = loaded(from[i * kRowThreads]);
      }
    }
  }
};

// Norms, factors and sums of rows of at most kHeld chunks in one read: a block takes its split of
// the rows one after another and holds a row until its factors are known, while the next one is on
// its way. The sums of the splits go to partial[split, column].
template <class G, class Value, int kHeld, bool kSquares>
__global__ void __launch_bounds__(kRowThreads)
    clip_held_kernel(Rows all, Clip<Value> clip, Value* partial) {
  typedef HeldRow<G, kHeld> Row;
  __shared__ HeldChunk chunks[kHeld];
  __shared__ double room[kHeld][kWarps];
  __shared__ double powers[kHeld];
  __shared__ Value factors[kHeld];
  const int thread = static_cast<int>(threadIdx.x);
  const int count = static_cast<int>(all.chunks);
  if (thread < kHeld) chunks[thread] = {};
  if (thread < count) {
    const std::int64_t index =
        task_of(all.tasks, all.count, &RowTask::first_chunk, static_cast<std::int64_t>(thread));
    const RowTask& task = all.tasks[index];
    const std::int64_t begin = (thread - task.first_chunk) * kChunk;
    const std::int64_t left = task.columns - begin;
    chunks[thread] = {static_cast<const G*>(task.rows) + begin, task.columns,
                      static_cast<std::int32_t>(left < kChunk ? left : kChunk),
                      task.first_column + begin, index};
  }
  __syncthreads();
  const std::int64_t begin = all.rows * blockIdx.x / gridDim.x;
  const std::int64_t end = all.rows * (blockIdx.x + 1) / gridDim.x;
  Value total[kHeld][Row::kEach] = {};
  Row next = {};  // zeros where a chunk has no column
  next.load(chunks, begin, true);
  DPK_NO_UNROLL
  for (std::int64_t row = begin; row < end; ++row) {
    Value held[kHeld][Row::kEach];
    DPK_UNROLL
    for (int c = 0; c < kHeld; ++c) {
      DPK_UNROLL
      for (int i = 0; i < Row::kEach; ++i) held[c][i] = arrived(next.x[c][i]);
    }
    next.load(chunks, row + 1, row + 1 < end);
    DPK_UNROLL
    for (int c = 0; c < kHeld; ++c) {
      double sum = 0;
      DPK_UNROLL
      for (int i = 0; i < Row::kEach; ++i) {
        const double value = held[c][i];
        sum = kSquares ? ::fma(value, value, sum) : sum + std::fabs(value);
      }
      sum = warp_sum(sum);
      if (thread % kWarp == 0) room[c][thread / kWarp] = sum;
    }
    __syncthreads();
    if (thread < kWarp) {
      if (thread < count) {
        double sum = 0;
        DPK_UNROLL
        for (int warp = 0; warp < kWarps; ++warp) sum += room[thread][warp];
        powers[thread] = sum;
      }
      __syncwarp();
      factors_of_row(all, clip, row, powers);
      __syncwarp();
      if (thread < count) factors[thread] = clip.factors[row * all.count + chunks[thread].task];
    }
    __syncthreads();
    DPK_UNROLL
    for (int c = 0; c < kHeld; ++c) {
      const Value factor = c < count ? factors[c] : Value{0};
      if (factor == 0) continue;  // 0 * inf would not vanish
      DPK_UNROLL
      for (int i = 0; i < Row::kEach; ++i) total[c][i] += factor * held[c][i];
    }
  }
  DPK_UNROLL
  for (int c = 0; c < kHeld; ++c) {
    if (c >= count) continue;
    Value* to = partial + blockIdx.x * all.columns + chunks[c].first_column + thread;
    const int left = chunks[c].size - thread;
    DPK_UNROLL
    for (int i = 0; i < Row::kEach; ++i) {
      if (i * kRowThreads < left) to[i * kRowThreads] = total[c][i];
    }
  }
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
