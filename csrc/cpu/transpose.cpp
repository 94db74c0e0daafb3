// Transposes squares of vectors in registers, so that both sides are read and written in lines.

#include "cpu/transpose.h"

#include <algorithm>
#include <utility>

#include "cpu/isa.h"
#include "cpu/parallel.h"

namespace dpkern::cpu {
namespace {

constexpr std::int64_t kChunk = 64;        // rows whose lines stay in the first-level cache
constexpr std::int64_t kGrain = 16 << 10;  // numbers worth a thread

// Exchange the off-diagonal squares of kStep lanes in rows a and b, which are kStep apart.
template <int kStep, class V, int... l>
DPK_INLINE inline void exchange(V& a, V& b, std::integer_sequence<int, l...>) {
  constexpr int kLanes = sizeof...(l);
  const V upper = __builtin_shufflevector(a, b, ((l & kStep) != 0 ? kLanes + l - kStep : l)...);
  b = __builtin_shufflevector(a, b, ((l & kStep) != 0 ? kLanes + l : l + kStep)...);
  a = upper;
}

template <int kLanes, int kStep = 1, class V>
DPK_INLINE inline void transpose_square(V* x) {
  if constexpr (kStep < kLanes) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      if ((i & kStep) != 0) continue;
      exchange<kStep>(x[i], x[i + kStep], std::make_integer_sequence<int, kLanes>{});
    }
    transpose_square<kLanes, 2 * kStep>(x);
  }
}

template <class F, int kBytes>
DPK_INLINE inline void transpose(const F* from, std::int64_t rows, std::int64_t columns, F* to) {
  constexpr int kLanes = kBytes / static_cast<int>(sizeof(F));
  using V = Vector<F, kLanes>;
  const std::int64_t whole_rows = rows / kLanes * kLanes, whole_columns = columns / kLanes * kLanes;
  for (std::int64_t chunk = 0; chunk < whole_rows; chunk += kChunk) {
    const std::int64_t end = std::min(whole_rows, chunk + kChunk);
    for (std::int64_t c = 0; c < whole_columns; c += kLanes) {
      for (std::int64_t r = chunk; r < end; r += kLanes) {
        V x[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
          __builtin_memcpy(&x[i], from + (r + i) * columns + c, sizeof(V));
        }
        transpose_square<kLanes>(x);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
          __builtin_memcpy(to + (c + i) * rows + r, &x[i], sizeof(V));
        }
      }
    }
  }
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::int64_t first = r < whole_rows ? whole_columns : 0;
    for (std::int64_t c = first; c < columns; ++c) to[c * rows + r] = from[r * columns + c];
  }
}

}  // namespace

template <class F>
void transpose_each(const F* from, std::int64_t count, std::int64_t rows, std::int64_t columns,
                    F* to, int threads) {
  const std::int64_t size = rows * columns;
  if (size == 0) return;
  const std::int64_t grain = std::max<std::int64_t>(1, kGrain / size);
  parallel_for(count, grain, threads, [&](std::int64_t begin, std::int64_t end) {
    versioned_by_width([&](auto width) DPK_INLINE {
      for (std::int64_t i = begin; i < end; ++i) {
        transpose<F, decltype(width)::value>(from + i * size, rows, columns, to + i * size);
      }
    });
  });
}

template void transpose_each<float>(const float*, std::int64_t, std::int64_t, std::int64_t, float*,
                                    int);
template void transpose_each<double>(const double*, std::int64_t, std::int64_t, std::int64_t,
                                     double*, int);

}  // namespace dpkern::cpu
