// The polynomial loss with the hidden layer in its coefficients: a block takes a record, a few
// whole rows of its coefficients at a time. Their noise stays in shared memory.

#include "cuda/coef.cuh"

namespace dpkern::cuda {

// Coefficients that a block holds at a time: wherever they begin, they meet at most eight tiles.
constexpr int kSpan = (kTilesPerBlock - 1) * kTile;
constexpr int kGroups = kTileThreads / kLossLanes;
constexpr int kSpanBlocks = 6;  // blocks per multiprocessor

// Noise of neighbouring coefficients, made by tiles.
template <class Law>
struct TileSpan {
  struct Room : TileShared {
    RoundingRoom rounded;
  };
  Room& room;
  int offset;  // of the first of them in its tile

  __device__ __forceinline__ explicit TileSpan(Room& room_) : room(room_) { load_table<Law>(room); }
  // All threads of the block: `count` from `at` on, linear ones or quadratic ones.
  __device__ __forceinline__ void begin(const CoefPlan& plan, bool quadratic, std::int64_t at,
                                        int count) {
    const std::uint64_t first =
        (quadratic ? plan.quadratic : plan.linear) + static_cast<std::uint64_t>(at);
    offset = static_cast<int>(first % kTile);
    const TileLane seat(first, static_cast<int>(threadIdx.x) / kLanes);
    if (seat.index - seat.lane < count) {
      draw_lane<Law>(plan.draws, seat, room);
      room.rounded.fill(plan.rounding, seat);
    }
    __syncthreads();
  }
  template <class T>
  __device__ __forceinline__ T noised(T value, const Steps<T>& steps, int e) const {
    const int place = offset + e;
    const int k = place % kTile / kLanes;
    const int maker = place / kTile * kLanes + place % kLanes;
    const std::uint32_t bits = rounding_bits(room.rounded.words[k >> 1][maker], k);
    return steps.noised(value, bits, room.draws[k][maker]);
  }
};

// No noise, or prefetched draws.
template <bool kDraws>
struct FlatSpan {
  const std::int32_t* x;
  const std::uint16_t* bits;

  __device__ __forceinline__ void begin(const CoefPlan& plan, bool quadratic, std::int64_t at,
                                        int) {
    if constexpr (kDraws) {
      const std::int64_t first = (quadratic ? plan.quadratic_at : plan.linear_at) + at;
      x = plan.draws.values + first;
      bits = bits_made(plan.draws) + first;
    }
  }
  template <class T>
  __device__ __forceinline__ T noised(T value, const Steps<T>& steps, int e) const {
    if constexpr (kDraws) return steps.noised(value, bits[e], x[e]);
    return value;
  }
};

// One record. What is read of `linear` and `columns` was written before a barrier.
template <class T, class Span>
struct Record {
  const CoefPlan& plan;
  const FeatureSizes& sizes;
  const FeatureArrays<T>& of;
  const FeatureSums& sums;
  Span& span;
  std::int64_t record;
  std::int64_t numbers;  // classes * width
  const T* h;
  const T* y;
  double* linear;
  double* columns;
  Steps<T> steps;
  int lane;
  int group;

  __device__ __forceinline__ Record(const CoefPlan& plan_, const FeatureSizes& sizes_,
                                    const FeatureArrays<T>& of_, const FeatureSums& sums_,
                                    Span& span_)
      : plan(plan_),
        sizes(sizes_),
        of(of_),
        sums(sums_),
        span(span_),
        record(blockIdx.x),
        numbers(sizes_.classes * sizes_.width),
        h(of_.hidden + record * sizes_.width),
        y(of_.targets + record * sizes_.classes),
        linear(sums_.linear + record * numbers),
        columns(sums_.columns + record * numbers),
        steps(plan_, record),
        lane(static_cast<int>(threadIdx.x) % kLossLanes),
        group(static_cast<int>(threadIdx.x) / kLossLanes) {}

  __device__ __forceinline__ void make_linear() const {
    for (std::int64_t at = 0; at < numbers; at += kSpan) {
      const int count = static_cast<int>(numbers - at < kSpan ? numbers - at : kSpan);
      span.begin(plan, false, record * numbers + at, count);
      for (int e = static_cast<int>(threadIdx.x); e < count; e += kTileThreads) {
        const std::int64_t i = at + e;
        const T value = linear_coefficient(y[i / sizes.width]) * h[i % sizes.width];
        linear[i] = static_cast<double>(span.noised(value, steps, e));
      }
      __syncthreads();
    }
  }

  // Both sums of rows of all classes, which lie one behind the other.
  __device__ __forceinline__ void sum_quadratic() const {
    const int width = static_cast<int>(sizes.width), most = kSpan / width;
    for (std::int64_t first = 0; first < numbers; first += most) {
      const int rows = static_cast<int>(numbers - first < most ? numbers - first : most);
      span.begin(plan, true, (record * numbers + first) * sizes.width, rows * width);
      sum_rows(first, rows, width);
      sum_columns(first, rows, width);
      __syncthreads();
    }
  }

  __device__ __forceinline__ void sum_rows(std::int64_t first, int rows, int width) const {
    for (int r = group; r - group < rows; r += kGroups) {
      const std::int64_t row = first + r;
      double sum = 0;
      if (r < rows) {
        const T own = h[row % width];
        const T* const w = of.weights + row / width * width;
        for (int g = lane; g < width; g += kLossLanes) {
          const T a2 = span.noised(own * eighth_of(h[g]), steps, r * width + g);
          sum += static_cast<double>(a2) * static_cast<double>(w[g]);
        }
      }
      sum = meet(sum);
      if (r < rows && lane == 0) linear[row] = linear[row] + sum;
    }
  }

  __device__ __forceinline__ void sum_columns(std::int64_t first, int rows, int width) const {
    const std::int64_t label = first / width, last = (first + rows - 1) / width;
    const int count = static_cast<int>(last - label + 1) * width;
    for (int i = static_cast<int>(threadIdx.x); i < count; i += kTileThreads) {
      const std::int64_t own = (label + i / width) * width;  // the class's first row
      const int g = i % width;
      const int begin = own > first ? static_cast<int>(own - first) : 0;
      const int end = own + width < first + rows ? static_cast<int>(own + width - first) : rows;
      const T eighth = eighth_of(h[g]);
      double sum = own < first ? columns[own + g] : 0;
      for (int r = begin; r < end; ++r) {
        const std::int64_t row = first + r;
        const T a2 = span.noised(h[row - own] * eighth, steps, r * width + g);
        sum += static_cast<double>(a2) * static_cast<double>(of.weights[row]);
      }
      columns[own + g] = sum;
    }
  }

  __device__ __forceinline__ void finish() const {
    double* const terms = sums.terms + record * sizes.classes;
    double* const slopes = sums.slopes + record * sizes.classes;
    for (std::int64_t label = group; label - group < sizes.classes; label += kGroups) {
      double term = 0, score = 0;
      const bool own = label < sizes.classes;
      for (std::int64_t e = lane; own && e < sizes.width; e += kLossLanes) {
        const double w = static_cast<double>(of.weights[label * sizes.width + e]);
        term += w * linear[label * sizes.width + e];
        score += static_cast<double>(h[e]) * w;
      }
      term = meet(term);
      score = meet(score);
      if (own && lane == 0) {
        terms[label] = term;
        slopes[label] = score_slope(static_cast<double>(linear_coefficient(y[label])), score);
      }
    }
    for (std::int64_t i = threadIdx.x; i < numbers; i += kTileThreads) {
      columns[i] = linear[i] + columns[i];
    }
    __syncthreads();
    for (std::int64_t e = threadIdx.x; e < sizes.width; e += kTileThreads) {
      double sum = 0;
      for (std::int64_t label = 0; label < sizes.classes; ++label) {
        sum += static_cast<double>(of.weights[label * sizes.width + e]) * slopes[label];
      }
      of.dhidden[record * sizes.width + e] = static_cast<T>(sum);
    }
    if (threadIdx.x != 0) return;
    double total = 0;
    for (std::int64_t label = 0; label < sizes.classes; ++label) total += terms[label];
    of.loss[record] = total;
  }

  __device__ __forceinline__ void evaluate() const {
    make_linear();
    sum_quadratic();
    finish();
  }
};

template <class T, class Law>
__global__ void __launch_bounds__(kTileThreads, kSpanBlocks)
    features_tile_kernel(CoefPlan plan, FeatureSizes sizes, FeatureArrays<T> of, FeatureSums sums) {
  __shared__ typename TileSpan<Law>::Room room;
  TileSpan<Law> span(room);
  Record<T, TileSpan<Law>>(plan, sizes, of, sums, span).evaluate();
}

template <class T, bool kDraws>
__global__ void __launch_bounds__(kTileThreads, kSpanBlocks)
    features_flat_kernel(CoefPlan plan, FeatureSizes sizes, FeatureArrays<T> of, FeatureSums sums) {
  FlatSpan<kDraws> span;
  Record<T, FlatSpan<kDraws>>(plan, sizes, of, sums, span).evaluate();
}

// The derivative by one weight: over the records of a run, then over the runs.
template <class T>
__global__ void __launch_bounds__(kFlatThreads)
    features_sum_kernel(std::int64_t records, std::int64_t numbers, const double* of_records,
                        T* dweights) {
  const std::int64_t i = blockIdx.x * static_cast<std::int64_t>(kFlatThreads) + threadIdx.x;
  if (i >= numbers) return;
  double total = 0;
  for (std::int64_t first = 0; first < records; first += kRecordRun) {
    const std::int64_t end = records - first < kRecordRun ? records : first + kRecordRun;
    double of_run = 0;
    for (std::int64_t record = first; record < end; ++record) {
      of_run += of_records[record * numbers + i];
    }
    total += of_run;
  }
  dweights[i] = static_cast<T>(total);
}

}  // namespace dpkern::cuda
