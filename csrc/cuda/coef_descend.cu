// SGD on the noisy polynomial loss of many small autoencoders. A block has one run, sixteen threads
// one user of it: each has the weights of its features in registers, from the first step to the
// last. Sums over features go through all sixteen, in the order of core/coef.h.

#include "core/logistic.h"
#include "core/scale.h"
#include "cuda/coef.cuh"

namespace dpkern::cuda {

// Of half as many sums as before each thread keeps those that its lane's bit says, until every
// thread has the sum of one: unit `unit_of(lane)`. All threads of the warp.
template <int kCount, class T>
__device__ __forceinline__ T sum_of_units(const T (&x)[kCount], int lane, int half) {
  if constexpr (kCount == 1) {
    T sum = x[0];
    for (; half > 0; half /= 2) sum = sum + __shfl_xor_sync(0xffffffffu, sum, half);
    return sum;
  } else {
    const bool upper = (lane & half) != 0;
    T kept[kCount / 2];
    DPK_UNROLL
    for (int k = 0; k < kCount / 2; ++k) {
      const T low = x[k], high = x[k + kCount / 2];
      kept[k] = (upper ? high : low) + __shfl_xor_sync(0xffffffffu, upper ? low : high, half);
    }
    return sum_of_units<kCount / 2>(kept, lane, half / 2);
  }
}

// The sum of lanes of numbers that one thread has.
template <int kCount, class T>
__device__ __forceinline__ T sum_of_own(const T (&x)[kCount]) {
  if constexpr (kCount == 1) {
    return x[0];
  } else {
    T sums[kCount / 2];
    DPK_UNROLL
    for (int k = 0; k < kCount / 2; ++k) sums[k] = x[k] + x[k + kCount / 2];
    return sum_of_own<kCount / 2>(sums);
  }
}

// What one step needs from memory, for the features of one thread.
template <class T, int kChunks>
struct Visit {
  T input[kChunks], target[kChunks];
  std::int32_t draws[2][kChunks];
  std::uint16_t rounding[2][kChunks];
};

template <class T, int kUnits, int kChunks>
struct Descending {
  const Descent& call;
  std::int64_t run, pair;
  int lane;
  bool present;  // whether there is such a user
  T encoder[kUnits][kChunks], decoder[kUnits][kChunks];

  __device__ __forceinline__ explicit Descending(const Descent& call_)
      : call(call_), run(blockIdx.x), lane(static_cast<int>(threadIdx.x) % kLossLanes) {
    const int user = static_cast<int>(threadIdx.x) / kLossLanes;
    present = user < call.users;
    pair = run * call.users + user;
    weights([](T& own, T& stored) { own = stored; });
  }
  __device__ __forceinline__ void store() {
    weights([](T& own, T& stored) { stored = own; });
  }
  __device__ __forceinline__ Visit<T, kChunks> visit(std::int64_t step) const {
    Visit<T, kChunks> made{};
    if (!present) return made;
    const std::int64_t user = pair - run * call.users, part = call.users * call.features;
    const std::int64_t place = (run * call.steps + step) * call.users + user;
    const std::int64_t row = call.order[place];
    DPK_UNROLL
    for (int c = 0; c < kChunks; ++c) {
      const int i = feature(c);
      if (i >= call.features) continue;
      made.input[c] = record(call.inputs, call.input_tables, row, i);
      made.target[c] = record(call.targets, call.target_tables, row, i);
      if (call.added != nullptr) {
        const T* const added = static_cast<const T*>(call.added);
        made.input[c] = made.input[c] + added[place * call.features + i];
      }
      if (call.draws == nullptr) continue;
      const std::int64_t at = 2 * (run * call.steps + step) * part + user * call.features + i;
      DPK_UNROLL
      for (int k = 0; k < 2; ++k) {
        made.draws[k][c] = call.draws[at + k * part];
        made.rounding[k][c] = static_cast<std::uint16_t>(call.rounding[at + k * part]);
      }
    }
    return made;
  }
  // The codes of all units, and that of this thread's own.
  __device__ __forceinline__ T encode(const Visit<T, kChunks>& of, T (&hidden)[kUnits]) const {
    T sums[kUnits];
    DPK_UNROLL
    for (int r = 0; r < kUnits; ++r) {
      sums[r] = of.input[0] * encoder[r][0];
      DPK_UNROLL
      for (int c = 1; c < kChunks; ++c) sums[r] = sums[r] + of.input[c] * encoder[r][c];
    }
    const T sum = sum_of_units<kUnits>(sums, lane, kLossLanes / 2);
    const T own = present && unit() < call.units ? sigmoid<T>(sum) : T{0};
    DPK_UNROLL
    for (int r = 0; r < kUnits; ++r) hidden[r] = of_unit(own, r);
    return own;
  }
  __device__ __forceinline__ T shift(const T (&hidden)[kUnits]) const {
    return static_cast<T>(call.constant) * sum_of_own(hidden);
  }
  // Logits; whether one lies beyond the limit.
  __device__ __forceinline__ bool decode(const T (&hidden)[kUnits], T shifted,
                                         T (&logits)[kChunks]) const {
    bool beyond = false;
    DPK_UNROLL
    for (int c = 0; c < kChunks; ++c) {
      T sums[kUnits];
      DPK_UNROLL
      for (int r = 0; r < kUnits; ++r) sums[r] = hidden[r] * decoder[r][c];
      logits[c] = sum_of_own(sums) + shifted;
      const bool known = present && feature(c) < call.features;
      beyond = beyond || (known && !(std::fabs(logits[c]) <= static_cast<T>(call.limit)));
    }
    return beyond;
  }
  // The loss's slopes by the logits; 0 where there is no feature.
  __device__ __forceinline__ void slopes(const Visit<T, kChunks>& of, T shifted,
                                         T (&logits)[kChunks]) const {
    double scale = call.scale;
    if (call.growth > 0) {
      scale = static_cast<double>(
          scale_at(static_cast<T>(call.scale), static_cast<T>(call.growth), shifted));
    }
    const bool noised = call.draws != nullptr;
    const T per_unit = noised ? per_unit_of<T>(scale) : T{1};
    const T cell = noised ? cell_of<T>(scale) : T{1};
    DPK_UNROLL
    for (int c = 0; c < kChunks; ++c) {
      T a1 = linear_coefficient(of.target[c]);
      T a2 = quadratic_coefficient(of.target[c], call.form);
      if (noised) {
        const std::uint32_t first = of.rounding[0][c], second = of.rounding[1][c];
        a1 = noised_coefficient(a1, per_unit, cell, first, of.draws[0][c]);
        a2 = noised_coefficient(a2, per_unit, cell, second, of.draws[1][c]);
      }
      const bool known = present && feature(c) < call.features;
      logits[c] = known ? quadratic_slope(a1, a2, logits[c]) : T{0};
    }
  }
  __device__ __forceinline__ void descend(const Visit<T, kChunks>& of, T own,
                                          const T (&hidden)[kUnits], const T (&slope)[kChunks]) {
    T total[1] = {slope[0]}, sums[kUnits];
    DPK_UNROLL
    for (int c = 1; c < kChunks; ++c) total[0] = total[0] + slope[c];
    DPK_UNROLL
    for (int r = 0; r < kUnits; ++r) {
      sums[r] = slope[0] * decoder[r][0];
      DPK_UNROLL
      for (int c = 1; c < kChunks; ++c) sums[r] = sums[r] + slope[c] * decoder[r][c];
    }
    const T moved = static_cast<T>(call.constant) * sum_of_units<1>(total, lane, kLossLanes / 2);
    const T sum = sum_of_units<kUnits>(sums, lane, kLossLanes / 2);
    const T rate = static_cast<T>(call.lr);
    const T by_own = (sum + moved) * (own - own * own) * rate;
    DPK_UNROLL
    for (int r = 0; r < kUnits; ++r) {
      const T by_code = of_unit(by_own, r), by_hidden = hidden[r] * rate;
      DPK_UNROLL
      for (int c = 0; c < kChunks; ++c) {
        encoder[r][c] = encoder[r][c] - of.input[c] * by_code;
        decoder[r][c] = decoder[r][c] - slope[c] * by_hidden;
      }
    }
  }

 private:
  static constexpr int kThreadsOfUnit = kLossLanes / kUnits;

  __device__ __forceinline__ int unit() const { return lane / kThreadsOfUnit; }
  __device__ __forceinline__ int feature(int chunk) const { return lane + kLossLanes * chunk; }
  // A unit's number, from a thread that has it. All threads of the warp.
  __device__ __forceinline__ T of_unit(T own, int unit) const {
    const int first = static_cast<int>(threadIdx.x) & kLossLanes;
    return __shfl_sync(0xffffffffu, own, first + unit * kThreadsOfUnit);
  }
  __device__ __forceinline__ T record(const void* tables, std::int64_t count, std::int64_t row,
                                      int i) const {
    const std::int64_t first = count > 1 ? run * call.records : 0;
    return static_cast<const T*>(tables)[(first + row) * call.features + i];
  }
  template <class F>
  __device__ __forceinline__ void weights(const F& each) {
    T* const first = static_cast<T*>(call.encoder) + pair * call.features * call.units;
    T* const second = static_cast<T*>(call.decoder) + pair * call.features * call.units;
    DPK_UNROLL
    for (int r = 0; r < kUnits; ++r) {
      DPK_UNROLL
      for (int c = 0; c < kChunks; ++c) {
        const int i = feature(c);
        T nothing = 0, nowhere = 0;
        const bool known = present && r < call.units && i < call.features;
        each(encoder[r][c], known ? first[i * call.units + r] : nothing);
        each(decoder[r][c], known ? second[r * call.features + i] : nowhere);
      }
    }
  }
};

template <class T, int kUnits, int kChunks>
__global__ void __launch_bounds__(kDescentThreads) descend_kernel(Descent call) {
  // One flag for even steps, one for odd: a thread may be one step ahead.
  __shared__ int beyond[2];
  if (call.stopped[blockIdx.x] != 0) return;
  if (threadIdx.x < 2) beyond[threadIdx.x] = 0;
  __syncthreads();
  Descending<T, kUnits, kChunks> pair(call);
  auto next = pair.visit(0);
  for (std::int64_t step = 0; step < call.steps; ++step) {
    const auto visit = next;
    if (step + 1 < call.steps) next = pair.visit(step + 1);
    T hidden[kUnits], logits[kChunks];
    const T own = pair.encode(visit, hidden);
    const T shift = pair.shift(hidden);
    if (pair.decode(hidden, shift, logits)) beyond[step & 1] = 1;
    __syncthreads();
    if (beyond[step & 1] != 0) {
      if (threadIdx.x == 0) call.stopped[blockIdx.x] = 1;
      break;
    }
    pair.slopes(visit, shift, logits);
    pair.descend(visit, own, hidden, logits);
  }
  pair.store();
}

}  // namespace dpkern::cuda
