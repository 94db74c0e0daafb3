#pragma once
// Work shared among OpenMP threads; without OpenMP everything runs on the caller's.

#include <algorithm>
#include <atomic>
#include <cstdint>

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace dpkern::cpu {

inline int thread_index() {
#if defined(_OPENMP)
  return omp_get_thread_num();
#else
  return 0;
#endif
}

inline int team_size() {
#if defined(_OPENMP)
  return omp_get_num_threads();
#else
  return 1;
#endif
}

struct Range {
  std::int64_t begin;
  std::int64_t end;
};

// Part `index` of `parts` nearly equal contiguous parts of [0, n).
inline Range part_of(std::int64_t n, int index, int parts) {
  return {n * index / parts, n * (index + 1) / parts};
}

// As many threads as asked for, but none with less than `grain` items.
inline int useful_threads(std::int64_t items, std::int64_t grain, int threads) {
  const std::int64_t most = std::max<std::int64_t>(1, items / std::max<std::int64_t>(1, grain));
  return static_cast<int>(std::min<std::int64_t>(most, std::max(1, threads)));
}

// body(begin, end) over pieces of [0, n), multiples of `grain`, taken by whichever thread is free:
// a thread that wakes up late does less. The result must not depend on the pieces.
template <class F>
void parallel_for(std::int64_t n, std::int64_t grain, int threads, const F& body) {
  constexpr std::int64_t kPieces = 8;  // per thread
  const int team = useful_threads(n, grain, threads);
  if (team <= 1) {
    if (n > 0) body(std::int64_t{0}, n);
    return;
  }
  const std::int64_t piece = grain * std::max<std::int64_t>(1, n / (grain * team * kPieces));
  std::atomic<std::int64_t> next{0};
#if defined(_OPENMP)
#pragma omp parallel num_threads(team)
#endif
  for (std::int64_t begin = next.fetch_add(piece); begin < n; begin = next.fetch_add(piece)) {
    body(begin, std::min(begin + piece, n));
  }
}

}  // namespace dpkern::cpu
