// The update of a list with sums that are noised in other coordinates (docs/spectral.md), in one
// launch with all others. A block has one task. Of a mapped one it makes the noise of all its
// tiles, and has the channel pairs whose first coordinate lies in the first `own` of them, so that
// the last tile of most blocks is made twice. Products with the small matrices are in double, and
// their terms are added in the CPU's order: the bits are the same.

#include "cuda/update.cuh"

namespace dpkern::cuda {

// Whether coordinates with their noise need more than 32 bits.
template <class T, class Sum>
constexpr bool kWide = sizeof(T) == 8 || sizeof(Sum) == 8;

// Where a coordinate of the block's tiles has its draw.
struct TilePlace {
  int k, thread;
  __device__ __forceinline__ explicit TilePlace(int at)
      : k(at % kTile / kLanes), thread(at / kTile * kLanes + at % kLanes) {}
};

// A coordinate with its noise takes the place of its draw; of a double, the lower half.
template <bool kRounded, bool kDouble>
struct MappedRoom : UpdateRoom<kRounded> {
  __device__ __forceinline__ void keep(const TilePlace& at, double x) {
    this->draws[at.k][at.thread] =
        static_cast<std::int32_t>(__float_as_uint(static_cast<float>(x)));
  }
  __device__ __forceinline__ double coordinate(const TilePlace& at) const {
    return __uint_as_float(static_cast<std::uint32_t>(this->draws[at.k][at.thread]));
  }
};
template <bool kRounded>
struct MappedRoom<kRounded, true> : UpdateRoom<kRounded> {
  std::int32_t high[kPerThread][kTileThreads];
  __device__ __forceinline__ void keep(const TilePlace& at, double x) {
    this->draws[at.k][at.thread] = __double2loint(x);
    high[at.k][at.thread] = __double2hiint(x);
  }
  __device__ __forceinline__ double coordinate(const TilePlace& at) const {
    return __hiloint2double(high[at.k][at.thread], this->draws[at.k][at.thread]);
  }
};

// The channel pairs of a block.
struct BlockPairs {
  std::int64_t first;  // of all
  int count;
  int at;  // where the first one's coordinates begin in the block's tiles

  __device__ __forceinline__ BlockPairs(const UpdateTask& task, const UpdateMap& map,
                                        std::int64_t block) {
    const std::int64_t before = static_cast<std::int64_t>(task.first_position % kTile);
    const std::int64_t begin = block * map.own * kTile - before;
    const std::int64_t end = begin + map.own * kTile;
    first = begin > 0 ? (begin + map.rank - 1) / map.rank : 0;
    const std::int64_t behind = (end + map.rank - 1) / map.rank;
    const std::int64_t last = behind < map.pairs ? behind : map.pairs;
    count = first < last ? static_cast<int>(last - first) : 0;
    at = static_cast<int>(first * map.rank - begin);
  }
};

// The block's coordinates with their noise, each thread some of them.
template <class T, class Sum, class Room>
__device__ __forceinline__ void noise_coordinates(const UpdateTask& task, const UpdateMap& map,
                                                  const BlockPairs& mine, Room& room, int& bad) {
  const Sum* const sum = static_cast<const Sum*>(task.sum);
  const int rank = map.rank, taps = map.taps, count = mine.count * rank;
  DPK_NO_UNROLL
  for (int c = static_cast<int>(threadIdx.x); c < count; c += kTileThreads) {
    const int pair = c / rank, row = c - pair * rank;
    const TilePlace at(mine.at + c);
    const std::int32_t x = room.draws[at.k][at.thread];
    const std::int64_t whole = mine.first + pair;
    if constexpr (kRounds<T, Sum>) {
      T value;
      if (map.signal == nullptr) {
        value = sum[whole * rank + row];
      } else {
        double total = 0;
        DPK_NO_UNROLL
        for (int t = 0; t < taps; ++t) {
          total += static_cast<double>(sum[whole * taps + t]) * map.signal[t * rank + row];
        }
        value = static_cast<T>(total);
      }
      const std::uint32_t bits = rounding_bits(room.rounded.words[at.k >> 1][at.thread], at.k);
      const T units = finite_units(value, static_cast<T>(task.per_unit), bad);
      room.keep(at, release_float(units, bits, x) * static_cast<T>(map.cell));
    } else {
      room.keep(at, static_cast<double>(release_integer(sum[whole * rank + row], x)));
    }
  }
}

// The gradients of the block's pairs, and the rule.
template <class T, class Sum, class Room>
struct MappedUpdate {
  const UpdateTask& task;
  const UpdateMap& map;
  const BlockPairs& mine;
  const Room& room;

  template <class Rule>
  __device__ __forceinline__ void operator()(const Rule& rule) const {
    const Arrays<T, Sum> of(task);
    const int rank = map.rank, taps = map.taps, count = mine.count * taps;
    const std::int64_t first = mine.first * taps;
    DPK_NO_UNROLL
    for (int e = static_cast<int>(threadIdx.x); e < count; e += kTileThreads) {
      const int pair = e / taps, tap = e - pair * taps, at = mine.at + pair * rank;
      double total = 0;
      DPK_NO_UNROLL
      for (int r = 0; r < rank; ++r) {
        total += room.coordinate(TilePlace(at + r)) * map.back[r * taps + tap];
      }
      const std::int64_t i = first + e;
      T param = of.param[i], state1{}, state2{};
      if constexpr (Rule::kStates > 0) state1 = of.state1[i];
      if constexpr (Rule::kStates > 1) state2 = of.state2[i];
      apply(rule, static_cast<T>(total * map.factor), param, state1, state2);
      of.param[i] = param;
      if constexpr (Rule::kStates > 0) of.state1[i] = state1;
      if constexpr (Rule::kStates > 1) of.state2[i] = state2;
    }
  }
};

// Pieces are tiles, whole blocks of them for every task.
template <class T, class Sum, class Law>
__global__ void __launch_bounds__(kTileThreads, kUpdateBlocks<T>)
    update_mapped_kernel(UpdatePlan plan, const UpdateTask* tasks, const UpdateMap* maps,
                         std::int64_t* nonfinite) {
  typedef MappedRoom<kRounds<T, Sum>, kWide<T, Sum>> Room;
  __shared__ Room room;
  if (!is_due(plan)) return;
  if (threadIdx.x == 0) room.rule.read(plan);
  load_table<Law>(room);
  const std::int64_t piece = blockIdx.x * static_cast<std::int64_t>(kTilesPerBlock);
  const std::int64_t number = task_of(tasks, plan.tasks, &UpdateTask::first_piece, piece);
  const UpdateTask& task = tasks[number];
  const UpdateMap& map = maps[number];
  const std::int64_t block = (piece - task.first_piece) / kTilesPerBlock;
  const std::int64_t own = map.rank == 0 ? kTilesPerBlock : map.own;
  const TileLane seat(task.first_position, block * own + static_cast<int>(threadIdx.x) / kLanes);
  const std::uint32_t steps =
      plan.step_counter == nullptr ? 0u : static_cast<std::uint32_t>(plan.step_counter->step);
  Draws draws = plan.draws;
  draws.stream.n1 += steps;
  draw_lane<Law>(draws, seat, room);
  if constexpr (kRounds<T, Sum>) {
    Stream rounding = plan.rounding;
    rounding.n1 += steps;
    fill_bits<Law>(draws, rounding, seat, room.rounded);
  }
  int bad = 0;
  if (map.rank == 0) {
    with_rule<T>(room.rule, TileUpdate<T, Sum>{task, seat, room, bad});
  } else {
    const BlockPairs mine(task, map, block);
    __syncthreads();
    noise_coordinates<T, Sum>(task, map, mine, room, bad);
    __syncthreads();
    with_rule<T>(room.rule, MappedUpdate<T, Sum, Room>{task, map, mine, room});
  }
  if (bad != 0) add_atomically(nonfinite, std::int64_t{bad});
}

}  // namespace dpkern::cuda
