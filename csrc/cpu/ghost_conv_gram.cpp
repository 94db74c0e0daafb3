#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "cpu/ghost_conv.h"
#include "cpu/ghost_conv_direct.h"
#include "cpu/ghost_conv_pack.h"
#include "cpu/ghost_conv_tile.h"
#include "cpu/parallel.h"

namespace dpkern::cpu {
namespace {

constexpr int kStep = 8;  // columns at a time in `combine`
using Step = Vector<double, kStep>;

DPK_INLINE inline Step load_step(const double* x) {
  Step value;
  __builtin_memcpy(&value, x, sizeof(value));
  return value;
}

std::int64_t rounded_up(std::int64_t n) { return (n + kStep - 1) / kStep * kStep; }

// || grad ||^2 = sum over pairs of output positions s, s' of <g_s, g_s'> times the sum over taps k
// of <x_{s + k}, x_{s' + k}>: two Gram matrices in float64, both symmetric, so that s <= s'
// suffices. Columns are positions, `pitch_` from one image row to the next, which leaves zeros
// between the rows of an image.
class GramNorm {
 public:
  explicit GramNorm(const Geometry& plan)
      : plan_(plan),
        pitch_(plan.input.width + 2 * plan.padding.width),
        sum_columns_(rounded_up((plan.input.height + 2 * plan.padding.height) * pitch_) +
                     2 * kStep),
        x_(side(plan.in_channels, plan.input, plan.padding.width,
                rounded_up(plan.input.height * pitch_ + plan.kernel.width) + kStep)),
        g_(side(plan.out_channels, plan.output, 0,
                rounded_up(plan.output.height * pitch_) + kStep)) {}

  // Entries of the scratches: a sample as float64, and the matrices, which start from zero.
  std::int64_t sample_size() const {
    return std::max(x_.channels * x_.positions, g_.channels * g_.positions) +
           kMostVectors * kMostLanes;
  }
  std::int64_t matrix_size() const {
    return x_.positions * x_.columns + g_.positions * g_.columns +
           plan_.input.height * plan_.output.width * sum_columns_;
  }

  struct Result {
    double square;  // from above
    bool tight;
  };

  template <class In>
  Result run(const In* x, const In* g, double* sample, double* matrices) const {
    double* const x_gram = matrices;
    double* const g_gram = x_gram + x_.positions * x_.columns;
    double* const sums = g_gram + g_.positions * g_.columns;
    double plain = static_cast<double>(plan_.kernel.height * plan_.kernel.width);
    plain *= gram(x, x_, sample, x_gram);
    plain *= gram(g, g_, sample, g_gram);
    for (std::int64_t s = 0; s < g_.positions; ++s) g_gram[s * g_.columns + g_.place(s)] /= 2;
    add_along_rows(x_gram, sums);
    const double square = 2 * combine(sums, g_gram);
    const std::int64_t roundings = x_.channels + g_.channels + plan_.kernel.width + g_.positions +
                                   plan_.kernel.height * (g_.columns / kStep + 2) + 16;
    const double error = 1.01 * 0x1p-53 * static_cast<double>(roundings) * plain;
    const double most = std::is_same_v<In, float> ? 4e-5 : 4e-11;
    return {(square + error) * (1 + 0x1p-50), error <= most * square};
  }

 private:
  struct Side {
    std::int64_t channels;
    std::int64_t positions;
    std::int64_t columns;              // of a row of its matrix
    std::vector<std::int64_t> places;  // column of each position

    std::int64_t place(std::int64_t s) const { return places[static_cast<std::size_t>(s)]; }
  };

  Side side(std::int64_t channels, ConvSize size, std::int64_t start, std::int64_t columns) const {
    Side result{channels, size.height * size.width, columns, {}};
    for (std::int64_t y = 0; y < size.height; ++y) {
      for (std::int64_t x = 0; x < size.width; ++x) {
        result.places.push_back(y * pitch_ + start + x);
      }
    }
    return result;
  }

  // matrix[s][place(s')] = <v_s, v_s'> for s <= s', else untouched; returns the trace.
  template <class In>
  double gram(const In* v, const Side& side, double* sample, double* matrix) const {
    const std::int64_t count = side.positions;
    const std::int64_t* const places = side.places.data();
    planes(v, 1, {1, side.channels * count, 0, 0}, sample, 0);
    const Isa set = isa();
    const TileLimits limits = tile_limits(set);
    const auto lanes = static_cast<std::int64_t>(limits.bytes / sizeof(double));
    const int most = limits.scalar_rows[kMostVectors];
    alignas(64) double sums[kMostTile * kMostLanes];
    alignas(64) double squares[kMostLanes] = {};
    TileWalk<double> walk{};
    walk.images = 1;
    walk.rows = 1;
    walk.columns = side.channels;
    walk.vector_step = walk.scalar_step = count;
    walk.fresh = true;
    walk.sums = sums;
    walk.squares = squares;
    double trace = 0;
    for (std::int64_t row = 0; row < count; row += most) {
      const int rows = static_cast<int>(std::min<std::int64_t>(most, count - row));
      for (int r = 0; r < rows; ++r) walk.scalars[r] = sample + row + r;
      for (std::int64_t c = row / lanes * lanes; c < count; c += kMostVectors * lanes) {
        const auto vectors =
            static_cast<int>(std::min<std::int64_t>(kMostVectors, (count - c + lanes - 1) / lanes));
        for (int i = 0; i < vectors; ++i) walk.vectors[i] = sample + c + i * lanes;
        tile_kernel<double>(set, vectors, rows, 1)(walk);
        const double* from = sums;
        for (std::int64_t at = c; at < c + vectors * lanes; at += lanes) {
          const std::int64_t used = std::min<std::int64_t>(lanes, count - at);
          for (std::int64_t r = row; r < row + rows; ++r, from += lanes) {
            double* const to = matrix + r * side.columns;
            for (std::int64_t l = std::max<std::int64_t>(0, r - at); l < used; ++l) {
              to[places[at + l]] = from[l];
            }
          }
        }
      }
    }
    for (std::int64_t s = 0; s < count; ++s) trace += matrix[s * side.columns + places[s]];
    return trace;
  }

  // sums[(y, x)][(y' + padding) pitch + x'] = sum over kernel columns k of
  // gram[(y, x + k - padding)][(y', x' + k - padding)] for y' >= y.
  void add_along_rows(const double* x_gram, double* sums) const {
    versioned([&]() DPK_INLINE {
      const std::int64_t width = plan_.input.width;
      const std::int64_t left = plan_.padding.width;
      const std::int64_t columns = x_.columns;
      const std::int64_t end = plan_.input.height * pitch_;
      for (std::int64_t y = 0; y < plan_.input.height; ++y) {
        for (std::int64_t x = 0; x < plan_.output.width; ++x) {
          double* const to =
              sums + (y * plan_.output.width + x) * sum_columns_ + plan_.padding.height * pitch_;
          const std::int64_t first = std::max<std::int64_t>(0, left - x);
          const std::int64_t last = std::min(plan_.kernel.width, width + left - x);
          for (std::int64_t j = y * pitch_; j < end; j += kStep) {
            Step total{};
            for (std::int64_t k = first; k < last; ++k) {
              total += load_step(x_gram + (y * width + x + k - left) * columns + j + k);
            }
            __builtin_memcpy(to + j, &total, sizeof(total));
          }
        }
      }
    });
  }

  // sum over s = (y, x), columns and kernel rows of g_gram times the shifted sums.
  double combine(const double* sums, const double* g_gram) const {
    double result = 0;
    versioned([&]() DPK_INLINE {
      const std::int64_t width = plan_.output.width;
      const std::int64_t pitch = pitch_;
      const std::int64_t end = plan_.output.height * pitch;
      Step total{};
      for (std::int64_t y = 0; y < plan_.output.height; ++y) {
        const std::int64_t up = plan_.padding.height;
        const std::int64_t first = std::max<std::int64_t>(0, up - y);
        const std::int64_t last = std::min(plan_.kernel.height, plan_.input.height + up - y);
        for (std::int64_t x = 0; x < width; ++x) {
          Step part{};
          const double* const weights = g_gram + (y * width + x) * g_.columns;
          for (std::int64_t k = first; k < last; ++k) {
            const double* const from = sums + ((y + k - up) * width + x) * sum_columns_ + k * pitch;
            for (std::int64_t j = y * pitch; j < end; j += kStep) {
              part += load_step(weights + j) * load_step(from + j);
            }
          }
          total += part;
        }
      }
      for (int l = 0; l < kStep; ++l) result += total[l];
    });
    return result;
  }

  const Geometry plan_;
  const std::int64_t pitch_;
  const std::int64_t sum_columns_;
  const Side x_;
  const Side g_;
};

}  // namespace

template <class T>
void conv_gram_norm(const ConvNorm<T>& call, int threads) {
  const Geometry& plan = call.plan;
  const GramNorm norm(plan);
  const std::int64_t x_size = plan.in_channels * plan.input.height * plan.input.width;
  const std::int64_t g_size = plan.out_channels * plan.output.height * plan.output.width;
  std::vector<char> loose(static_cast<std::size_t>(plan.batch));
  parallel_for(plan.batch, 1, threads, [&](std::int64_t begin, std::int64_t end) {
    std::unique_ptr<double[]> large[2];
    double* const sample = conv_scratch<double, 0>(norm.sample_size(), large[0]);
    double* const matrices = conv_scratch<double, 1>(norm.matrix_size(), large[1]);
    for (std::int64_t b = begin; b < end; ++b) {
      const auto result = norm.run(call.x + b * x_size, call.g + b * g_size, sample, matrices);
      call.squares[b] = result.square;
      loose[static_cast<std::size_t>(b)] = !result.tight;
    }
  });
  std::vector<std::int64_t> again;
  for (std::size_t b = 0; b < loose.size(); ++b) {
    if (loose[b]) again.push_back(static_cast<std::int64_t>(b));
  }
  if (!again.empty()) conv_wide_norm(plan, call.x, call.g, call.squares, again, threads);
}

template void conv_gram_norm<float>(const ConvNorm<float>&, int);
template void conv_gram_norm<double>(const ConvNorm<double>&, int);

}  // namespace dpkern::cpu
