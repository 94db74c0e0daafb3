// Noise, division by the public batch size and the optimizer rule in one pass over the parameters.
// With noise from the stream, threads share out tiles as in noise.cu; without, or with prefetched
// draws, every access moves 16 bytes.

#include "core/lattice.h"
#include "core/optimizer.h"
#include "cuda/device.cuh"
#include "cuda/draws.cuh"

namespace dpkern::cuda {

constexpr int kFlatEach = static_cast<int>(kUpdatePiece) / kFlatThreads;  // elements of a thread

template <class T>
constexpr int kUpdateBlocks = sizeof(T) == 8 ? 6 : kTileBlocks;  // minimum per multiprocessor

// The rule of this step: with a step counter, the numbers that depend on the step count are the
// step counter's.
__device__ __forceinline__ RuleNumbers rule_now(const UpdatePlan& plan) {
  RuleNumbers rule = plan.rule;
  if (plan.step_counter != nullptr) {
    rule.first_step = plan.step_counter->step == 0 ? 1 : 0;
    rule.root2 = std::sqrt(1 - plan.step_counter->beta2_power);
    rule.step = rule.lr / (1 - plan.step_counter->beta1_power);
  }
  return rule;
}

// body(rule in the parameters' type).
template <class T, class Body>
__device__ __forceinline__ void with_rule(const RuleNumbers& numbers, const Body& body) {
  switch (numbers.form) {
    case RuleForm::kPlain:
      return body(plain_sgd<T>(numbers));
    case RuleForm::kMomentum:
      return body(momentum<T>(numbers));
    case RuleForm::kNesterov:
      return body(nesterov<T>(numbers));
    case RuleForm::kAdam:
      return body(adam<T>(numbers));
  }
}

// One tensor as a kernel sees it.
template <class T, class Sum>
struct Arrays {
  T* param;
  const Sum* sum;
  T* state1;
  T* state2;
  T per_unit;
  T step;

  __device__ __forceinline__ explicit Arrays(const UpdateTask& task)
      : param(static_cast<T*>(task.param)),
        sum(static_cast<const Sum*>(task.sum)),
        state1(static_cast<T*>(task.state1)),
        state2(static_cast<T*>(task.state2)),
        per_unit(static_cast<T>(task.per_unit)),
        step(static_cast<T>(task.step)) {}
};

template <class T>
__device__ __forceinline__ T noised(T sum, std::int32_t x, std::uint32_t bits, T per_unit,
                                    int& bad) {
  return release_float(finite_units(sum, per_unit, bad), bits, x);
}
template <class T, class Sum>
__device__ __forceinline__ T noised(Sum sum, std::int32_t x, std::uint32_t, T, int&) {
  return static_cast<T>(release_integer(sum, x));
}

template <class T, class Sum>
constexpr bool kRounds = false;  // float sums are rounded to the lattice first
template <class T>
constexpr bool kRounds<T, T> = true;

// Shared memory of the tile kernel; only float sums need the rounding bits.
template <bool kRounded>
struct UpdateRoom : TileShared {
  RuleNumbers rule;
  __device__ __forceinline__ void fill(const Stream&, const TileLane&) {}
  __device__ __forceinline__ std::uint32_t bits(int) const { return 0; }
};
template <>
struct UpdateRoom<true> : TileShared {
  RuleNumbers rule;
  RoundingRoom rounded;
  __device__ __forceinline__ void fill(const Stream& rounding, const TileLane& seat) {
    rounded.fill(rounding, seat);
  }
  __device__ __forceinline__ std::uint32_t bits(int k) const { return rounded.bits(k); }
};

// This thread's share of a tile. Not a lambda: the run-time compiler takes generic ones for host
// code.
template <class T, class Sum>
struct TileUpdate {
  const UpdateTask& task;
  const TileLane& seat;
  const UpdateRoom<kRounds<T, Sum>>& room;
  int& bad;

  template <class Rule>
  __device__ __forceinline__ void operator()(const Rule& rule) const {
    constexpr int kStates = Rule::kStates;
    const Arrays<T, Sum> of(task);
    const std::int64_t size = task.size;  // a copy: stores could change the original
    for (int k = 0; k < kPerThread; ++k) {
      const std::int64_t i = seat.index + kLanes * k;
      if (i < 0 || i >= size) continue;
      T param = of.param[i];
      T state1 = kStates > 0 ? of.state1[i] : T{0};
      T state2 = kStates > 1 ? of.state2[i] : T{0};
      const T y = noised(of.sum[i], room.draws[k][threadIdx.x], room.bits(k), of.per_unit, bad);
      apply(rule, y * of.step, param, state1, state2);
      of.param[i] = param;
      if (kStates > 0) of.state1[i] = state1;
      if (kStates > 1) of.state2[i] = state2;
    }
  }
};

template <class T, class Sum, class Law>
__global__ void __launch_bounds__(kTileThreads, kUpdateBlocks<T>)
    update_tile_kernel(UpdatePlan plan, const UpdateTask* tasks, std::int64_t* nonfinite) {
  __shared__ UpdateRoom<kRounds<T, Sum>> room;
  if (threadIdx.x == 0) room.rule = rule_now(plan);
  load_table<Law>(room);
  const std::int64_t piece = piece_of_thread();
  if (piece >= plan.pieces) return;
  const UpdateTask& task = tasks[task_of(tasks, plan.tasks, &UpdateTask::first_piece, piece)];
  const TileLane seat(task.first_position, piece - task.first_piece);
  const std::uint32_t steps =
      plan.step_counter == nullptr ? 0u : static_cast<std::uint32_t>(plan.step_counter->step);
  Stream stream = plan.stream;
  stream.n1 += steps;
  draw_lane<Law>(stream, seat, room);
  Stream rounding = plan.rounding;
  rounding.n1 += steps;
  room.fill(rounding, seat);
  int bad = 0;
  with_rule<T>(room.rule, TileUpdate<T, Sum>{task, seat, room, bad});
  if (bad != 0) add_atomically(nonfinite, std::int64_t{bad});
}

// Elements [i, i + V) of all arrays, everything read before anything is used.
template <int V, class T, class Sum, bool kDraws, class Rule>
__device__ __forceinline__ void update_pack(const UpdatePlan& plan, const Arrays<T, Sum>& of,
                                            std::int64_t draws_at, std::int64_t i, const Rule& rule,
                                            int& bad) {
  constexpr bool kBits = kDraws && kRounds<T, Sum>;
  T param[V], state1[V], state2[V];
  Sum sum[V];
  std::int32_t x[V];
  std::uint16_t bits[V];
  load_pack<V>(of.param + i, param);
  load_pack<V>(of.sum + i, sum);
  if constexpr (Rule::kStates > 0) load_pack<V>(of.state1 + i, state1);
  if constexpr (Rule::kStates > 1) load_pack<V>(of.state2 + i, state2);
  if constexpr (kDraws) load_pack<V>(plan.draws + draws_at + i, x);
  if constexpr (kBits) load_pack<V>(plan.rounding_bits + draws_at + i, bits);
  DPK_UNROLL
  for (int v = 0; v < V; ++v) {
    T y;
    if constexpr (kDraws) {
      y = noised(sum[v], x[v], kBits ? bits[v] : 0u, of.per_unit, bad);
    } else {
      y = finite_units(sum[v], T{1}, bad);
    }
    apply(rule, y * of.step, param[v], state1[v], state2[v]);
  }
  store_pack<V>(param, of.param + i);
  if constexpr (Rule::kStates > 0) store_pack<V>(state1, of.state1 + i);
  if constexpr (Rule::kStates > 1) store_pack<V>(state2, of.state2 + i);
}

// This thread's share of a piece that begins at element `begin`.
template <class T, class Sum, bool kDraws>
struct FlatUpdate {
  const UpdatePlan& plan;
  const UpdateTask& task;
  std::int64_t begin;
  int& bad;

  template <class Rule>
  __device__ __forceinline__ void operator()(const Rule& rule) const {
    constexpr int V = 16 / static_cast<int>(sizeof(T));
    const int thread = static_cast<int>(threadIdx.x);
    const Arrays<T, Sum> of(task);
    if (task.aligned16 != 0 && begin + kUpdatePiece <= task.size) {
      DPK_UNROLL
      for (int k = 0; k < kFlatEach / V; ++k) {
        const std::int64_t i = begin + V * (k * kFlatThreads + thread);
        update_pack<V, T, Sum, kDraws>(plan, of, task.draws_at, i, rule, bad);
      }
    } else {
      for (int k = 0; k < kFlatEach; ++k) {
        const std::int64_t i = begin + k * kFlatThreads + thread;
        if (i < task.size) {
          update_pack<1, T, Sum, kDraws>(plan, of, task.draws_at, i, rule, bad);
        }
      }
    }
  }
};

template <class T, class Sum, bool kDraws>
__global__ void __launch_bounds__(kFlatThreads)
    update_flat_kernel(UpdatePlan plan, const UpdateTask* tasks, std::int64_t* nonfinite) {
  __shared__ RuleNumbers numbers;
  if (threadIdx.x == 0) numbers = rule_now(plan);
  __syncthreads();
  const std::int64_t piece = blockIdx.x;
  const UpdateTask& task = tasks[task_of(tasks, plan.tasks, &UpdateTask::first_piece, piece)];
  const std::int64_t begin = (piece - task.first_piece) * kUpdatePiece;
  int bad = 0;
  with_rule<T>(numbers, FlatUpdate<T, Sum, kDraws>{plan, task, begin, bad});
  if (bad != 0) add_atomically(nonfinite, std::int64_t{bad});
}

__global__ void advance_kernel(UpdateStepCounter* step_counter, double beta1, double beta2) {
  step_counter->step += 1;
  step_counter->beta1_power *= beta1;
  step_counter->beta2_power *= beta2;
}

}  // namespace dpkern::cuda
