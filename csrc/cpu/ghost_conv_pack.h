#pragma once
// Copies of one sample in the order in which the convolution kernels read it.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "cpu/isa.h"

namespace dpkern::cpu {

// A zero-padded plane: position (y, x) of [rows, columns] goes to start + y pitch + x.
struct Plane {
  std::int64_t rows;
  std::int64_t columns;
  std::int64_t start;
  std::int64_t pitch;
};

// Zeros of this thread's own, kept for its next call unless they are many.
template <class T, int kSlot>
T* conv_scratch(std::int64_t count, std::unique_ptr<T[]>& large) {
  constexpr std::int64_t kKept = (4 << 20) / sizeof(T);
  constexpr std::int64_t kAlign = 64 / sizeof(T);
  const auto size = static_cast<std::size_t>(count + kAlign);
  T* data = nullptr;
  if (count > kKept) {
    large.reset(new T[size]());
    data = large.get();
  } else {
    static thread_local std::vector<T> kept;
    kept.assign(size, T{0});
    data = kept.data();
  }
  const auto past = reinterpret_cast<std::uintptr_t>(data) % 64;
  return past == 0 ? data : data + (64 - past) / sizeof(T);
}

template <class V, std::size_t... kLane>
DPK_INLINE inline void interleave(const V& a, const V& b, V& low, V& high,
                                  std::index_sequence<kLane...>) {
  constexpr int n = static_cast<int>(sizeof...(kLane));
  low = __builtin_shufflevector(a, b, (static_cast<int>(kLane) / 2 + (kLane % 2 ? n : 0))...);
  high =
      __builtin_shufflevector(a, b, (static_cast<int>(kLane) / 2 + n / 2 + (kLane % 2 ? n : 0))...);
}

// rows[i][j] -> rows[j][i]: every round of interleaving rotates the bits of (row, lane) by one.
template <class T, int kLanes>
DPK_INLINE inline void transpose(Vector<T, kLanes>* rows) {
  using V = Vector<T, kLanes>;
#pragma GCC unroll 8
  for (int round = 1; round < kLanes; round *= 2) {
    V next[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes / 2; ++i) {
      interleave(rows[i], rows[i + kLanes / 2], next[2 * i], next[2 * i + 1],
                 std::make_index_sequence<kLanes>());
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) rows[i] = next[i];
  }
}

// out[place(position) pitch + channel] = scale x[channel, position], for `used` <= kLanes channels.
template <class In, class T, int kLanes>
DPK_INLINE inline void turn_channels(const In* x, int used, T scale, const Plane& plane, T* out,
                                     std::int64_t pitch) {
  const std::int64_t count = plane.rows * plane.columns;
  const std::int64_t columns = plane.columns;
  const std::int64_t skip = (plane.pitch - columns) * pitch;
  T* to = out + plane.start * pitch;
  std::int64_t column = 0;
  std::int64_t at = 0;
  for (; at + kLanes <= count; at += kLanes) {
    Vector<T, kLanes> rows[kLanes];
#pragma GCC unroll 16
    for (int c = 0; c < kLanes; ++c) {
      if (c < used) {
        Vector<In, kLanes> row;
        __builtin_memcpy(&row, x + c * count + at, sizeof(row));
        rows[c] = __builtin_convertvector(row, Vector<T, kLanes>) * scale;
      } else {
        rows[c] = Vector<T, kLanes>{};
      }
    }
    transpose<T, kLanes>(rows);
#pragma GCC unroll 16
    for (int p = 0; p < kLanes; ++p) {
      __builtin_memcpy(to, &rows[p], sizeof(rows[p]));
      to += pitch;
      if (++column == columns) column = 0, to += skip;
    }
  }
  for (; at < count; ++at) {
    for (int c = 0; c < used; ++c) to[c] = scale * static_cast<T>(x[c * count + at]);
    to += pitch;
    if (++column == columns) column = 0, to += skip;
  }
}

// out[place(position)][channel] = scale x[channel][position], `pitch` entries per position;
// untouched entries must be zero.
template <class In, class T>
void channels_last(const In* x, std::int64_t channels, T scale, const Plane& plane, T* out,
                   std::int64_t pitch) {
  const std::int64_t count = plane.rows * plane.columns;
  const auto all = [&](auto lanes, auto turn) DPK_INLINE {
    for (std::int64_t c = 0; c < channels; c += lanes) {
      turn(x + c * count, static_cast<int>(std::min<std::int64_t>(lanes, channels - c)), out + c);
    }
  };
#if DPK_X86
  if (isa() >= Isa::kAvx512) {
    constexpr int kLanes = 64 / sizeof(T);
    return all(kLanes, [&](const In* from, int used, T* to) {
      call_avx512(
          [&]() DPK_INLINE { turn_channels<In, T, kLanes>(from, used, scale, plane, to, pitch); });
    });
  }
  if (isa() == Isa::kAvx2) {
    constexpr int kLanes = 32 / sizeof(T);
    return all(kLanes, [&](const In* from, int used, T* to) {
      call_avx2(
          [&]() DPK_INLINE { turn_channels<In, T, kLanes>(from, used, scale, plane, to, pitch); });
    });
  }
#endif
  constexpr int kLanes = 16 / sizeof(T);
  all(kLanes, [&](const In* from, int used, T* to) {
    turn_channels<In, T, kLanes>(from, used, scale, plane, to, pitch);
  });
}

// out[channel][place(position)], `size` entries per channel.
template <class In, class T>
void planes(const In* x, std::int64_t channels, const Plane& plane, T* out, std::int64_t size) {
  versioned([&]() DPK_INLINE {
    const std::int64_t columns = plane.columns;
    const In* from = x;
    for (std::int64_t c = 0; c < channels; ++c) {
      T* to = out + c * size + plane.start;
      for (std::int64_t y = 0; y < plane.rows; ++y, from += columns, to += plane.pitch) {
        for (std::int64_t i = 0; i < columns; ++i) to[i] = static_cast<T>(from[i]);
      }
    }
  });
}

}  // namespace dpkern::cpu
