#include "cpu/ghost_linear.h"

#include <cmath>
#include <limits>
#include <type_traits>

#include "cpu/ghost_tiles.h"
#include "cpu/parallel.h"

namespace dpkern::cpu {
namespace {

using namespace ghost;

constexpr std::int64_t kBlock = 16;      // positions whose products are added in one chain
constexpr std::int64_t kKeptBlock = 64;  // the same for gradients that are kept
constexpr std::int64_t kSmall = 2048;    // entries of a gradient for which copies do not pay

template <class F>
constexpr double kUnit = std::is_same_v<F, float> ? 0x1p-24 : 0x1p-53;
// What flushing to zero can hide, per operation. In double, products of floats never get there.
template <class F>
constexpr double kFlushed = std::is_same_v<F, float> ? 0x1p-126 : 0;

// n roundings, to first order and a little more: gamma_n <= 1.01 n u for n u < 0.009.
template <class F>
double gamma(double n) {
  return 1.01 * n * kUnit<F>;
}

// The squared norm lies between these.
struct Bounds {
  double lower;
  double upper;
  bool within(double tolerance) const {
    return upper <= (1 + tolerance) * lower && upper < std::numeric_limits<double>::infinity();
  }
};

template <class S>
struct Sample {
  const S* a;
  const S* g;
  std::int64_t positions, inputs, outputs;
};

// Rows as F without tails: the caller's own where they fit, else a padded copy.
template <class F>
struct Rows {
  const F* data;
  std::int64_t stride;
};
template <class F, int kTag, int kLanes, class S>
DPK_INLINE inline Rows<F> padded(const S* from, std::int64_t rows, std::int64_t columns) {
  if constexpr (std::is_same_v<S, F>) {
    if (columns % kLanes == 0) return {from, columns};
  }
  const std::int64_t stride = round_up(columns, kLanes);
  F* const to = scratch<F, kTag>(rows * stride);
  for (std::int64_t r = 0; r < rows; ++r) {
    pack_row(from + r * columns, columns, stride, F{1}, to + r * stride);
  }
  return {to, stride};
}

// Squared norms of samples of one position, rounded up.
template <class F>
void rank_one(const LinearNorm<F>& call, Range samples) {
  const double slack = gamma<double>(static_cast<double>(call.d + call.p) / 16 + 100);
  versioned([&]() DPK_INLINE {
    for (std::int64_t b = samples.begin; b < samples.end; ++b) {
      const double a = square_of(call.a + b * call.d, call.d);
      const double g = square_of(call.g + b * call.p, call.p);
      call.squares[b] = a * g * (1 + slack);
    }
  });
}

// sum_t |a_t| |g_t|, rounded up.
template <class S>
double sum_of_norms(const Sample<S>& sample) {
  double total = 0;
  versioned([&]() DPK_INLINE {
    for (std::int64_t t = 0; t < sample.positions; ++t) {
      const double a = square_of(sample.a + t * sample.inputs, sample.inputs);
      const double g = square_of(sample.g + t * sample.outputs, sample.outputs);
      total += std::sqrt(a) * std::sqrt(g);
    }
  });
  const std::int64_t terms = sample.positions + sample.inputs + sample.outputs;
  return total * (1 + gamma<double>(static_cast<double>(terms + 100)));
}

// What a Gram sum collects. In terms of u = <a_t, a_t'> and v = <g_t, g_t'> as computed:
struct GramSums {
  double square = 0;  // sum u v
  double error = 0;   // sum |a_t| |a_t'| |v| + |g_t| |g_t'| |u|
};

// sum_{t,t'} u v over the lower triangle of tables of kDots x kDots pairs.
template <class F, int kBytes>
struct Gram {
  using Table = Dots<F, kBytes>;
  static constexpr int kCells = kDots * kDots;
  static constexpr std::int64_t kRowTiles = 2;  // tiles of rows that stay in the first cache

  // Upper bounds of |a_t| and |g_t| of a tile, spread over a table's columns and rows.
  struct Norms {
    double a_rows[kCells], a_columns[kCells], g_rows[kCells], g_columns[kCells];
  };

  Rows<F> a, g;
  const F* zeros;
  std::int64_t positions;
  Norms* norms;
  double a_flushed, g_flushed;

  DPK_INLINE void rows_of(const Rows<F>& from, std::int64_t tile, const F** rows) const {
    for (std::int64_t i = 0; i < kDots; ++i) {
      const std::int64_t t = tile * kDots + i;
      rows[i] = t < positions ? from.data + t * from.stride : zeros;
    }
  }
  DPK_INLINE void tables(std::int64_t i, std::int64_t j, double* u, double* v) const {
    const F *x[kDots], *y[kDots];
    rows_of(a, i, x), rows_of(a, j, y);
    Table::table(x, y, a.stride, u);
    rows_of(g, i, x), rows_of(g, j, y);
    Table::table(x, y, g.stride, v);
  }
  static DPK_INLINE void add(const Norms& row, const Norms& column, const double* u,
                             const double* v, double* square, double* error) {
    for (int k = 0; k < kCells; ++k) {
      square[k] += u[k] * v[k];
      error[k] += row.a_rows[k] * column.a_columns[k] * std::fabs(v[k]) +
                  row.g_rows[k] * column.g_columns[k] * std::fabs(u[k]);
    }
  }
  DPK_INLINE void fill_norms(std::int64_t tile, const double* u, const double* v) const {
    Norms& to = norms[tile];
    const double slack = 1 + 2 * gamma<F>(Table::kRoundings);
    for (int i = 0; i < kDots; ++i) {
      const bool used = tile * kDots + i < positions;
      const int diagonal = i * kDots + i;
      const double a_norm = used ? std::sqrt(u[diagonal] * slack + a_flushed) * (1 + 0x1p-40) : 0;
      const double g_norm = used ? std::sqrt(v[diagonal] * slack + g_flushed) * (1 + 0x1p-40) : 0;
      for (int k = 0; k < kDots; ++k) {
        to.a_rows[k * kDots + i] = to.a_columns[i * kDots + k] = a_norm;
        to.g_rows[k * kDots + i] = to.g_columns[i * kDots + k] = g_norm;
      }
    }
  }
  DPK_INLINE GramSums run() const {
    const std::int64_t tiles = (positions + kDots - 1) / kDots;
    double u[kCells], v[kCells], square[kCells] = {}, error[kCells] = {};
    for (std::int64_t i = 0; i < tiles; ++i) {
      tables(i, i, u, v);
      fill_norms(i, u, v);
      add(norms[i], norms[i], u, v, square, error);
    }
    for (int k = 0; k < kCells; ++k) square[k] *= 0.5, error[k] *= 0.5;  // the others count twice
    for (std::int64_t first = 0; first < tiles; first += kRowTiles) {
      const std::int64_t end = std::min(tiles, first + kRowTiles);
      for (std::int64_t j = 0; j + 1 < end; ++j) {
        for (std::int64_t i = std::max(first, j + 1); i < end; ++i) {
          tables(i, j, u, v);
          add(norms[i], norms[j], u, v, square, error);
        }
      }
    }
    GramSums sums;
    for (int k = 0; k < kCells; ++k) sums.square += 2 * square[k], sums.error += 2 * error[k];
    return sums;
  }
};

template <class F, int kBytes, class S>
DPK_INLINE inline Bounds gram_at(const Sample<S>& sample) {
  using Work = Gram<F, kBytes>;
  constexpr int kLanes = kBytes / static_cast<int>(sizeof(F));
  const std::int64_t positions = sample.positions;
  const std::int64_t tiles = (positions + kDots - 1) / kDots;
  const double d = static_cast<double>(sample.inputs), p = static_cast<double>(sample.outputs);
  Work work;
  work.a = padded<F, 1, kLanes>(sample.a, positions, sample.inputs);
  work.g = padded<F, 2, kLanes>(sample.g, positions, sample.outputs);
  const std::int64_t longest = std::max(work.a.stride, work.g.stride);
  F* const zeros = scratch<F, 3>(longest);
  std::fill_n(zeros, longest, F{0});
  work.zeros = zeros;
  work.positions = positions;
  work.norms = scratch<typename Work::Norms, 0>(tiles);
  work.a_flushed = (2 * d + 256) * kFlushed<F>;
  work.g_flushed = (2 * p + 256) * kFlushed<F>;
  const GramSums sums = work.run();
  double products = 0, a_sum = 0, g_sum = 0;
  for (std::int64_t t = 0; t < tiles * kDots; ++t) {
    const double a_norm = work.norms[t / kDots].a_rows[t % kDots];
    const double g_norm = work.norms[t / kDots].g_rows[t % kDots];
    products += a_norm * g_norm, a_sum += a_norm, g_sum += g_norm;
  }
  // docs/ghost.md, "The Gram route".
  const double t = static_cast<double>(positions);
  const double slack = gamma<F>(Work::Table::kRoundings) + gamma<double>((d + p) / 128);
  const double flushed = work.a_flushed * g_sum * g_sum + work.g_flushed * a_sum * a_sum +
                         work.a_flushed * work.g_flushed * t * t;
  const double second = slack * slack + gamma<double>(t * t / 16 + 4 * t + 64);
  const double bound = 1.01 * (slack * sums.error + second * products * products + flushed);
  return {sums.square - bound, sums.square + bound};
}

template <class F, class S>
Bounds gram(const Sample<S>& sample) {
  Bounds bounds{};
  versioned_by_width([&](auto width)
                         DPK_INLINE { bounds = gram_at<F, decltype(width)::value>(sample); });
  return bounds;
}

// The gradient tile by tile: visit(tile, first row, first column).
template <class F, int kBytes, class S, class Visit>
DPK_INLINE inline void for_gradient_tiles(const Sample<S>& sample, std::int64_t block,
                                          const Visit& visit) {
  using T = Tile<F, kBytes>;
  const std::int64_t steps = sample.positions;
  const std::int64_t row_panels = (sample.outputs + T::kRows - 1) / T::kRows;
  const std::int64_t size = panel_size<T::kRows, F>(steps);
  F* const g = scratch<F, 1>(row_panels * size);
  F* const a = scratch<F, 2>(T::kColumns * steps);
  pack_panels<T::kRows, T::kWrittenRows>(sample.g, steps, sample.outputs, sample.outputs, F{1}, g,
                                         size);
  for (std::int64_t column = 0; column < sample.inputs; column += T::kColumns) {
    const std::int64_t used = std::min<std::int64_t>(T::kColumns, sample.inputs - column);
    pack_panels<T::kColumns>(sample.a + column, steps, used, sample.inputs, F{1}, a,
                             T::kColumns * steps);
    for (std::int64_t panel = 0; panel < row_panels; ++panel) {
      T tile;
      tile.multiply_blocked(g + panel * size, a, steps, block);
      visit(tile, panel * T::kRows, column);
    }
  }
}

// The gradient of few positions and entries, without copies of the operands.
template <class F, int kBytes>
DPK_INLINE inline void write_small_gradient(const Sample<F>& sample, F* to) {
  constexpr int kLanes = kBytes / static_cast<int>(sizeof(F));
  constexpr std::int64_t kRows = 4;
  using V = Vector<F, kLanes>;
  const std::int64_t steps = sample.positions, wide = sample.inputs, tall = sample.outputs;
  for (std::int64_t row = 0; row < tall; row += kRows) {
    const std::int64_t first = std::min(row, std::max<std::int64_t>(0, tall - kRows));
    const std::int64_t rows = std::min(kRows, tall);
    std::int64_t column = 0;
    for (; column + kLanes <= wide; column += kLanes) {
      V sums[kRows] = {};
      for (std::int64_t t = 0; t < steps; ++t) {
        const V x = load<V>(sample.a + t * wide + column);
        const F* const g = sample.g + t * tall + first;
        for (std::int64_t m = 0; m < rows; ++m) sums[m] += g[m] * x;
      }
      for (std::int64_t m = 0; m < rows; ++m) {
        __builtin_memcpy(to + (first + m) * wide + column, &sums[m], sizeof(V));
      }
    }
    for (; column < wide; ++column) {
      for (std::int64_t m = 0; m < rows; ++m) {
        F sum = 0;
        for (std::int64_t t = 0; t < steps; ++t) {
          sum += sample.g[t * tall + first + m] * sample.a[t * wide + column];
        }
        to[(first + m) * wide + column] = sum;
      }
    }
  }
}

// Relative error of the sum of the tiles' sums of squares, each of at least 24 entries.
template <class F>
double square_slack(std::int64_t inputs, std::int64_t outputs) {
  const double d = static_cast<double>(inputs), p = static_cast<double>(outputs);
  return gamma<F>(Tile<F, 64>::kSquareRoundings) + gamma<double>(d * p / 24 + d + p + 64);
}

template <class F, class S>
Bounds direct(const Sample<S>& sample) {
  double square = 0;
  versioned_by_width([&](auto width) DPK_INLINE {
    constexpr int kBytes = decltype(width)::value;
    double total = 0;
    for_gradient_tiles<F, kBytes>(sample, kBlock,
                                  [&](const Tile<F, kBytes>& tile, std::int64_t, std::int64_t)
                                      DPK_INLINE { total += tile.squares(); });
    square = total;
  });
  const double entries = static_cast<double>(sample.inputs) * static_cast<double>(sample.outputs);
  const double slack = square_slack<F>(sample.inputs, sample.outputs);
  const double blocks = static_cast<double>((sample.positions + kBlock - 1) / kBlock);
  const double flushed = kFlushed<F> * 2 * static_cast<double>(sample.positions + 2);
  // docs/ghost.md, "The direct route".
  const double error =
      gamma<F>(kBlock + 1 + blocks) * sum_of_norms(sample) + flushed * std::sqrt(entries);
  const double most = std::sqrt(square * (1 + slack) + 2 * entries * kFlushed<F>) + error;
  const double least =
      std::sqrt(std::max(0.0, square * (1 - slack) - 2 * entries * kFlushed<F>)) - error;
  const double rounding = 1 + gamma<double>(16);
  return {least > 0 ? least * least / rounding : 0, most * most * rounding};
}

constexpr double kTolerance = 0.99e-4;  // of float inputs
constexpr double kDoubleTolerance = 0.99e-10;

// Beyond these, sums in float usually miss the tolerance and are done again in double.
constexpr std::int64_t kMostDirect = 128, kMostGram = 192;

// From measured throughputs: direct products run about 1.4 times as fast as tables of dots.
bool gram_is_cheaper(const LinearShape& shape) {
  const double t = static_cast<double>(shape.positions);
  const double d = static_cast<double>(shape.inputs), p = static_cast<double>(shape.outputs);
  const double gram = (t + 4) * (d + p + 32) * (shape.positions > kMostGram ? 2 : 1);
  return gram < 1.4 * d * p * (shape.positions > kMostDirect ? 2 : 1);
}

template <class F>
double square_bound(const Sample<F>& sample, bool by_gram, bool gram_cheaper) {
  constexpr bool kSingle = std::is_same_v<F, float>;
  if constexpr (kSingle) {
    if (by_gram || sample.positions <= kMostDirect) {
      const Bounds bounds = by_gram ? gram<float>(sample) : direct<float>(sample);
      if (bounds.within(kTolerance)) return bounds.upper;
    }
  }
  if (kSingle ? gram_cheaper : by_gram) {
    const Bounds bounds = gram<double>(sample);
    if (bounds.within(kSingle ? kTolerance : kDoubleTolerance)) return bounds.upper;
  }
  return direct<double>(sample).upper;
}

// The operands of sample b of a call.
template <class Call>
auto sample_of(const Call& call, std::int64_t b) {
  using F = std::decay_t<decltype(*call.a)>;
  return Sample<F>{call.a + b * call.T * call.d, call.g + b * call.T * call.p, call.T, call.d,
                   call.p};
}

}  // namespace

template <class F>
void linear_norm(const LinearNorm<F>& call, int threads) {
  const LinearShape shape = shape_of(call);
  const bool gram_cheaper = gram_is_cheaper(shape);
  const bool by_gram =
      call.route == LinearRoute::kAuto ? gram_cheaper : call.route == LinearRoute::kGram;
  parallel_for(shape.batch, 1, threads, [&](std::int64_t begin, std::int64_t end) {
    if (shape.positions == 1) return rank_one(call, {begin, end});
    for (std::int64_t b = begin; b < end; ++b) {
      call.squares[b] = square_bound(sample_of(call, b), by_gram, gram_cheaper);
    }
  });
}

template <class F>
void linear_gradient(const LinearGradient<F>& call, int threads) {
  const LinearShape shape = shape_of(call);
  const std::int64_t entries = shape.inputs * shape.outputs;
  const double slack = square_slack<F>(shape.inputs, shape.outputs);
  const double flushed = kFlushed<F> * 2 * static_cast<double>(entries);
  const bool small = shape.positions <= kKeptBlock && entries <= kSmall;
  parallel_for(shape.batch, 1, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t b = begin; b < end; ++b) {
      const Sample<F> sample = sample_of(call, b);
      F* const grad = call.grads + b * entries;
      double square = 0;
      if (small) {
        versioned_by_width([&](auto width) DPK_INLINE {
          write_small_gradient<F, decltype(width)::value>(sample, grad);
          square = square_of(grad, entries);
        });
        call.squares[b] = square * (1 + gamma<double>(static_cast<double>(entries + 64))) +
                          (std::is_same_v<F, float> ? 0 : flushed);
        continue;
      }
      versioned_by_width([&](auto width) DPK_INLINE {
        constexpr int kBytes = decltype(width)::value;
        using T = Tile<F, kBytes>;
        double total = 0;
        const std::int64_t rows = sample.outputs, columns = sample.inputs;
        F* const to = grad;
        for_gradient_tiles<F, kBytes>(
            sample, kKeptBlock,
            [&](const T& tile, std::int64_t row, std::int64_t column) DPK_INLINE {
              const auto used = std::min<std::int64_t>(T::kRows, rows - row);
              const auto wide = std::min<std::int64_t>(T::kColumns, columns - column);
              F* const from = to + row * columns + column;
              if (wide == T::kColumns) {
                for (std::int64_t m = 0; m < used; ++m) {
                  __builtin_memcpy(from + m * columns, tile.at[m], sizeof(tile.at[m]));
                }
              } else {
                for (std::int64_t m = 0; m < used; ++m) {
                  __builtin_memcpy(from + m * columns, tile.at[m],
                                   static_cast<std::size_t>(wide) * sizeof(F));
                }
              }
              total += tile.squares();
            });
        square = total;
      });
      // Squares of floats can overflow or vanish where the numbers do not: again in double.
      if (std::is_same_v<F, float> && !(flushed <= 1e-6 * square && std::isfinite(square))) {
        versioned([&]() DPK_INLINE { square = square_of(grad, entries); });
        call.squares[b] = square * (1 + gamma<double>(static_cast<double>(entries + 64)));
      } else {
        call.squares[b] = square * (1 + slack) + flushed;
      }
    }
  });
}

template void linear_norm<float>(const LinearNorm<float>&, int);
template void linear_norm<double>(const LinearNorm<double>&, int);
template void linear_gradient<float>(const LinearGradient<float>&, int);
template void linear_gradient<double>(const LinearGradient<double>&, int);

}  // namespace dpkern::cpu
