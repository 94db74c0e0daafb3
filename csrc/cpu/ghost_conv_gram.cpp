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
// suffices. Columns are positions in rows of `pitch_`, which leaves zeros between the rows of an
// image.
class GramNorm {
 public:
  explicit GramNorm(const ConvPlan& plan)
      : plan_(plan),
        lanes_(tile_limits(isa()).bytes / static_cast<int>(sizeof(double))),
        inputs_(plan.input.height * plan.input.width),
        outputs_(plan.output.height * plan.output.width),
        pitch_(plan.input.width + 2 * plan.padding.width),
        x_columns_(rounded_up(plan.input.height * pitch_ + plan.kernel.width) + kStep),
        g_columns_(rounded_up(plan.output.height * pitch_) + kStep),
        sum_columns_(rounded_up((plan.input.height + 2 * plan.padding.height) * pitch_) +
                     2 * kStep) {}

  // Entries of the scratches: a sample as float64, and the matrices, which start from zero.
  std::int64_t sample_size() const {
    return std::max(plan_.in_channels * inputs_, plan_.out_channels * outputs_) + kMostLanes;
  }
  std::int64_t matrix_size() const {
    return inputs_ * x_columns_ + outputs_ * g_columns_ +
           plan_.input.height * plan_.output.width * sum_columns_;
  }

  struct Result {
    double square;  // from above
    bool tight;
  };

  template <class In>
  Result run(const In* x, const In* g, double* sample, double* matrices) const {
    double* const x_gram = matrices;
    double* const g_gram = x_gram + inputs_ * x_columns_;
    double* const sums = g_gram + outputs_ * g_columns_;
    planes(x, plan_.in_channels, {1, inputs_, 0, inputs_}, sample, inputs_);
    gram(sample, plan_.in_channels, plan_.input, plan_.padding.width, x_columns_, 1, x_gram);
    planes(g, plan_.out_channels, {1, outputs_, 0, outputs_}, sample, outputs_);
    gram(sample, plan_.out_channels, plan_.output, 0, g_columns_, 0.5, g_gram);
    double plain = static_cast<double>(plan_.kernel.height * plan_.kernel.width);
    plain *= trace(x_gram, plan_.input, plan_.padding.width, x_columns_);
    plain *= 2 * trace(g_gram, plan_.output, 0, g_columns_);
    add_along_rows(x_gram, sums);
    const double square = 2 * combine(sums, g_gram);
    const std::int64_t roundings = plan_.in_channels + plan_.out_channels + plan_.kernel.width +
                                   outputs_ + plan_.kernel.height * (g_columns_ / kStep + 2) + 16;
    const double error = 1.01 * 0x1p-53 * static_cast<double>(roundings) * plain;
    const double most = std::is_same_v<In, float> ? 4e-5 : 4e-11;
    return {(square + error) * (1 + 0x1p-50), error <= most * square};
  }

 private:
  static std::int64_t column(std::int64_t position, ConvSize size, std::int64_t start,
                             std::int64_t pitch) {
    return position / size.width * pitch + start + position % size.width;
  }

  // matrix[s][column(s')] = <v_s, v_s'> for s < s', `diagonal` times it for s = s'; else zero.
  void gram(const double* v, std::int64_t channels, ConvSize size, std::int64_t start,
            std::int64_t columns, double diagonal, double* matrix) const {
    const std::int64_t count = size.height * size.width;
    const Isa set = isa();
    alignas(64) double sums[kMostTile * kMostLanes];
    alignas(64) double squares[kMostLanes] = {};
    TileWalk<double> walk{};
    walk.rows = 1;
    walk.columns = channels;
    walk.vector_step = walk.scalar_step = count;
    walk.fresh = true;
    walk.sums = sums;
    walk.squares = squares;
    const int most = tile_limits(set).scalar_rows[kMostVectors];
    for (std::int64_t row = 0; row < count; row += most) {
      const int rows = static_cast<int>(std::min<std::int64_t>(most, count - row));
      for (int r = 0; r < rows; ++r) walk.scalars[r] = v + row + r;
      for (std::int64_t c = row / lanes_ * lanes_; c < count; c += kMostVectors * lanes_) {
        const auto vectors = static_cast<int>(
            std::min<std::int64_t>(kMostVectors, (count - c + lanes_ - 1) / lanes_));
        for (int i = 0; i < vectors; ++i) walk.vectors[i] = v + c + i * lanes_;
        tile_kernel<double>(set, vectors, rows, 1)(walk);
        const std::int64_t end = std::min(count, c + vectors * lanes_);
        for (int r = 0; r < rows; ++r) {
          double* const to = matrix + (row + r) * columns;
          const std::int64_t first = std::max(c, row + r);
          std::int64_t y = first / size.width;
          std::int64_t x = first % size.width;
          for (std::int64_t at = first; at < end; ++at) {
            const auto [block, lane] = std::div(at - c, static_cast<std::int64_t>(lanes_));
            const double value = sums[(block * rows + r) * lanes_ + lane];
            to[y * pitch_ + start + x] = at == row + r ? diagonal * value : value;
            if (++x == size.width) x = 0, ++y;
          }
        }
      }
    }
  }

  double trace(const double* matrix, ConvSize size, std::int64_t start,
               std::int64_t columns) const {
    double total = 0;
    for (std::int64_t s = 0; s < size.height * size.width; ++s) {
      total += matrix[s * columns + column(s, size, start, pitch_)];
    }
    return total;
  }

  // sums[(y, x)][(y' + padding) pitch + x'] = sum over kernel columns k of
  // gram[(y, x + k - padding)][(y', x' + k - padding)] for y' >= y.
  void add_along_rows(const double* x_gram, double* sums) const {
    versioned([&]() DPK_INLINE {
      const std::int64_t width = plan_.input.width;
      const std::int64_t left = plan_.padding.width;
      const std::int64_t columns = x_columns_;
      const std::int64_t end = plan_.input.height * pitch_;
      for (std::int64_t y = 0; y < plan_.input.height; ++y) {
        for (std::int64_t x = 0; x < plan_.output.width; ++x) {
          double* const to =
              sums + (y * plan_.output.width + x) * sum_columns_ + plan_.padding.height * pitch_;
          const std::int64_t first = std::max<std::int64_t>(0, left - x);
          const std::int64_t last = std::min(plan_.kernel.width, width + left - x);
          const double* const from = x_gram + (y * width + x - left) * columns;
          for (std::int64_t j = y * pitch_; j < end; j += kStep) {
            Step total{};
            for (std::int64_t k = first; k < last; ++k) {
              total += load_step(from + k * columns + j + k);
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
      double total = 0;
      for (std::int64_t y = 0; y < plan_.output.height; ++y) {
        const std::int64_t up = plan_.padding.height;
        const std::int64_t first = std::max<std::int64_t>(0, up - y);
        const std::int64_t last = std::min(plan_.kernel.height, plan_.input.height + up - y);
        for (std::int64_t x = 0; x < width; ++x) {
          Step part{};
          const double* const weights = g_gram + (y * width + x) * g_columns_;
          for (std::int64_t k = first; k < last; ++k) {
            const double* const from = sums + ((y + k - up) * width + x) * sum_columns_ + k * pitch;
            for (std::int64_t j = y * pitch; j < end; j += kStep) {
              part += load_step(weights + j) * load_step(from + j);
            }
          }
          for (int l = 0; l < kStep; ++l) total += part[l];
        }
      }
      result = total;
    });
    return result;
  }

  const ConvPlan plan_;
  const int lanes_;
  const std::int64_t inputs_;
  const std::int64_t outputs_;
  const std::int64_t pitch_;
  const std::int64_t x_columns_;
  const std::int64_t g_columns_;
  const std::int64_t sum_columns_;
};

}  // namespace

template <class T>
void conv_gram_norm(const ConvPlan& plan, const T* x, const T* g, double* squares, int threads) {
  const GramNorm norm(plan);
  const std::int64_t x_size = plan.in_channels * plan.input.height * plan.input.width;
  const std::int64_t g_size = plan.out_channels * plan.output.height * plan.output.width;
  std::vector<char> loose(static_cast<std::size_t>(plan.batch));
  parallel_for(plan.batch, 1, threads, [&](std::int64_t begin, std::int64_t end) {
    std::unique_ptr<double[]> large[2];
    double* const sample = conv_scratch<double, 0>(norm.sample_size(), large[0]);
    double* const matrices = conv_scratch<double, 1>(norm.matrix_size(), large[1]);
    for (std::int64_t b = begin; b < end; ++b) {
      const auto result = norm.run(x + b * x_size, g + b * g_size, sample, matrices);
      squares[b] = result.square;
      loose[static_cast<std::size_t>(b)] = !result.tight;
    }
  });
  std::vector<std::int64_t> again;
  for (std::size_t b = 0; b < loose.size(); ++b) {
    if (loose[b]) again.push_back(static_cast<std::int64_t>(b));
  }
  if (!again.empty()) conv_wide_norm(plan, x, g, squares, again, threads);
}

template void conv_gram_norm(const ConvPlan&, const float*, const float*, double*, int);
template void conv_gram_norm(const ConvPlan&, const double*, const double*, double*, int);

}  // namespace dpkern::cpu
