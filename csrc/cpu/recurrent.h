#pragma once
// What recurrent kernels have in common: weights packed once per pass, products of a few rows with
// them, and how samples are shared among threads.
//
// A thread takes its own samples through all time steps, so there is no barrier. Each entry of a
// product is one chain of multiply-adds in the order of the inner dimension: its bits depend on its
// own row alone.

#include <algorithm>
#include <cstdint>

#include "cpu/ghost_tiles.h"
#include "cpu/parallel.h"

namespace dpkern::cpu::recurrent {

using ghost::load;
using ghost::round_up;
using ghost::scratch;

constexpr std::int64_t kMostRows = 48;       // samples that a thread takes together
constexpr std::int64_t kSmallest = 1 << 18;  // multiplications worth a thread
constexpr std::int64_t kLine = 16;           // numbers: rows of scratch start in different lines

// Scratch buffers; weights are packed by the caller's thread, and read by all.
enum Buffer { kPanels = 6, kStates = 7, kSums = 8, kCells = 9, kBiases = 10 };

// A vector of which only the first `used` lanes are in memory.
template <class V, int kLanes, class F>
DPK_INLINE inline V load_part(const F* from, std::int64_t used) {
  if (used >= kLanes) return load<V>(from);
  F part[kLanes] = {};
  std::copy(from, from + used, part);
  return load<V>(part);
}
template <int kLanes, class V, class F>
DPK_INLINE inline void store_part(F* to, V value, std::int64_t used) {
  if (used >= kLanes) {
    __builtin_memcpy(to, &value, sizeof(V));
  } else {
    F part[kLanes];
    __builtin_memcpy(part, &value, sizeof(V));
    std::copy(part, part + used, to);
  }
}

// Length of scratch rows of so many numbers: an odd number of cache lines, so that the rows of a
// strip fall into different sets of the cache, and vectors may be written past the end.
template <int kColumns>
std::int64_t padded_row(std::int64_t numbers) {
  const std::int64_t lines = (numbers + kColumns + kLine - 1) / kLine;
  return (lines + (lines + 1) % 2) * kLine;
}

// Products of rows in memory, [rows, steps], with a packed panel [steps, kColumns].
template <class F, int kBytes>
struct Strips {
  static constexpr int kLanes = kBytes / static_cast<int>(sizeof(F));
  static constexpr int kVectors = 2;
  static constexpr int kColumns = kVectors * kLanes;
  static constexpr int kTall = kBytes == 64 ? 12 : 6;  // rows that fill the registers
  static constexpr int kShort = kTall * 2 / 3;         // the fewest that hide the latency
  using V = Vector<F, kLanes>;

  // So many rows are computed for `used` ones: tall strips and at most two short ones.
  static constexpr std::int64_t rows_for(std::int64_t used) {
    return std::max<std::int64_t>(kShort, round_up(used, kShort / 2));
  }

  // out [rows, kColumns] (or += if kAdd) in rows of `out_row` numbers; `rows` as rows_for gives it.
  template <bool kAdd>
  static DPK_INLINE void multiply(const F* left, std::int64_t row, std::int64_t rows,
                                  const F* panel, std::int64_t steps, F* out,
                                  std::int64_t out_row) {
    std::int64_t first = 0;
    for (std::int64_t rest = rows; rest > 0; rest = rows - first) {
      if (rest % kTall == 0 || rest >= kTall + 2 * kShort) {
        strip<kTall, kAdd>(left + first * row, row, panel, steps, out + first * out_row, out_row);
        first += kTall;
      } else {
        strip<kShort, kAdd>(left + first * row, row, panel, steps, out + first * out_row, out_row);
        first += kShort;
      }
    }
  }

 private:
  template <int kRows, bool kAdd>
  static DPK_INLINE void strip(const F* left, std::int64_t row, const F* panel, std::int64_t steps,
                               F* out, std::int64_t out_row) {
    V acc[kRows][kVectors];
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 16
      for (int n = 0; n < kVectors; ++n) acc[m][n] = V{};
    }
    const F* rows[kRows];
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) rows[m] = left + m * row;
    for (std::int64_t t = 0; t < steps; ++t) {
      V x[kVectors];
#pragma GCC unroll 16
      for (int n = 0; n < kVectors; ++n) x[n] = load<V>(panel + t * kColumns + n * kLanes);
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) {
        const F s = rows[m][t];
#pragma GCC unroll 16
        for (int n = 0; n < kVectors; ++n) acc[m][n] += s * x[n];
      }
    }
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 16
      for (int n = 0; n < kVectors; ++n) {
        F* const to = out + m * out_row + n * kLanes;
        const V sum = kAdd ? load<V>(to) + acc[m][n] : acc[m][n];
        __builtin_memcpy(to, &sum, sizeof(V));
      }
    }
  }
};

// Step `s` of a pass stands at this time.
inline std::int64_t time_of(std::int64_t s, std::int64_t steps, bool reverse) {
  return reverse ? steps - 1 - s : s;
}

// body(samples) for ranges of at most kMostRows samples, one thread each; `work`: multiplications.
template <class Body>
void for_samples(std::int64_t batch, std::int64_t work, int threads, const Body& body) {
  const int team = useful_threads(work, kSmallest, threads);
  const std::int64_t most = (batch + kMostRows - 1) / kMostRows;
  const std::int64_t parts = std::min(batch, round_up(most, team));
  parallel_for(parts, 1, team, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t part = begin; part < end; ++part) {
      body(part_of(batch, static_cast<int>(part), static_cast<int>(parts)));
    }
  });
}

}  // namespace dpkern::cpu::recurrent
