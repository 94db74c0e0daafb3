#include "cpu/ghost_embedding.h"

#include <algorithm>
#include <cmath>

#include "cpu/equal_ids.h"
#include "cpu/ghost_tiles.h"
#include "cpu/parallel.h"

namespace dpkern::cpu {
namespace {

using namespace ghost;

constexpr std::int64_t kGrain = 1 << 14;  // entries worth a thread

// n roundings of double, to first order and a little more.
double gamma(double n) { return 1.01 * n * 0x1p-53; }

struct Square {
  double value;
  double absolute;  // sum of the norms of the rows that were added
};

// An upper bound of the squared norm of the sum of `count` rows, summed in double.
template <class F>
double group_square(const F* g, std::int64_t columns, const EqualIds::Place* positions,
                    std::size_t count) {
  double upper = 0;
  versioned([&]() DPK_INLINE {
    const std::int64_t n = columns;
    if (count == 1) {
      upper = square_of(g + positions->second * n, n);
      return;
    }
    const double* const sums = sum_rows(g, n, {0, n}, positions, count);
    double absolute = 0;
    for (std::size_t k = 0; k < count; ++k) {
      absolute += std::sqrt(square_of(g + positions[k].second * n, n));
    }
    const double terms = static_cast<double>(count + 64) + static_cast<double>(n);
    const double norm = std::sqrt(square_of(sums, n)) + gamma(2 * terms) * absolute;
    upper = norm * norm;
  });
  return upper * (1 + gamma(static_cast<double>(columns) / 16 + 64));
}

template <class Call>
EmbeddingShape shape_of(const Call& call) {
  return {call.B, call.T, call.D, call.padding_idx.value_or(kNoPadding)};
}

}  // namespace

template <class F>
void embedding_norm(const EmbeddingNorm<F>& call, int threads) {
  const EmbeddingShape shape = shape_of(call);
  const std::int64_t entries = std::max<std::int64_t>(1, shape.positions * shape.columns);
  const std::int64_t grain = std::max<std::int64_t>(1, kGrain / entries);
  parallel_for(shape.batch, grain, threads, [&](std::int64_t begin, std::int64_t end) {
    static thread_local EqualIds groups;
    for (std::int64_t b = begin; b < end; ++b) {
      const F* const rows = call.g + b * shape.positions * shape.columns;
      groups.sort(call.ids + b * shape.positions, shape.positions, shape.padding);
      double total = 0;
      groups.for_each([&](const auto* positions, std::size_t count) {
        total += group_square(rows, shape.columns, positions, count);
      });
      call.squares[b] = total * (1 + gamma(static_cast<double>(shape.positions + 4)));
    }
  });
}

template <class F>
void embedding_sum(const EmbeddingSum<F>& call, int threads) {
  const EmbeddingShape shape = shape_of(call);
  const std::int64_t* const ids = call.ids;
  // Each thread owns some columns of the table: no two write the same line, and the order of the
  // additions is that of the positions.
  constexpr std::int64_t kUnit = 32;
  const std::int64_t units = (shape.columns + kUnit - 1) / kUnit;
  const std::int64_t work = std::max<std::int64_t>(1, shape.batch * shape.positions * kUnit);
  const int team = useful_threads(units, std::max<std::int64_t>(1, kGrain / work), threads);
  parallel_for(team, 1, team, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t part = first; part < last; ++part) {
      const Range cut = part_of(units, static_cast<int>(part), team);
      const std::int64_t begin = cut.begin * kUnit;
      const std::int64_t count = std::min(shape.columns, cut.end * kUnit) - begin;
      versioned([&]() DPK_INLINE {
        const std::int64_t n = count;
        for (std::int64_t b = 0; b < shape.batch; ++b) {
          const F factor = call.factors[b];
          if (factor == 0) continue;
          for (std::int64_t t = b * shape.positions; t < (b + 1) * shape.positions; ++t) {
            if (ids[t] == shape.padding) continue;
            const F* const from = call.g + t * shape.columns + begin;
            F* const to = call.out + ids[t] * shape.columns + begin;
            for (std::int64_t i = 0; i < n; ++i) to[i] += factor * from[i];
          }
        }
      });
    }
  });
}

// The same in integers: each sample's rows of equal ids are added before they are truncated, in the
// order and the arithmetic in which their norm is taken.
template <class F>
void embedding_integer_sum(const EmbeddingIntegerSum<F>& call, int threads) {
  const EmbeddingShape shape = shape_of(call);
  constexpr std::int64_t kUnit = 32;
  const std::int64_t units = (shape.columns + kUnit - 1) / kUnit;
  const std::int64_t work = std::max<std::int64_t>(1, shape.batch * shape.positions * kUnit);
  const int team = useful_threads(units, std::max<std::int64_t>(1, kGrain / work), threads);
  parallel_for(team, 1, team, [&](std::int64_t first, std::int64_t last) {
    static thread_local EqualIds groups;
    for (std::int64_t part = first; part < last; ++part) {
      const Range cut = part_of(units, static_cast<int>(part), team);
      const Range columns{cut.begin * kUnit, std::min(shape.columns, cut.end * kUnit)};
      for (std::int64_t b = 0; b < shape.batch; ++b) {
        const F factor = call.factors[b];
        if (factor == 0) continue;
        const F* const rows = call.g + b * shape.positions * shape.columns;
        groups.sort(call.ids + b * shape.positions, shape.positions, shape.padding);
        groups.for_each([&](const EqualIds::Place* places, std::size_t count) {
          std::int32_t* const to = call.out + places->first * shape.columns + columns.begin;
          const std::int64_t n = columns.end - columns.begin;
          versioned([&]() DPK_INLINE {
            if (count == 1) {
              const F* const from = rows + places->second * shape.columns + columns.begin;
              for (std::int64_t i = 0; i < n; ++i) {
                to[i] += static_cast<std::int32_t>(factor * from[i]);
              }
              return;
            }
            const double* const sums = sum_rows(rows, shape.columns, columns, places, count);
            const double weight = static_cast<double>(factor);
            for (std::int64_t i = 0; i < n; ++i) {
              to[i] += static_cast<std::int32_t>(weight * sums[i]);
            }
          });
        });
      }
    }
  });
}

template <class F>
void tied_cross(const TiedCross<F>& call, int threads) {
  const F *const e = call.e, *const a = call.a, *const g = call.g;
  const std::int64_t* const ids = call.ids;
  const std::int64_t places = call.S, columns = call.D, rows = call.T, vocabulary = call.V;
  const std::int64_t padding = call.padding_idx.value_or(kNoPadding);
  parallel_for(call.B, 1, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t b = begin; b < end; ++b) {
      double sum = 0, absolute = 0;
      versioned_by_width([&](auto width) DPK_INLINE {
        using Table = Dots<double, decltype(width)::value>;
        const std::int64_t n = columns;
        const std::int64_t stride = round_up(std::max<std::int64_t>(n, 1), Table::kLanes);
        double* const wide_e = scratch<double, 8>((places + rows + 1) * stride);
        double* const wide_a = wide_e + places * stride;
        double* const zeros = wide_a + rows * stride;
        for (std::int64_t s = 0; s < places; ++s) {
          pack_row(e + (b * places + s) * n, n, stride, 1.0, wide_e + s * stride);
        }
        for (std::int64_t t = 0; t < rows; ++t) {
          pack_row(a + (b * rows + t) * n, n, stride, 1.0, wide_a + t * stride);
        }
        std::fill_n(zeros, stride, 0.0);
        double* const norms = scratch<double, 9>(places + rows);
        for (std::int64_t r = 0; r < places + rows; ++r) {
          norms[r] = std::sqrt(square_of(wide_e + r * stride, stride));
        }
        for (std::int64_t t = 0; t < rows; t += kDots) {
          const double* x[kDots];
          for (int i = 0; i < kDots; ++i) x[i] = t + i < rows ? wide_a + (t + i) * stride : zeros;
          // The entries of g lie far apart: ask for all of them before the first is needed.
          for (std::int64_t i = t; i < std::min(rows, t + kDots); ++i) {
            for (std::int64_t s = b * places; s < (b + 1) * places; ++s) {
              __builtin_prefetch(g + (b * rows + i) * vocabulary + ids[s]);
            }
          }
          double row_sum = 0;
          for (std::int64_t s = 0; s < places; s += kDots) {
            const double* y[kDots];
            for (int j = 0; j < kDots; ++j) {
              y[j] = s + j < places ? wide_e + (s + j) * stride : zeros;
            }
            double inner[kDots * kDots];
            Table::table(x, y, stride, inner);
            for (std::int64_t j = 0; j < std::min<std::int64_t>(kDots, places - s); ++j) {
              const std::int64_t id = ids[b * places + s + j];
              if (id == padding) continue;
              for (std::int64_t i = 0; i < std::min<std::int64_t>(kDots, rows - t); ++i) {
                const double weight = static_cast<double>(g[(b * rows + t + i) * vocabulary + id]);
                row_sum += weight * inner[j * kDots + i];
                absolute += std::fabs(weight) * norms[places + t + i] * norms[s + j];
              }
            }
          }
          sum += row_sum;
        }
      });
      const double roundings = static_cast<double>(4 * places + rows + columns + 256);
      call.products[b] = sum + gamma(roundings) * absolute * 1.01;
    }
  });
}

template void embedding_norm<float>(const EmbeddingNorm<float>&, int);
template void embedding_norm<double>(const EmbeddingNorm<double>&, int);
template void embedding_sum<float>(const EmbeddingSum<float>&, int);
template void embedding_sum<double>(const EmbeddingSum<double>&, int);
template void embedding_integer_sum<float>(const EmbeddingIntegerSum<float>&, int);
template void embedding_integer_sum<double>(const EmbeddingIntegerSum<double>&, int);
template void tied_cross<float>(const TiedCross<float>&, int);
template void tied_cross<double>(const TiedCross<double>&, int);

}  // namespace dpkern::cpu
