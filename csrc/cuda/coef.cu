// Coefficients of polynomial losses, written with their noise or evaluated with it in the block's
// memory. Noise from a law or a table is made by tiles as in noise.cu.

#include "core/coef.h"
#include "core/layouts.h"
#include "cuda/coef.cuh"

namespace dpkern::cuda {

constexpr int kFlatEach = kCoefPiece / kFlatThreads;  // elements of a thread

// Wherever a window begins, it meets at most four tiles of linear and four of quadratic
// coefficients.
constexpr int kKindThreads = kTileThreads / 2;  // threads that make the tiles of one kind
template <class Law>
constexpr int kLossBlocks = 6;  // of tiles, per multiprocessor
template <>
constexpr int kLossBlocks<Source> = 5;  // the registers of six do not suffice
constexpr int kFlatLossBlocks = 8;      // without it the compiler aims higher on sm_80, and spills

// The rows of an element and of those at most kReach behind it, with one long division.
class RowsFrom {
 public:
  __device__ __forceinline__ RowsFrom(std::int64_t element, std::int64_t columns)
      : row_(element / columns), column_(element % columns), columns_(columns) {}

  __device__ __forceinline__ std::int64_t at(int further) const {
    const std::int64_t column = column_ + further;
    if (columns_ > kReach) return row_ + (column >= columns_ ? 1 : 0);
    return row_ + static_cast<std::uint32_t>(column) / static_cast<std::uint32_t>(columns_);
  }

 private:
  static constexpr int kReach = kCoefPiece;
  std::int64_t row_, column_, columns_;
};

// Row 0 of the grid makes the linear coefficients, row 1 the quadratic ones.
template <class T, class Law>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks)
    perturb_tile_kernel(CoefPlan plan, const T* targets, T* linear, T* quadratic) {
  __shared__ TileShared room;
  __shared__ RoundingRoom rounded;
  load_table<Law>(room);
  const bool second = blockIdx.y != 0;
  const std::int64_t n = plan.rows * plan.columns;
  const TileLane seat(second ? plan.quadratic : plan.linear, piece_of_thread());
  const std::int64_t begin = seat.index - seat.lane;  // of the tile
  if (begin >= n) return;
  draw_lane<Law>(plan.draws, seat, room);
  rounded.fill(plan.rounding, seat);
  const std::int64_t first = begin < 0 ? 0 : begin;
  const RowsFrom rows(first, plan.columns);
  T* const out = second ? quadratic : linear;
  for (int k = 0; k < kPerThread; ++k) {
    const std::int64_t i = seat.index + kLanes * k;
    if (i < 0 || i >= n) continue;
    const T x = targets[i];
    const T value = second ? quadratic_coefficient(x, plan.form) : linear_coefficient(x);
    const Steps<T> steps(plan, rows.at(static_cast<int>(i - first)));
    out[i] = steps.noised(value, rounded.bits(k), room.draws[k][threadIdx.x]);
  }
}

// V elements from i on, everything read before anything is used.
template <int V, class T, bool kDraws>
__device__ __forceinline__ void perturb_pack(const CoefPlan& plan, const RowsFrom& rows,
                                             std::int64_t begin, int further, const T* targets,
                                             T* linear, T* quadratic) {
  const std::int64_t i = begin + further;
  T a1[V], a2[V];
  std::int32_t x1[V], x2[V];
  std::uint16_t bits1[V], bits2[V];
  load_pack<V>(targets + i, a1);
  if constexpr (kDraws) {
    load_pack<V>(plan.draws.values + plan.linear_at + i, x1);
    load_pack<V>(plan.draws.values + plan.quadratic_at + i, x2);
    load_pack<V>(bits_made(plan.draws) + plan.linear_at + i, bits1);
    load_pack<V>(bits_made(plan.draws) + plan.quadratic_at + i, bits2);
  }
  DPK_UNROLL
  for (int v = 0; v < V; ++v) {
    a2[v] = quadratic_coefficient(a1[v], plan.form);
    a1[v] = linear_coefficient(a1[v]);
    if constexpr (kDraws) {
      const Steps<T> steps(plan, rows.at(further + v));
      a1[v] = steps.noised(a1[v], bits1[v], x1[v]);
      a2[v] = steps.noised(a2[v], bits2[v], x2[v]);
    }
  }
  store_pack<V>(a1, linear + i);
  store_pack<V>(a2, quadratic + i);
}

template <class T, bool kDraws>
__global__ void __launch_bounds__(kFlatThreads)
    perturb_flat_kernel(CoefPlan plan, const T* targets, T* linear, T* quadratic) {
  constexpr int V = 16 / static_cast<int>(sizeof(T));
  const int thread = static_cast<int>(threadIdx.x);
  const std::int64_t n = plan.rows * plan.columns;
  const std::int64_t begin = blockIdx.x * static_cast<std::int64_t>(kCoefPiece);
  const RowsFrom rows(begin, plan.columns);
  if (plan.aligned16 != 0 && begin + kCoefPiece <= n) {
    DPK_UNROLL
    for (int k = 0; k < kFlatEach / V; ++k) {
      const int further = V * (k * kFlatThreads + thread);
      perturb_pack<V, T, kDraws>(plan, rows, begin, further, targets, linear, quadratic);
    }
  } else {
    for (int further = thread; further < kCoefPiece && begin + further < n;
         further += kFlatThreads) {
      perturb_pack<1, T, kDraws>(plan, rows, begin, further, targets, linear, quadratic);
    }
  }
}

// A window's noise, made by tiles: half of the block's tiles are of linear coefficients. The two
// draws of an element make room for its term.
template <class Law>
struct TileWindow {
  struct Room : TileShared {
    RoundingRoom rounded;
  };
  Room& room;
  int linear;  // places of the window's first element in the tiles
  int quadratic;

  __device__ __forceinline__ explicit TileWindow(Room& room_) : room(room_) {
    load_table<Law>(room);
  }
  // All threads of the block.
  __device__ __forceinline__ void begin(const CoefPlan& plan, std::int64_t at, int count) {
    const std::uint64_t offset = static_cast<std::uint64_t>(at);
    linear = static_cast<int>((plan.linear + offset) % kTile);
    quadratic = static_cast<int>((plan.quadratic + offset) % kTile) + kKindTile;
    const int thread = static_cast<int>(threadIdx.x);
    const std::uint64_t first = thread < kKindThreads ? plan.linear : plan.quadratic;
    const TileLane seat(first + offset, thread % kKindThreads / kLanes);
    if (seat.index - seat.lane < count) {
      draw_lane<Law>(plan.draws, seat, room);
      room.rounded.fill(plan.rounding, seat);
    }
    __syncthreads();
  }
  template <class T>
  __device__ __forceinline__ T a1(T value, const Steps<T>& steps, int e) const {
    return noised(value, steps, linear + e);
  }
  template <class T>
  __device__ __forceinline__ T a2(T value, const Steps<T>& steps, int e) const {
    return noised(value, steps, quadratic + e);
  }
  __device__ __forceinline__ void put(int e, double term) const {
    draw(linear + e) = __double2loint(term);
    draw(quadratic + e) = __double2hiint(term);
  }
  __device__ __forceinline__ double term(int e) const {
    return __hiloint2double(draw(quadratic + e), draw(linear + e));
  }

 private:
  static constexpr int kKindTile = kKindThreads / kLanes * kTile;

  // The thread that makes the coordinate at this place.
  __device__ __forceinline__ static int maker(int place) {
    return place / kTile * kLanes + place % kLanes;
  }
  __device__ __forceinline__ std::int32_t& draw(int place) const {
    return room.draws[place % kTile / kLanes][maker(place)];
  }
  template <class T>
  __device__ __forceinline__ T noised(T value, const Steps<T>& steps, int place) const {
    const int k = place % kTile / kLanes;
    const std::uint32_t bits = rounding_bits(room.rounded.words[k >> 1][maker(place)], k);
    return steps.noised(value, bits, draw(place));
  }
};

// A window without noise, or with prefetched draws.
template <bool kDraws>
struct FlatWindow {
  struct Room {
    double terms[kWindow];
  };
  Room& room;
  const std::int32_t* x1;
  const std::int32_t* x2;
  const std::uint16_t* bits1;
  const std::uint16_t* bits2;

  __device__ __forceinline__ explicit FlatWindow(Room& room_) : room(room_) {}
  __device__ __forceinline__ void begin(const CoefPlan& plan, std::int64_t at, int) {
    if constexpr (kDraws) {
      x1 = plan.draws.values + plan.linear_at + at;
      x2 = plan.draws.values + plan.quadratic_at + at;
      bits1 = bits_made(plan.draws) + plan.linear_at + at;
      bits2 = bits_made(plan.draws) + plan.quadratic_at + at;
    }
  }
  template <class T>
  __device__ __forceinline__ T a1(T value, const Steps<T>& steps, int e) const {
    if constexpr (kDraws) return steps.noised(value, bits1[e], x1[e]);
    return value;
  }
  template <class T>
  __device__ __forceinline__ T a2(T value, const Steps<T>& steps, int e) const {
    if constexpr (kDraws) return steps.noised(value, bits2[e], x2[e]);
    return value;
  }
  __device__ __forceinline__ void put(int e, double term) const { room.terms[e] = term; }
  __device__ __forceinline__ double term(int e) const { return room.terms[e]; }
};

template <class T>
struct LossArrays {
  const T* __restrict__ z;
  const T* __restrict__ targets;
  const T* __restrict__ shift;  // or null
  double* __restrict__ loss;
  T* __restrict__ dz;
};

// Slopes and terms of the elements [begin, begin + count).
template <class T, class Window>
__device__ __forceinline__ void evaluate(const CoefPlan& plan, const Window& window,
                                         const LossArrays<T>& of, std::int64_t begin, int count) {
  const RowsFrom rows(begin, plan.columns);
  for (int e = static_cast<int>(threadIdx.x); e < count; e += kTileThreads) {
    const std::int64_t i = begin + e;
    const std::int64_t row = rows.at(e);
    const Steps<T> steps(plan, row);
    const T x = of.targets[i];
    const T w = of.shift == nullptr ? of.z[i] : of.z[i] + of.shift[row];
    const T a1 = window.a1(linear_coefficient(x), steps, e);
    const T a2 = window.a2(quadratic_coefficient(x, plan.form), steps, e);
    of.dz[i] = quadratic_slope(a1, a2, w);
    window.put(e, quadratic_term(static_cast<double>(a1), static_cast<double>(a2),
                                 static_cast<double>(w)));
  }
}

// This thread's lane of the terms [begin, end), which begin with lane 0.
template <class Window>
__device__ __forceinline__ double lane_sum(const Window& window, int begin, int end, double sum) {
  const int lane = static_cast<int>(threadIdx.x) % kLossLanes;
  for (int e = begin + lane; e < end; e += kLossLanes) sum += window.term(e);
  return sum;
}

template <class T, class Window>
__device__ __forceinline__ void loss_of_block(const CoefPlan& plan, Window& window,
                                              const LossArrays<T>& of) {
  constexpr int kGroups = kTileThreads / kLossLanes;
  // Whole rows, which fit a window, or one that takes several windows.
  const std::int64_t each = (plan.rows + gridDim.x - 1) / gridDim.x;
  const std::int64_t first = blockIdx.x * each;
  const std::int64_t left = plan.rows - first;
  const int rows = static_cast<int>(left < each ? left : each);
  const std::int64_t end = (first + rows) * plan.columns;
  const int lane = static_cast<int>(threadIdx.x) % kLossLanes;
  const int group = static_cast<int>(threadIdx.x) / kLossLanes;
  const bool whole = plan.columns <= kWindow;
  double sum = 0;  // of a row that takes several windows
  for (std::int64_t at = first * plan.columns; at < end; at += kWindow) {
    const int count = static_cast<int>(end - at < kWindow ? end - at : kWindow);
    window.begin(plan, at, count);
    evaluate(plan, window, of, at, count);
    __syncthreads();
    if (!whole) {
      if (group == 0) sum = lane_sum(window, 0, count, sum);
      __syncthreads();  // the next window takes the terms' place
      continue;
    }
    const int columns = static_cast<int>(plan.columns);
    for (int row = group; row - group < rows; row += kGroups) {
      const bool own = row < rows;
      const double total =
          meet(own ? lane_sum(window, row * columns, (row + 1) * columns, 0.0) : 0);
      if (own && lane == 0) of.loss[first + row] = total;
    }
  }
  if (whole) return;
  const double total = meet(sum);
  if (threadIdx.x == 0) of.loss[first] = total;
}

template <class T, class Law>
__global__ void __launch_bounds__(kTileThreads, kLossBlocks<Law>)
    quadratic_tile_kernel(CoefPlan plan, const T* z, const T* targets, const T* shift, double* loss,
                          T* dz) {
  __shared__ typename TileWindow<Law>::Room room;
  TileWindow<Law> window(room);
  loss_of_block(plan, window, LossArrays<T>{z, targets, shift, loss, dz});
}

template <class T, bool kDraws>
__global__ void __launch_bounds__(kTileThreads, kFlatLossBlocks)
    quadratic_flat_kernel(CoefPlan plan, const T* z, const T* targets, const T* shift, double* loss,
                          T* dz) {
  __shared__ typename FlatWindow<kDraws>::Room room;
  FlatWindow<kDraws> window(room);
  loss_of_block(plan, window, LossArrays<T>{z, targets, shift, loss, dz});
}

}  // namespace dpkern::cuda
