#include "cpu/exact_operands.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/linear_parts.h"
#include "cpu/operand_rounding.h"
#include "cpu/pair_tile.h"
#include "cpu/panels.h"
#include "cpu/parallel.h"

namespace dpkern::cpu {
namespace {

using namespace ghost;

constexpr std::int64_t kSmallest = 1 << 20;  // multiplications worth a thread
constexpr std::int64_t kPositions = 512;     // of whole samples that are summed together
constexpr int kStep = 8;                     // numbers that are rounded at a time
constexpr std::int64_t kPiece = 4;           // rows and pairs that are turned at a time
constexpr std::int64_t kChunk = 128;         // pairs of a panel that stay in the first cache

template <class F>
using Some = Vector<F, kStep>;
using Whole = Some<std::int32_t>;

// The integers nearest to scale x, of `count` numbers at x; zeros beyond.
template <class F>
DPK_INLINE inline Whole whole_of(const F* x, std::int64_t count, F scale) {
  Some<F> numbers{};
  if (count >= kStep) {
    numbers = load<Some<F>>(x);
  } else {
    for (std::int64_t i = 0; i < count; ++i) numbers[i] = x[i];
  }
  constexpr F kOrigin = exact::kOrigin<F>;
  return __builtin_convertvector((scale * numbers + kOrigin) - kOrigin, Whole);
}

// Two rows -> their integers side by side, as one row of each panel of kWidth pairs. Panels are
// written in whole steps, unless this is the last row of a sample.
template <int kWidth, class F>
DPK_INLINE inline void round_pair(const F* low, const F* high, F low_scale, F high_scale,
                                  std::int64_t count, std::int64_t panel, bool last,
                                  std::int32_t* to) {
  constexpr int kWritten = (kWidth + kStep - 1) / kStep * kStep;
  const auto round = [&](std::int64_t c, std::int64_t left, std::int32_t* row) DPK_INLINE {
#pragma GCC unroll 4
    for (int i = 0; i < kWritten; i += kStep) {
      // What lies beyond the panel belongs to the next one, and is overwritten.
      const Whole x = whole_of(low + c + i, left - i, low_scale);
      const Whole y = whole_of(high + c + i, left - i, high_scale);
      const Whole pairs = (x & 0xffff) | (y << 16);
      __builtin_memcpy(row + i, &pairs, sizeof(pairs));
    }
  };
  std::int64_t c = 0;
  for (; !last && c + kWritten <= count; c += kWidth, to += panel) round(c, kWritten, to);
  for (; c < count; c += kWidth, to += panel) {
    std::int32_t made[kWritten];
    round(c, count - c, made);
    std::copy_n(made, last ? kWidth : kWritten, to);
  }
}

// A sample's rows as panels of kWidth columns, of pairs of positions.
template <int kWidth, class F>
DPK_INLINE inline void round_positions(const F* rows, const F* scales, std::int64_t positions,
                                       std::int64_t count, std::int64_t panel, std::int32_t* to) {
  for (std::int64_t t = 0; t < positions; t += 2, to += kWidth) {
    const F* const row = rows + t * count;
    const bool paired = t + 1 < positions;  // else with zeros
    round_pair<kWidth>(row, paired ? row + count : row, scales[t], paired ? scales[t + 1] : F{0},
                       count, panel, t + 2 >= positions, to);
  }
}

// The integers of a row, in whole steps.
template <class F>
DPK_INLINE inline void round_row(const F* from, std::int64_t count, F scale, std::int16_t* to) {
  const std::int64_t whole = count / kStep * kStep;
  const auto round = [&](std::int64_t c, std::int64_t left) DPK_INLINE {
    const auto made = __builtin_convertvector(whole_of(from + c, left, scale), Some<std::int16_t>);
    __builtin_memcpy(to + c, &made, sizeof(made));
  };
#pragma GCC unroll 4
  for (std::int64_t c = 0; c < whole; c += kStep) round(c, kStep);
  if (whole < count) round(whole, count - whole);
}

// A sample's rows as panels of kWidth positions, of pairs of columns: [panels, pairs, kWidth].
// Returns the pairs.
template <int kWidth, class F>
DPK_INLINE inline std::int64_t round_columns(const F* rows, const F* scales, std::int64_t positions,
                                             std::int64_t count, std::int32_t* to) {
  static_assert(kWidth % kPiece == 0);
  using V = Vector<std::int32_t, kPiece>;
  const std::int64_t pairs = round_up(count, kStep) / 2;
  std::int16_t* const whole = scratch<std::int16_t, 21>(kPiece * 2 * pairs);
  for (std::int64_t t = 0; t < round_up(positions, kWidth); t += kPiece) {
    for (std::int64_t i = 0; i < kPiece; ++i) {
      std::int16_t* const row = whole + i * 2 * pairs;
      if (t + i >= positions) {
        std::fill_n(row, 2 * pairs, std::int16_t{0});
        continue;
      }
      round_row(rows + (t + i) * count, count, scales[t + i], row);
    }
    std::int32_t* const panel = to + t / kWidth * kWidth * pairs + t % kWidth;
    for (std::int64_t k = 0; k < pairs; k += kPiece) {
      V x[kPiece];
      for (std::int64_t i = 0; i < kPiece; ++i) x[i] = load<V>(whole + i * 2 * pairs + 2 * k);
      const V even_low = __builtin_shufflevector(x[0], x[1], 0, 4, 1, 5),
              even_high = __builtin_shufflevector(x[0], x[1], 2, 6, 3, 7),
              odd_low = __builtin_shufflevector(x[2], x[3], 0, 4, 1, 5),
              odd_high = __builtin_shufflevector(x[2], x[3], 2, 6, 3, 7);
      const V y[kPiece] = {__builtin_shufflevector(even_low, odd_low, 0, 1, 4, 5),
                           __builtin_shufflevector(even_low, odd_low, 2, 3, 6, 7),
                           __builtin_shufflevector(even_high, odd_high, 0, 1, 4, 5),
                           __builtin_shufflevector(even_high, odd_high, 2, 3, 6, 7)};
      for (std::int64_t i = 0; i < kPiece; ++i) {
        __builtin_memcpy(panel + (k + i) * kWidth, &y[i], sizeof(V));
      }
    }
  }
  return pairs;
}

// One sample of a call.
template <class F>
struct Sample {
  const F *a, *g;
  LinearShape shape;
  exact::OperandScales<F> scales;

  DPK_INLINE Sample(const F* inputs, const F* outputs, const LinearShape& of, std::int64_t b)
      : a(inputs + b * of.positions * of.inputs),
        g(outputs + b * of.positions * of.outputs),
        shape(of),
        scales(exact::scales_of(a, g, of.positions, of.inputs, of.outputs)) {}
};

// The products of two panels of positions, [kColumns, kColumns].
template <class T>
DPK_INLINE inline void multiply(const std::int32_t* rows, const std::int32_t* columns,
                                std::int64_t pairs, std::int32_t* to) {
  using V = typename T::V;
  for (std::int64_t k = 0; k < pairs; k += kChunk) {
    for (int row = 0; row < T::kColumns; row += T::kRows) {
      T tile;
      tile.multiply(rows + k * T::kColumns + row, T::kColumns, columns + k * T::kColumns,
                    T::kColumns, std::min(kChunk, pairs - k));
#pragma GCC unroll 16
      for (int m = 0; m < T::kRows; ++m) {
#pragma GCC unroll 16
        for (int n = 0; n < T::kVectors; ++n) {
          std::int32_t* const at = to + (row + m) * T::kColumns + n * T::kLanes;
          const V sum = k == 0 ? tile.at[m][n] : tile.at[m][n] + load<V>(at);
          __builtin_memcpy(at, &sum, sizeof(sum));
        }
      }
    }
  }
}

// sum_{t,s} <alpha_t, alpha_s> <gamma_t, gamma_s>, at least: the squared norm by Gram matrices.
template <class F, class T>
DPK_INLINE inline double by_gram(const Sample<F>& sample) {
  constexpr std::int64_t kWidth = T::kColumns, kCells = kWidth * kWidth;
  constexpr int kLanes = T::kLanes / 2;
  using D = Vector<double, kLanes>;
  using V = Vector<std::int32_t, kLanes>;
  const std::int64_t positions = sample.shape.positions;
  const std::int64_t panels = (positions + kWidth - 1) / kWidth;
  const auto room = [&](std::int64_t count) {
    return panels * kWidth * (round_up(count, kStep) / 2);
  };
  std::int32_t* const a = scratch<std::int32_t, 4>(room(sample.shape.inputs));
  std::int32_t* const g = scratch<std::int32_t, 5>(room(sample.shape.outputs));
  std::int32_t* const u = scratch<std::int32_t, 22>(kCells);
  std::int32_t* const v = scratch<std::int32_t, 23>(kCells);
  const std::int64_t inputs =
      round_columns<kWidth>(sample.a, sample.scales.a_scales, positions, sample.shape.inputs, a);
  const std::int64_t outputs =
      round_columns<kWidth>(sample.g, sample.scales.g_scales, positions, sample.shape.outputs, g);
  double off = 0, diagonal = 0, sizes = 0;
  for (std::int64_t j = 0; j < panels; ++j) {
    for (std::int64_t i = j; i < panels; ++i) {
      multiply<T>(a + i * kWidth * inputs, a + j * kWidth * inputs, inputs, u);
      multiply<T>(g + i * kWidth * outputs, g + j * kWidth * outputs, outputs, v);
      if (i == j) {  // half of a symmetric matrix, and its diagonal
        for (std::int64_t t = 0; t < kWidth; ++t) {
          const std::int64_t cell = t * kWidth + t;
          const double square = static_cast<double>(u[cell]) * static_cast<double>(v[cell]);
          diagonal += square, sizes += std::sqrt(square);
          for (std::int64_t s = t; s < kWidth; ++s) u[t * kWidth + s] = 0;
        }
      }
      D sums[4] = {};
      for (std::int64_t cell = 0; cell < kCells; cell += 4 * kLanes) {
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) {
          const std::int64_t at = cell + k * kLanes;
          sums[k] += __builtin_convertvector(load<V>(u + at), D) *
                     __builtin_convertvector(load<V>(v + at), D);
        }
      }
      const D sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
      for (int l = 0; l < kLanes; ++l) off += sum[l];
    }
  }
  // Each product, and the additions of a chain of all of them, err by 2^-53 of the sum of sizes.
  const auto count = static_cast<double>(positions * positions + 64);
  return diagonal + 2 * off + 0x1.1p-53 * count * sizes * sizes;
}

// The squared norm by the gradient itself, tile by tile.
template <class F, class T>
DPK_INLINE inline double by_tiles(const Sample<F>& sample) {
  constexpr int kLanes = T::kLanes / 2;
  using D = Vector<double, kLanes>;
  using V = Vector<std::int32_t, kLanes>;
  const LinearShape& shape = sample.shape;
  const std::int64_t pairs = (shape.positions + 1) / 2;
  const std::int64_t tall = (shape.outputs + T::kRows - 1) / T::kRows;
  const std::int64_t wide = (shape.inputs + T::kColumns - 1) / T::kColumns;
  const std::int64_t row = panel_size<T::kRows, std::int32_t>(pairs);
  const std::int64_t column = panel_size<T::kColumns, std::int32_t>(pairs);
  std::int32_t* const g = scratch<std::int32_t, 4>(tall * row);
  std::int32_t* const a = scratch<std::int32_t, 5>(wide * column);
  round_positions<T::kRows>(sample.g, sample.scales.g_scales, shape.positions, shape.outputs, row,
                            g);
  round_positions<T::kColumns>(sample.a, sample.scales.a_scales, shape.positions, shape.inputs,
                               column, a);
  double total = 0;
  for (std::int64_t j = 0; j < wide; ++j) {
    for (std::int64_t i = 0; i < tall; ++i) {
      T tile;
      tile.multiply(g + i * row, T::kRows, a + j * column, T::kColumns, pairs);
      const std::int64_t rows = std::min<std::int64_t>(T::kRows, shape.outputs - i * T::kRows);
      D sums[2] = {};
      for (std::int64_t m = 0; m < rows; ++m) {
#pragma GCC unroll 16
        for (int n = 0; n < 2 * T::kVectors; ++n) {
          V half;
          __builtin_memcpy(&half, reinterpret_cast<const char*>(tile.at[m]) + n * sizeof(V),
                           sizeof(V));
          const D x = __builtin_convertvector(half, D);
          sums[n % 2] += x * x;
        }
      }
      for (int l = 0; l < kLanes; ++l) total += sums[0][l] + sums[1][l];
    }
  }
  const auto count = static_cast<double>(T::kRows * T::kColumns * (tall * wide + 64));
  return total * (1 + 0x1.1p-53 * count);
}

// From measured throughputs.
bool gram_is_cheaper(const LinearShape& shape) {
  const auto t = static_cast<double>(shape.positions);
  const auto d = static_cast<double>(shape.inputs), p = static_cast<double>(shape.outputs);
  return (t + 16) * (d + p + 32) < 1.8 * d * p;
}

// Samples that are summed together: their factors in units, and panels of their integers.
template <class F, class T>
struct Block {
  const F *a, *g, *factors;
  const std::int64_t* at;  // their numbers in the batch
  std::int64_t count;
  LinearShape shape;

  std::int64_t pairs() const { return (shape.positions + 1) / 2; }
  std::int64_t row_panels() const { return (shape.outputs + T::kRows - 1) / T::kRows; }
  std::int64_t column_panels() const { return (shape.inputs + T::kColumns - 1) / T::kColumns; }
  std::int64_t row_panel() const { return panel_size<T::kRows, std::int32_t>(count * pairs()); }
  std::int64_t column_panel() const {
    return panel_size<T::kColumns, std::int32_t>(count * pairs());
  }

  // Sample i: the factor of its integers; 0, if it counts for nothing.
  DPK_INLINE F round(std::int64_t i, std::int32_t* to_g, std::int32_t* to_a) const {
    const Sample<F> sample(a, g, shape, at[i]);
    const auto factor = static_cast<F>(static_cast<double>(factors[at[i]]) * sample.scales.unit);
    if (!std::isfinite(factor) || factor == 0) return 0;
    round_positions<T::kRows>(sample.g, sample.scales.g_scales, shape.positions, shape.outputs,
                              row_panel(), to_g + i * pairs() * T::kRows);
    round_positions<T::kColumns>(sample.a, sample.scales.a_scales, shape.positions, shape.inputs,
                                 column_panel(), to_a + i * pairs() * T::kColumns);
    return factor;
  }

  DPK_INLINE void add(const std::int32_t* rows_g, const std::int32_t* rows_a, const F* scales,
                      Range rows, Range columns, std::int32_t* out) const {
    using X = Vector<F, T::kLanes>;
    using V = typename T::V;
    for (std::int64_t j = columns.begin; j < columns.end; ++j) {
      const std::int64_t wide = std::min<std::int64_t>(T::kColumns, shape.inputs - j * T::kColumns);
      for (std::int64_t i = rows.begin; i < rows.end; ++i) {
        const std::int64_t tall = std::min<std::int64_t>(T::kRows, shape.outputs - i * T::kRows);
        std::int32_t* to = out + i * T::kRows * shape.inputs + j * T::kColumns;
        prefetch_rows<T::kColumns>(to, tall, shape.inputs);
        V sums[T::kRows][T::kVectors] = {};
        for (std::int64_t b = 0; b < count; ++b) {
          if (scales[b] == 0) continue;
          T tile;
          tile.multiply(rows_g + i * row_panel() + b * pairs() * T::kRows, T::kRows,
                        rows_a + j * column_panel() + b * pairs() * T::kColumns, T::kColumns,
                        pairs());
          const F scale = scales[b];
#pragma GCC unroll 16
          for (int m = 0; m < T::kRows; ++m) {
#pragma GCC unroll 16
            for (int n = 0; n < T::kVectors; ++n) {
              sums[m][n] +=
                  __builtin_convertvector(scale * __builtin_convertvector(tile.at[m][n], X), V);
            }
          }
        }
        for (std::int64_t m = 0; m < tall; ++m, to += shape.inputs) add_row(sums[m], wide, to);
      }
    }
  }
};

// out += the integers of these samples.
template <class F>
void add_samples(const F* a, const F* g, const F* factors, const std::int64_t* at,
                 std::int64_t count, const LinearShape& shape, std::int32_t* out, int team) {
  // parallel_for is outside of what is compiled for an instruction set.
  std::int64_t row_panels = 0, column_panels = 0, row_panel = 0, column_panel = 0;
  const auto with_block = [&](const auto& body) {
    versioned_by_pairs([&](auto width, auto vnni) DPK_INLINE {
      body(Block<F, PairTile<decltype(width)::value, decltype(vnni)::value>>{a, g, factors, at,
                                                                             count, shape});
    });
  };
  with_block([&](const auto& block) DPK_INLINE {
    row_panels = block.row_panels(), row_panel = block.row_panel();
    column_panels = block.column_panels(), column_panel = block.column_panel();
  });
  std::int32_t* const rows_g = scratch<std::int32_t, 6>(row_panels * row_panel);
  std::int32_t* const rows_a = scratch<std::int32_t, 7>(column_panels * column_panel);
  F* const scales = scratch<F, 20>(count);
  parallel_for(count, 1, team, [&](std::int64_t begin, std::int64_t end) {
    with_block([&](const auto& block) DPK_INLINE {
      for (std::int64_t i = begin; i < end; ++i) scales[i] = block.round(i, rows_g, rows_a);
    });
  });
  for_panels(row_panels, column_panels, team, [&](Range rows, Range columns) {
    with_block([&](const auto& block)
                   DPK_INLINE { block.add(rows_g, rows_a, scales, rows, columns, out); });
  });
}

}  // namespace

template <class F>
void operand_norms(const F* a, const F* g, const LinearShape& shape, double* squares, int threads) {
  const bool gram = gram_is_cheaper(shape);
  parallel_for(shape.batch, 1, threads, [&](std::int64_t begin, std::int64_t end) {
    versioned_by_pairs([&](auto width, auto vnni) DPK_INLINE {
      constexpr int kBytes = decltype(width)::value;
      constexpr bool kVnni = decltype(vnni)::value;
      for (std::int64_t b = begin; b < end; ++b) {
        const Sample<F> sample(a, g, shape, b);
        const double unit = sample.scales.unit;
        squares[b] = unit;
        if (unit == 0 || !std::isfinite(unit)) continue;
        const double square =
            gram ? by_gram<F, PairTile<kBytes, kVnni, kBytes == 64 ? 8 : 4>>(sample)
                 : by_tiles<F, PairTile<kBytes, kVnni>>(sample);
        squares[b] = square * unit * unit * (1 + 0x1p-40);
      }
    });
  });
}

template <class F>
void add_by_operands(const F* a, const F* g, const F* factors, const LinearShape& shape,
                     std::int32_t* out, int threads) {
  std::vector<std::int64_t> used;
  for (std::int64_t b = 0; b < shape.batch; ++b) {
    if (factors[b] != 0) used.push_back(b);
  }
  const auto count = static_cast<std::int64_t>(used.size());
  const std::int64_t work = count * shape.positions * shape.inputs * shape.outputs;
  const int team = useful_threads(work, kSmallest, threads);
  const std::int64_t most =
      std::max<std::int64_t>(1, kPositions / std::max<std::int64_t>(1, shape.positions));
  for (std::int64_t first = 0; first < count; first += most) {
    add_samples(a, g, factors, used.data() + first, std::min(most, count - first), shape, out,
                team);
  }
}

template void operand_norms<float>(const float*, const float*, const LinearShape&, double*, int);
template void operand_norms<double>(const double*, const double*, const LinearShape&, double*, int);
template void add_by_operands<float>(const float*, const float*, const float*, const LinearShape&,
                                     std::int32_t*, int);
template void add_by_operands<double>(const double*, const double*, const double*,
                                      const LinearShape&, std::int32_t*, int);

}  // namespace dpkern::cpu
