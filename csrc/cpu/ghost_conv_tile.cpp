#include "cpu/ghost_conv_tile.h"

#include <array>
#include <utility>

namespace dpkern::cpu {
namespace {

constexpr TileLimits kNarrow{16, {0, 8, 4, 4}, 4, 2};
constexpr TileLimits kMiddle{32, {0, 8, 6, 4}, 4, 2};
constexpr TileLimits kWide{64, {0, 8, 8, 8}, 9, 5};

template <class T, int kLanes, int kVectors, int kRows, int kRun>
DPK_INLINE inline void walk_tile(const TileWalk<T>& walk) {
  using V = Vector<T, kLanes>;
  constexpr int kScalars = kRows * kRun;
  constexpr int kSums = kVectors * kScalars;
  V sums[kSums];
#pragma GCC unroll 32
  for (int i = 0; i < kSums; ++i) sums[i] = V{};
  const T* vectors[kVectors];
  const T* scalars[kRows];
#pragma GCC unroll 32
  for (int v = 0; v < kVectors; ++v) vectors[v] = walk.vectors[v];
#pragma GCC unroll 32
  for (int r = 0; r < kRows; ++r) scalars[r] = walk.scalars[r];
  if (walk.gradient != nullptr) {  // to have the lines here when the sums are ready
#pragma GCC unroll 32
    for (int v = 0; v < kVectors; ++v) {
      const T* const to = walk.gradient + walk.vector_target[v];
#pragma GCC unroll 32
      for (int s = 0; s < kScalars; ++s) __builtin_prefetch(to + walk.scalar_target[s], 1);
    }
  }
  const std::int64_t columns = walk.columns;
  const std::int64_t vector_step = walk.vector_step;
  const std::int64_t scalar_step = walk.scalar_step;
  for (std::int64_t image = 0; image < walk.images; ++image) {
    for (std::int64_t y = 0; y < walk.rows; ++y) {
      std::int64_t at_vector = image * walk.vector_image + y * walk.vector_row;
      std::int64_t at_scalar = image * walk.scalar_image + y * walk.scalar_row;
      for (std::int64_t x = columns; x > 0; --x) {
        V vector[kVectors];
#pragma GCC unroll 32
        for (int v = 0; v < kVectors; ++v) {
          __builtin_memcpy(&vector[v], vectors[v] + at_vector, sizeof(V));
        }
#pragma GCC unroll 32
        for (int s = 0; s < kScalars; ++s) {
          const T scalar = scalars[s / kRun][at_scalar + s % kRun];
#pragma GCC unroll 32
          for (int v = 0; v < kVectors; ++v) sums[v * kScalars + s] += vector[v] * scalar;
        }
        at_vector += vector_step;
        at_scalar += scalar_step;
      }
    }
  }
  if (walk.integers != nullptr) {
    using I = Vector<std::int32_t, kLanes>;
#pragma GCC unroll 32
    for (int i = 0; i < kSums; ++i) {
      I total;
      __builtin_memcpy(&total, walk.integers + i * kLanes, sizeof(I));
      total += __builtin_convertvector(walk.factor * sums[i], I);
      __builtin_memcpy(walk.integers + i * kLanes, &total, sizeof(I));
    }
    return;
  }
  V squares;
  __builtin_memcpy(&squares, walk.squares, sizeof(V));
  if (!walk.fresh) {
#pragma GCC unroll 32
    for (int i = 0; i < kSums; ++i) {
      V before;
      __builtin_memcpy(&before, walk.sums + i * kLanes, sizeof(V));
      sums[i] += before;
    }
  }
  if (walk.gradient != nullptr) {
#pragma GCC unroll 32
    for (int v = 0; v < kVectors; ++v) {
      T* const to = walk.gradient + walk.vector_target[v];
#pragma GCC unroll 32
      for (int s = 0; s < kScalars; ++s) {
        __builtin_memcpy(to + walk.scalar_target[s], &sums[v * kScalars + s], sizeof(V));
      }
    }
  } else {
#pragma GCC unroll 32
    for (int i = 0; i < kSums; ++i) {
      __builtin_memcpy(walk.sums + i * kLanes, &sums[i], sizeof(V));
    }
  }
#pragma GCC unroll 32
  for (int i = 0; i < kSums; ++i) squares += sums[i] * sums[i];
  __builtin_memcpy(walk.squares, &squares, sizeof(V));
}

template <Isa kIsa, class T, int kVectors, int kRows, int kRun>
void tile(const TileWalk<T>& walk) {
#if DPK_X86
  if constexpr (kIsa == Isa::kAvx512) {
    constexpr int kLanes = kWide.bytes / static_cast<int>(sizeof(T));
    return call_avx512([&]() DPK_INLINE { walk_tile<T, kLanes, kVectors, kRows, kRun>(walk); });
  }
  if constexpr (kIsa == Isa::kAvx2) {
    constexpr int kLanes = kMiddle.bytes / static_cast<int>(sizeof(T));
    return call_avx2([&]() DPK_INLINE { walk_tile<T, kLanes, kVectors, kRows, kRun>(walk); });
  }
#endif
  constexpr int kLanes = kNarrow.bytes / static_cast<int>(sizeof(T));
  walk_tile<T, kLanes, kVectors, kRows, kRun>(walk);
}

constexpr TileLimits limits_of(Isa isa) {
  return isa >= Isa::kAvx512 ? kWide : isa == Isa::kAvx2 ? kMiddle : kNarrow;
}

// The kernels for 1, 2, ... rows of scalars.
template <Isa kIsa, class T, int kVectors, int kRun, int... kRow>
TileKernel<T> pick(int rows, std::integer_sequence<int, kRow...>) {
  static constexpr std::array<TileKernel<T>, sizeof...(kRow)> kKernels{
      &tile<kIsa, T, kVectors, kRow + 1, kRun>...};
  return kKernels[static_cast<std::size_t>(rows - 1)];
}

template <Isa kIsa, class T>
TileKernel<T> kernel_of(int vectors, int rows, int run) {
  constexpr TileLimits kMost = limits_of(kIsa);
  if (run == 5)
    return pick<kIsa, T, 1, 5>(rows, std::make_integer_sequence<int, kMost.rows_of_5>());
  if (run == 3)
    return pick<kIsa, T, 1, 3>(rows, std::make_integer_sequence<int, kMost.rows_of_3>());
  switch (vectors) {
    case 3:
      return pick<kIsa, T, 3, 1>(rows, std::make_integer_sequence<int, kMost.scalar_rows[3]>());
    case 2:
      return pick<kIsa, T, 2, 1>(rows, std::make_integer_sequence<int, kMost.scalar_rows[2]>());
    default:
      return pick<kIsa, T, 1, 1>(rows, std::make_integer_sequence<int, kMost.scalar_rows[1]>());
  }
}

}  // namespace

TileLimits tile_limits(Isa isa) { return limits_of(isa); }

template <class T>
TileKernel<T> tile_kernel(Isa isa, int vectors, int scalar_rows, int run) {
#if DPK_X86
  if (isa >= Isa::kAvx512) return kernel_of<Isa::kAvx512, T>(vectors, scalar_rows, run);
  if (isa == Isa::kAvx2) return kernel_of<Isa::kAvx2, T>(vectors, scalar_rows, run);
#endif
  return kernel_of<Isa::kBaseline, T>(vectors, scalar_rows, run);
}

template TileKernel<float> tile_kernel<float>(Isa, int, int, int);
template TileKernel<double> tile_kernel<double>(Isa, int, int, int);

}  // namespace dpkern::cpu
