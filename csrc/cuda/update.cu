// Noise, division by the public batch size and the optimizer rule in one pass over the parameters.
// With noise from a law or a table, threads share out tiles as in noise.cu; without, or with
// prefetched draws, every access moves 16 bytes.

#include "cuda/update.cuh"

namespace dpkern::cuda {

constexpr int kFlatEach = static_cast<int>(kUpdatePiece) / kFlatThreads;  // elements of a thread

// Draws made ahead, or none; elements of a thread's group lie side by side.
template <bool kDraws>
struct FlatNoise {
  static constexpr bool kMade = kDraws;
  static constexpr int kApart = 1;
  const std::int32_t* draws;
  const std::uint16_t* rounding;

  template <int V, bool kRounded>
  __device__ __forceinline__ void load(int, std::int64_t i, std::int32_t* x,
                                       std::uint32_t* bits) const {
    if constexpr (kDraws) load_pack<V>(draws + i, x);
    if constexpr (kDraws && kRounded) {
      std::uint16_t halves[V];
      load_pack<V>(rounding + i, halves);
      DPK_UNROLL
      for (int v = 0; v < V; ++v) bits[v] = halves[v];
    }
  }
};

template <class T, class Sum, class Law>
__global__ void __launch_bounds__(kTileThreads, kUpdateBlocks<T>)
    update_tile_kernel(UpdatePlan plan, const UpdateTask* tasks, std::int64_t* nonfinite) {
  __shared__ UpdateRoom<kRounds<T, Sum>> room;
  if (!is_due(plan)) return;
  if (threadIdx.x == 0) room.rule.read(plan);
  load_table<Law>(room);
  const std::int64_t piece = piece_of_thread();
  if (piece >= plan.pieces) return;
  const UpdateTask& task = tasks[task_of(tasks, plan.tasks, &UpdateTask::first_piece, piece)];
  const TileLane seat(task.first_position, piece - task.first_piece);
  const std::uint32_t steps =
      plan.step_counter == nullptr ? 0u : static_cast<std::uint32_t>(plan.step_counter->step);
  Draws draws = plan.draws;
  draws.stream.n1 += steps;
  draw_lane<Law>(draws, seat, room);
  Stream rounding = plan.rounding;
  rounding.n1 += steps;
  room.fill(rounding, seat);
  int bad = 0;
  with_rule<T>(room.rule, TileUpdate<T, Sum>{task, seat, room, bad});
  if (bad != 0) add_atomically(nonfinite, std::int64_t{bad});
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
    const FlatNoise<kDraws> noise{plan.draws.values + task.draws_at,
                                  bits_made(plan.draws) + task.draws_at};
    if (task.aligned16 != 0 && begin + kUpdatePiece <= task.size) {
      DPK_NO_UNROLL
      for (int k = 0; k < kFlatEach; k += V) {
        const std::int64_t i = begin + k * kFlatThreads + V * thread;
        update_group<V, false>(of, noise, k, i, rule, bad);
      }
    } else {
      DPK_NO_UNROLL
      for (int k = 0; k < kFlatEach; ++k) {
        const std::int64_t i = begin + k * kFlatThreads + thread;
        if (i < task.size) update_group<1, false>(of, noise, k, i, rule, bad);
      }
    }
  }
};

template <class T, class Sum, bool kDraws>
__global__ void __launch_bounds__(kFlatThreads, 3)
    update_flat_kernel(UpdatePlan plan, const UpdateTask* tasks, std::int64_t* nonfinite) {
  __shared__ RuleNow numbers;
  if (!is_due(plan)) return;
  if (threadIdx.x == 0) numbers.read(plan);
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
