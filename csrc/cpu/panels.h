#pragma once
// Memory of kernels that pack their operands into panels, and how it is read.

#include <cstdint>
#include <memory>
#include <new>
#include <type_traits>

#include "cpu/isa.h"

namespace dpkern::cpu::ghost {

// Scratch of one thread, kept for its next call because page faults are slow.
template <class F>
class Buffer {
 public:
  F* reserve(std::int64_t count) {
    if (count > size_) {
      const auto bytes = static_cast<std::size_t>(count) * sizeof(F);
      data_.reset(static_cast<F*>(::operator new(bytes, kAlignment)));
      size_ = count;
    }
    return data_.get();
  }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(F* data) const { ::operator delete(data, kAlignment); }
  };
  std::unique_ptr<F, Free> data_;
  std::int64_t size_ = 0;
};

// The tag keeps apart buffers that one thread needs at the same time.
template <class F, int kTag>
F* scratch(std::int64_t count) {
  static thread_local Buffer<F> buffer;
  return buffer.reserve(count);
}

inline std::int64_t round_up(std::int64_t n, std::int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

template <class V, class F>
DPK_INLINE inline V load(const F* from) {
  V value;
  __builtin_memcpy(&value, from, sizeof(V));
  return value;
}

// sum of squares in double, in 32 sums whatever the width of a vector. Those of floats are exact,
// so that fusing them with sums changes nothing.
template <class S>
DPK_INLINE inline double square_of(const S* row, std::int64_t n) {
  constexpr int kLanes = 4, kChains = 8;
  using D = Vector<double, kLanes>;
  D sums[kChains] = {};
  const auto add = [&](std::int64_t at, D& sum) DPK_INLINE {
    const D x = __builtin_convertvector((load<Vector<S, kLanes>>(row + at)), D);
    sum += x * x;
  };
  std::int64_t i = 0;
  for (; i + kLanes * kChains <= n; i += kLanes * kChains) {
#pragma GCC unroll 8
    for (int k = 0; k < kChains; ++k) add(i + k * kLanes, sums[k]);
  }
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) add(i, sums[0]), add(i + kLanes, sums[1]);
  if (i + kLanes <= n) add(i, sums[2]), i += kLanes;
  const D sum =
      ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
  double total = (sum[0] + sum[1]) + (sum[2] + sum[3]);
  for (; i < n; ++i) total += static_cast<double>(row[i]) * static_cast<double>(row[i]);
  return total;
}

// A number for every row, or one for all of them.
template <class F>
struct Scales {
  const F* first;
  std::int64_t step;  // 1, or 0

  DPK_INLINE F operator()(std::int64_t row) const { return first[row * step]; }
};

// Entries of a panel of `rows` rows and one line more: panels of a power of two begin in different
// sets of the cache.
template <int kWidth, class F>
constexpr std::int64_t panel_size(std::int64_t rows) {
  return kWidth * rows + 64 / static_cast<std::int64_t>(sizeof(F));
}

// Asks for the rows that a tile of sums is about to be added to, while it is multiplied.
template <int kWidth, class F>
DPK_INLINE inline void prefetch_rows(F* to, std::int64_t rows, std::int64_t stride) {
  constexpr int kLine = 64 / static_cast<int>(sizeof(F));
  for (std::int64_t m = 0; m < rows; ++m) {
    for (int c = 0; c < kWidth; c += kLine) __builtin_prefetch(to + m * stride + c, 1);
  }
}

// `wide` numbers from `to` on += a row of a tile.
template <int kVectors, class V, class F>
DPK_INLINE inline void add_row(const V (&row)[kVectors], std::int64_t wide, F* to) {
  constexpr int kLanes = sizeof(V) / sizeof(F);
  if (wide == kVectors * kLanes) {
#pragma GCC unroll 16
    for (int n = 0; n < kVectors; ++n) {
      const V sum = load<V>(to + n * kLanes) + row[n];
      __builtin_memcpy(to + n * kLanes, &sum, sizeof(V));
    }
    return;
  }
  F sums[kVectors * kLanes];
  __builtin_memcpy(sums, row, sizeof(row));
  for (std::int64_t c = 0; c < wide; ++c) to[c] += sums[c];
}

}  // namespace dpkern::cpu::ghost
