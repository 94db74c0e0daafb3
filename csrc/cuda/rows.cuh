#pragma once
// Sums over rows of per-sample gradients: powers of each row, and the weighted sum of all rows.
// A row's sum never depends on where it lies in memory or on the rows beside it.

#include "cuda/device.cuh"

namespace dpkern::cuda {

constexpr int kWarps = kRowThreads / kWarp;
constexpr int kColumnsEach = kBlockColumns / kRowThreads;  // columns of a thread in a weighted sum
constexpr int kBlocksPerChunk = static_cast<int>(kChunk) / kBlockColumns;

struct Bfloat16 {
  std::uint16_t bits;
};
__device__ __forceinline__ float value_of(float x) { return x; }
__device__ __forceinline__ double value_of(double x) { return x; }
__device__ __forceinline__ float value_of(Bfloat16 x) {
  return __uint_as_float(static_cast<std::uint32_t>(x.bits) << 16);
}

// The sum over the warp in every lane, in a fixed order.
template <class T>
__device__ __forceinline__ T warp_sum(T x) {
  DPK_UNROLL
  for (int distance = 16; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(0xffffffffu, x, distance);
  }
  return x;
}

// The sum over the block in every thread, in a fixed order; room for one value per warp.
template <class T>
__device__ __forceinline__ T block_sum(T x, T* room) {
  const int thread = static_cast<int>(threadIdx.x);
  x = warp_sum(x);
  if (thread % 32 == 0) room[thread / 32] = x;
  __syncthreads();
  T total{};
  DPK_UNROLL
  for (int warp = 0; warp < kWarps; ++warp) total += room[warp];
  __syncthreads();
  return total;
}

// Whether packs of V may be read from every row of a task.
template <int V, class G>
__device__ __forceinline__ bool rows_aligned(const RowTask& task) {
  return reinterpret_cast<std::uintptr_t>(task.rows) % Pack<G, V>::kAlign == 0 &&
         task.columns % V == 0;
}

// The entries of a row as they are.
struct Plain {
  static constexpr bool kCheap = true;
  __device__ __forceinline__ Plain(const RowMap*, std::int64_t) {}
  __device__ __forceinline__ double operator()(double x, std::int64_t) const { return x; }
};

// (x - center) / scale, column by column.
struct Mapped {
  static constexpr bool kCheap = false;  // divisions: unrolled, they would not fit the registers
  RowMap map;
  __device__ __forceinline__ Mapped(const RowMap* maps, std::int64_t task) : map(maps[task]) {}
  __device__ __forceinline__ double operator()(double x, std::int64_t column) const {
    if (map.center != nullptr) x -= map.center[column];
    if (map.scale != nullptr) x /= map.scale[column];
    return x;
  }
};

// partial[row, chunk] = sum |x|^p over 4096 columns of a row in float64, its entries mapped before.
template <class G, class Map>
__device__ __forceinline__ void add_powers(const Rows& all, const RowMap* maps, int p,
                                           double* partial) {
  constexpr int V = 16 / static_cast<int>(sizeof(G));
  constexpr int kPacks = static_cast<int>(kChunk) / (kRowThreads * V);
  __shared__ double room[kWarps];
  const auto chunks = static_cast<unsigned>(all.chunks);  // a grid's blocks fit 31 bits
  const std::int64_t row = blockIdx.x / chunks;
  const std::int64_t chunk = blockIdx.x % chunks;
  const std::int64_t index = task_of(all.tasks, all.count, &RowTask::first_chunk, chunk);
  const RowTask& task = all.tasks[index];
  const Map map(maps, index);
  const std::int64_t begin = (chunk - task.first_chunk) * kChunk;
  const G* from = static_cast<const G*>(task.rows) + row * task.columns;
  const bool aligned = rows_aligned<V, G>(task) && begin + kChunk <= task.columns;
  double sum = 0;
  const auto add = [&](G x, std::int64_t column, bool squared) {
    const double value = map(static_cast<double>(value_of(x)), column);
    sum = squared ? ::fma(value, value, sum) : sum + std::fabs(value);
  };
  const auto add_pack = [&](int k, bool squared) {
    const std::int64_t column = begin + V * (k * kRowThreads + static_cast<int>(threadIdx.x));
    G x[V];
    load_pack<V>(from + column, x);
    DPK_UNROLL
    for (int v = 0; v < V; ++v) add(x[v], column + v, squared);
  };
  if (aligned && p == 2 && Map::kCheap) {
    DPK_UNROLL
    for (int k = 0; k < kPacks; ++k) add_pack(k, true);
  } else if (aligned) {
    DPK_NO_UNROLL
    for (int k = 0; k < kPacks; ++k) add_pack(k, p == 2);
  } else {  // in the same order, as little code as possible
    DPK_NO_UNROLL
    for (int i = 0; i < kPacks * V; ++i) {
      const std::int64_t column =
          begin + V * (i / V * kRowThreads + static_cast<int>(threadIdx.x)) + i % V;
      if (column < task.columns) add(from[column], column, p == 2);
    }
  }
  sum = block_sum(sum, room);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

template <class G>
__global__ void __launch_bounds__(kRowThreads) power_kernel(Rows all, int p, double* partial) {
  add_powers<G, Plain>(all, nullptr, p, partial);
}

template <class G>
__global__ void __launch_bounds__(kRowThreads)
    mapped_power_kernel(Rows all, const RowMap* maps, int p, double* partial) {
  add_powers<G, Mapped>(all, maps, p, partial);
}

// The contribution of a term to a float sum is itself, to a sum of integers its integer part.
template <class S, class Value>
struct Term {
  static constexpr bool kExact = true;
  __device__ __forceinline__ static std::int32_t of(Value x) {
    return static_cast<std::int32_t>(x);
  }
};
template <class Value>
struct Term<Value, Value> {
  static constexpr bool kExact = false;
  __device__ __forceinline__ static Value of(Value x) { return x; }
};

// |q|^p.
__device__ __forceinline__ std::int64_t power_of(std::int32_t q, int p) {
  return p == 2 ? std::int64_t{q} * q : std::int64_t{q < 0 ? -q : q};
}

// The sum over the warp of value r, in the lanes r * 32 / kValues and on: half of the lanes give
// the other half the values that those keep, and so on, until each holds one.
template <int kValues>
__device__ __forceinline__ std::int64_t warp_sums(std::int64_t (&values)[kValues]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int bit = 16;
  DPK_UNROLL
  for (int half = kValues / 2; half > 0; half /= 2, bit /= 2) {
    DPK_UNROLL
    for (int i = 0; i < half; ++i) {
      const bool upper = (lane & bit) != 0;
      const std::int64_t given = upper ? values[i] : values[i + half];
      const std::int64_t kept = upper ? values[i + half] : values[i];
      values[i] = kept + __shfl_xor_sync(0xffffffffu, given, bit);
    }
  }
  std::int64_t sum = values[0];
  for (; bit > 0; bit /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, bit);
  return sum;
}

// Rows with loads in flight, and minimum blocks per multiprocessor: up to 80 registers a thread,
// or 128 where the powers of the terms are added up as well.
template <class Value>
constexpr int kTogether = 32 / static_cast<int>(sizeof(Value));
template <class S, class Value>
constexpr int kSumBlocks = Term<S, Value>::kExact ? 2 : 3;

// This thread's columns of one task, for the rows [begin, end) of a block.
struct Columns {
  std::int64_t first;   // of four; the others follow it, or at kRowThreads
  std::int64_t stride;  // of the rows
  std::int64_t left;    // how many of the task's columns there are from the first on
  std::int64_t begin;
  std::int64_t end;
};

// Four columns of a row: side by side, or a block's width apart.
template <bool kAligned, class G>
__device__ __forceinline__ void load_columns(const G* from, std::int64_t left, G* x) {
  if constexpr (kAligned) {
    load_pack<kColumnsEach>(from, x);
  } else {
    DPK_UNROLL
    for (int k = 0; k < kColumnsEach; ++k) {
      if (k * kRowThreads < left) x[k] = from[k * kRowThreads];
    }
  }
}

// total[k] += sum_b factor_b row_b[column k]; factor(b) = factors[b stride].
template <bool kAligned, class G, class S, class Value>
__device__ __forceinline__ void add_rows(const G* rows, const Columns& at, const Value* factors,
                                         std::int64_t factor_stride, const Powers& powers,
                                         S* total) {
  typedef Term<S, Value> Terms;
  constexpr int kRows = kTogether<Value>;
  __shared__ std::int64_t room[kWarps][kRows];
  const int thread = static_cast<int>(threadIdx.x);
  const G* from = rows + at.begin * at.stride + at.first;
  for (std::int64_t row = at.begin; row < at.end; row += kRows, from += kRows * at.stride) {
    const int count = static_cast<int>(at.end - row < kRows ? at.end - row : kRows);
    Value weight[kRows];
    G x[kRows][kColumnsEach] = {};
    DPK_UNROLL
    for (int r = 0; r < kRows; ++r) {
      weight[r] = r < count ? factors[(row + r) * factor_stride] : Value{0};
      // 0 * inf would not vanish.
      if (weight[r] != 0 && at.left > 0) {
        load_columns<kAligned>(from + r * at.stride, at.left, x[r]);
      }
    }
    std::int64_t power[kRows] = {};
    DPK_UNROLL
    for (int r = 0; r < kRows; ++r) {
      DPK_UNROLL
      for (int k = 0; k < kColumnsEach; ++k) {
        const auto term = Terms::of(weight[r] * value_of(x[r][k]));
        total[k] += term;
        if constexpr (Terms::kExact) power[r] += power_of(term, powers.p);
      }
    }
    if constexpr (Terms::kExact) {
      constexpr int kLanesEach = 32 / kRows;
      const std::int64_t sum = warp_sums(power);
      if (thread % kLanesEach == 0) room[thread / 32][thread % 32 / kLanesEach] = sum;
      __syncthreads();
      if (thread < count) {
        std::int64_t of_row = 0;
        for (int warp = 0; warp < kWarps; ++warp) of_row += room[warp][thread];
        add_atomically(powers.of + (row + thread) * powers.row_stride, of_row);
      }
      __syncthreads();
    }
  }
}

// sum += sum_b factor_b row_b over this block's 1024 columns and its split of the rows; a row of
// factor 0 is not read. Several splits: float sums go to partial[split, column], integers are added
// to the sum atomically, and so are the powers of their terms, row by row.
template <class G, class S, class Value>
__global__ void __launch_bounds__(kRowThreads, kSumBlocks<S, Value>)
    sum_kernel(Rows all, Factors<Value> factors, Value* partial, Powers powers) {
  const int thread = static_cast<int>(threadIdx.x);
  const std::int64_t chunk = blockIdx.x / kBlocksPerChunk;
  const std::int64_t index = task_of(all.tasks, all.count, &RowTask::first_chunk, chunk);
  const RowTask& task = all.tasks[index];
  const std::int64_t base =
      (chunk - task.first_chunk) * kChunk + blockIdx.x % kBlocksPerChunk * kBlockColumns;
  if (base >= task.columns) return;
  const bool aligned = rows_aligned<kColumnsEach, G>(task);
  const std::int64_t splits = gridDim.y;
  Columns at;
  at.first = base + (aligned ? kColumnsEach * thread : thread);
  at.stride = task.columns;
  at.left = task.columns - at.first;
  at.begin = all.rows * blockIdx.y / splits;
  at.end = all.rows * (blockIdx.y + 1) / splits;
  const G* rows = static_cast<const G*>(task.rows);
  const Value* mine = factors.of + index * factors.task_stride;
  powers.of += index * powers.task_stride;
  S total[kColumnsEach] = {};
  if (aligned) {
    add_rows<true>(rows, at, mine, factors.row_stride, powers, total);
  } else {
    add_rows<false>(rows, at, mine, factors.row_stride, powers, total);
  }
  const int step = aligned ? 1 : kRowThreads;
  DPK_UNROLL
  for (int k = 0; k < kColumnsEach; ++k) {
    if (k * step >= at.left) continue;
    const std::int64_t column = at.first + k * step;
    S* sum = static_cast<S*>(task.sum) + column;
    if (splits == 1) {
      *sum += total[k];
    } else if constexpr (Term<S, Value>::kExact) {
      add_atomically(sum, total[k]);
    } else {
      partial[blockIdx.y * all.columns + task.first_column + column] = total[k];
    }
  }
}

// Float sums of several splits: a warp adds every eighth of them for 32 columns, and then the
// block's warps are added, in a fixed order.
template <class Value>
__global__ void __launch_bounds__(kRowThreads)
    combine_kernel(Rows all, std::int64_t splits, const Value* partial) {
  constexpr int kBlocksEach = static_cast<int>(kChunk) / kWarp;
  __shared__ Value room[kWarps][kWarp];
  const std::int64_t chunk = blockIdx.x / kBlocksEach;
  const RowTask& task = all.tasks[task_of(all.tasks, all.count, &RowTask::first_chunk, chunk)];
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const std::int64_t base = (chunk - task.first_chunk) * kChunk + blockIdx.x % kBlocksEach * kWarp;
  if (base >= task.columns) return;
  const std::int64_t column = base + lane;
  const bool inside = column < task.columns;
  Value total = 0;
  if (inside) {
    const Value* from = partial + task.first_column + column;
    for (std::int64_t split = warp; split < splits; split += kWarps) {
      total += from[split * all.columns];
    }
  }
  room[warp][lane] = total;
  __syncthreads();
  if (warp != 0 || !inside) return;
  for (int other = 1; other < kWarps; ++other) total += room[other][lane];
  static_cast<Value*>(task.sum)[column] += total;
}

}  // namespace dpkern::cuda
