#pragma once
// The update of one tensor's share of a tile: the rule of this step, arrays and noise as a kernel
// sees them, and groups of elements that are read together.

#include "core/lattice.h"
#include "core/optimizer.h"
#include "cuda/device.cuh"
#include "cuda/draws.cuh"

namespace dpkern::cuda {

// Coordinates of a tile that a thread updates together, as many as fit its registers.
template <class T>
constexpr int kTileTogether = sizeof(T) == 8 ? 1 : 4;

template <class T>
constexpr int kUpdateBlocks = sizeof(T) == 8 ? 6 : kTileBlocks;  // minimum per multiprocessor

// The rule of this step: with a step counter, the numbers that change from step to step are the
// step counter's.
struct RuleNow : RuleNumbers {
  double per_root2;  // of Adam with float parameters
  __device__ __forceinline__ void read(const UpdatePlan& plan) {
    static_cast<RuleNumbers&>(*this) = plan.rule;
    if (plan.step_counter != nullptr) {
      first_step = plan.step_counter->step == 0 ? 1 : 0;
      lr = plan.step_counter->lr;
      shrink = plan.step_counter->shrink;
      root2 = std::sqrt(1 - plan.step_counter->beta2_power);
      step = lr / (1 - plan.step_counter->beta1_power);
    }
    per_root2 = 1 / static_cast<double>(static_cast<float>(root2));
  }
};

// Whether this launch may update. A recorded one is replayed with the arguments that it was
// recorded with, so that only the step counter can tell a step that was announced from one that was
// not.
__device__ __forceinline__ bool is_due(const UpdatePlan& plan) {
  const UpdateStepCounter* counter = plan.step_counter;
  return counter == nullptr || counter->due == 0 || counter->due == counter->step + 1;
}

// On a device a division by root2 takes thrice the instructions of what it does here.
template <class T>
struct DeviceAdam : Adam<T> {
  double per_root2;
};

// The bits of x / root2: a quotient of two floats lies 2^-49 of itself or more away from where
// rounding to float turns, and this product less than 2^-51 away from the quotient.
__device__ __forceinline__ float over_root2(const DeviceAdam<float>& rule, float x) {
  return static_cast<float>(x * rule.per_root2);
}

template <class T>
__device__ __forceinline__ void apply(const DeviceAdam<T>& rule, T gradient, T& param, T& mean,
                                      T& square) {
  apply_adam(rule, gradient, param, mean, square);
}

// body(rule in the parameters' type).
template <class T, class Body>
__device__ __forceinline__ void with_rule(const RuleNow& numbers, const Body& body) {
  switch (numbers.form) {
    case RuleForm::kPlain:
      return body(plain_sgd<T>(numbers));
    case RuleForm::kMomentum:
      return body(momentum<T>(numbers));
    case RuleForm::kNesterov:
      return body(nesterov<T>(numbers));
    case RuleForm::kAdam:
      return body(DeviceAdam<T>{adam<T>(numbers), numbers.per_root2});
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

// y of one sum, whatever it is.
template <class T>
__device__ __forceinline__ T noised(T sum, std::int32_t x, std::uint32_t bits, T per_unit,
                                    int& bad) {
  return release_float(finite_units(sum, per_unit, bad), bits, x);
}
template <class T, class Sum>
__device__ __forceinline__ T noised(Sum sum, std::int32_t x, std::uint32_t, T, int&) {
  return static_cast<T>(release_integer(sum, x));
}

// y[v] of V sums, in few instructions; false, and nothing is done, if `noised` must make one.
template <int V>
__device__ __forceinline__ bool noised_quickly(const float* sum, const std::int32_t* x,
                                               const std::uint32_t* bits, float per_unit,
                                               float* y) {
  bool small = true;
  DPK_UNROLL
  for (int v = 0; v < V; ++v) {
    y[v] = sum[v] * per_unit;
    small = small && is_small(y[v]);
  }
  if (!small) return false;
  DPK_UNROLL
  for (int v = 0; v < V; ++v) y[v] = release_small(y[v], bits[v], x[v]);
  return true;
}
template <int V, class T, class Sum>
__device__ __forceinline__ bool noised_quickly(const Sum* sum, const std::int32_t* x,
                                               const std::uint32_t*, T, T* y) {
  DPK_UNROLL
  for (int v = 0; v < V; ++v) y[v] = static_cast<T>(release_integer(sum[v], x[v]));
  return true;
}

template <class T, class Sum>
constexpr bool kRounds = false;  // float sums are rounded to the lattice first
template <class T>
constexpr bool kRounds<T, T> = true;

// Shared memory of the tile kernel; only float sums need the rounding bits.
template <bool kRounded>
struct UpdateRoom : TileShared {
  RuleNow rule;
  __device__ __forceinline__ void fill(const Stream&, const TileLane&) {}
  __device__ __forceinline__ std::uint32_t bits(int) const { return 0; }
};
template <>
struct UpdateRoom<true> : TileShared {
  RuleNow rule;
  RoundingRoom rounded;
  __device__ __forceinline__ void fill(const Stream& rounding, const TileLane& seat) {
    rounded.fill(rounding, seat);
  }
  __device__ __forceinline__ std::uint32_t bits(int k) const { return rounded.bits(k); }
};

// The noise of a thread's coordinates in a tile: coordinate k is element index + 16 k.
template <class Room>
struct TileNoise {
  static constexpr bool kMade = true;
  static constexpr int kApart = kLanes;
  const Room& room;

  template <int V, bool>
  __device__ __forceinline__ void load(int k, std::int64_t, std::int32_t* x,
                                       std::uint32_t* bits) const {
    DPK_UNROLL
    for (int v = 0; v < V; ++v) {
      x[v] = room.draws[k + v][threadIdx.x];
      bits[v] = room.bits(k + v);
    }
  }
};

template <int V, int kApart, class S>
__device__ __forceinline__ void load_group(const S* from, S* to) {
  if constexpr (kApart == 1) {
    load_pack<V>(from, to);
  } else {
    DPK_UNROLL
    for (int v = 0; v < V; ++v) to[v] = from[kApart * v];
  }
}
template <int V, int kApart, class S>
__device__ __forceinline__ void store_group(const S* from, S* to) {
  if constexpr (kApart == 1) {
    store_pack<V>(from, to);
  } else {
    DPK_UNROLL
    for (int v = 0; v < V; ++v) to[kApart * v] = from[v];
  }
}

// V elements of all arrays from i on, the k-th of this thread and those after it; everything is
// read before anything is used. False, and nothing is written, if kQuick and a sum needs care.
template <int V, bool kQuick, class T, class Sum, class Noise, class Rule>
__device__ __forceinline__ bool update_group(const Arrays<T, Sum>& of, const Noise& noise, int k,
                                             std::int64_t i, const Rule& rule, int& bad) {
  constexpr int kApart = Noise::kApart;
  T param[V], state1[V], state2[V], y[V];
  Sum sum[V];
  std::int32_t x[V];
  std::uint32_t bits[V] = {};
  load_group<V, kApart>(of.param + i, param);
  load_group<V, kApart>(of.sum + i, sum);
  if constexpr (Rule::kStates > 0) load_group<V, kApart>(of.state1 + i, state1);
  if constexpr (Rule::kStates > 1) load_group<V, kApart>(of.state2 + i, state2);
  noise.template load<V, kRounds<T, Sum>>(k, i, x, bits);
  if constexpr (kQuick) {
    if (!noised_quickly<V>(sum, x, bits, of.per_unit, y)) return false;
  } else {
    DPK_UNROLL
    for (int v = 0; v < V; ++v) {
      if constexpr (Noise::kMade) {
        y[v] = noised(sum[v], x[v], bits[v], of.per_unit, bad);
      } else {
        y[v] = finite_units(sum[v], T{1}, bad);
      }
    }
  }
  DPK_UNROLL
  for (int v = 0; v < V; ++v) apply(rule, y[v] * of.step, param[v], state1[v], state2[v]);
  store_group<V, kApart>(param, of.param + i);
  if constexpr (Rule::kStates > 0) store_group<V, kApart>(state1, of.state1 + i);
  if constexpr (Rule::kStates > 1) store_group<V, kApart>(state2, of.state2 + i);
  return true;
}

// This thread's share of a tile: in groups where the tile lies inside of the tensor. Not a lambda:
// the run-time compiler takes generic ones for host code.
template <class T, class Sum>
struct TileUpdate {
  const UpdateTask& task;
  const TileLane& seat;
  const UpdateRoom<kRounds<T, Sum>>& room;
  int& bad;

  template <class Rule>
  __device__ __forceinline__ void operator()(const Rule& rule) const {
    constexpr int V = kTileTogether<T>;
    const Arrays<T, Sum> of(task);
    const TileNoise<UpdateRoom<kRounds<T, Sum>>> noise{room};
    const std::int64_t size = task.size;  // a copy: stores could change the original
    std::uint32_t left = ~0u;             // coordinates that are not updated yet
    if constexpr (V > 1) {
      if (seat.index >= 0 && seat.index + kLanes * (kPerThread - 1) < size) {
        DPK_NO_UNROLL
        for (int k = 0; k < kPerThread; k += V) {
          const std::int64_t i = seat.index + kLanes * k;
          if (update_group<V, true>(of, noise, k, i, rule, bad)) left &= ~(((1u << V) - 1) << k);
        }
      }
    }
    DPK_NO_UNROLL
    for (int k = 0; left != 0; ++k, left >>= 1) {
      const std::int64_t i = seat.index + kLanes * k;
      if ((left & 1) == 0 || i < 0 || i >= size) continue;
      update_group<1, false>(of, noise, k, i, rule, bad);
    }
  }
};

}  // namespace dpkern::cuda
