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

// One dimension of the input, padded. Places are ordered by their residue modulo the stride: then
// tap k sees output o's input at the place of o plus `tap(k)`, and outputs are neighbours.
struct Axis {
  std::int64_t input;
  std::int64_t output;
  std::int64_t kernel;
  std::int64_t stride;
  std::int64_t padding;
  std::int64_t dilation;
  std::int64_t share;                 // places of each residue
  std::vector<std::int64_t> reached;  // inputs that some output sees, ascending
  std::vector<std::int64_t> index;    // of each input among them

  Axis(std::int64_t in, std::int64_t out, std::int64_t taps, std::int64_t step, std::int64_t pad,
       std::int64_t spread)
      : input(in),
        output(out),
        kernel(taps),
        stride(step),
        padding(pad),
        dilation(spread),
        share((in + 2 * pad + step - 1) / step) {
    std::vector<char> seen(static_cast<std::size_t>(input));
    for (std::int64_t o = 0; o < output; ++o) {
      for (std::int64_t k = 0; k < kernel; ++k) {
        if (holds(input_of(o, k))) seen[static_cast<std::size_t>(input_of(o, k))] = 1;
      }
    }
    for (std::int64_t at = 0; at < input; ++at) {
      index.push_back(static_cast<std::int64_t>(reached.size()));
      if (seen[static_cast<std::size_t>(at)]) reached.push_back(at);
    }
  }

  bool holds(std::int64_t at) const { return at >= 0 && at < input; }
  std::int64_t input_of(std::int64_t o, std::int64_t k) const {
    return o * stride + k * dilation - padding;
  }
  std::int64_t place(std::int64_t at) const {
    return (at + padding) % stride * share + (at + padding) / stride;
  }
  std::int64_t tap(std::int64_t k) const { return place(k * dilation - padding); }
  std::int64_t places() const { return stride * share; }
  std::int64_t count() const { return static_cast<std::int64_t>(reached.size()); }
  std::int64_t index_of(std::int64_t at) const { return index[static_cast<std::size_t>(at)]; }
};

// || grad ||^2 = sum over pairs of output positions s, s' of <g_s, g_s'> times the sum over taps k
// of <x_{s + k}, x_{s' + k}>: two Gram matrices in float64, both symmetric, so that s <= s'
// suffices. Columns are places, `pitch_` from one image row to the next, which leaves zeros
// between the rows of an image; what stands between the outputs of two rows meets zeros of g's.
class GramNorm {
 public:
  explicit GramNorm(const Geometry& plan)
      : plan_(plan),
        rows_(plan.input.height, plan.output.height, plan.kernel.height, plan.stride.height,
              plan.padding.height, plan.dilation.height),
        columns_(plan.input.width, plan.output.width, plan.kernel.width, plan.stride.width,
                 plan.padding.width, plan.dilation.width),
        pitch_(columns_.places()),
        sum_columns_(rounded_up(rows_.places() * pitch_) + 2 * kStep),
        x_{plan.in_channels,
           rows_.count() * columns_.count(),
           sum_columns_ + rounded_up(pitch_),
           {}},
        g_{plan.out_channels,
           plan.output.height * plan.output.width,
           rounded_up(plan.output.height * pitch_) + kStep,
           {}} {
    for (const std::int64_t y : rows_.reached) {
      for (const std::int64_t x : columns_.reached) {
        x_.places.push_back(rows_.place(y) * pitch_ + columns_.place(x));
      }
    }
    for (std::int64_t y = 0; y < plan.output.height; ++y) {
      for (std::int64_t x = 0; x < plan.output.width; ++x) g_.places.push_back(y * pitch_ + x);
    }
    for (std::int64_t first = 0; first < std::min(plan.stride.height, plan.input.height); ++first) {
      // Rows of one residue follow each other; those that no output sees are zero.
      blocks_.push_back({first, (plan.input.height - first - 1) / plan.stride.height + 1});
    }
  }

  // Entries of the scratches: a sample as float64, and the matrices, which start from zero.
  std::int64_t sample_size() const {
    return std::max(x_.channels * x_.positions, g_.channels * g_.positions) +
           kMostVectors * kMostLanes;
  }
  std::int64_t matrix_size() const {
    return x_.positions * x_.columns + g_.positions * g_.columns +
           rows_.count() * plan_.output.width * sum_columns_;
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
    if (x_.positions == plan_.input.height * plan_.input.width) {
      planes(x, 1, {1, x_.channels * x_.positions, 0, 0}, sample, 0);
    } else {
      copy_reached(x, sample);
    }
    plain *= gram(x_, sample, x_gram);
    planes(g, 1, {1, g_.channels * g_.positions, 0, 0}, sample, 0);
    plain *= gram(g_, sample, g_gram);
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

  // Rows first, first + stride, ... of the input.
  struct Block {
    std::int64_t first;
    std::int64_t count;
  };

  template <class In>
  void copy_reached(const In* x, double* to) const {
    for (std::int64_t c = 0; c < x_.channels; ++c, x += rows_.input * columns_.input) {
      for (const std::int64_t row : rows_.reached) {
        const In* const from = x + row * columns_.input;
        for (const std::int64_t at : columns_.reached) *to++ = static_cast<double>(from[at]);
      }
    }
  }

  // matrix[s][place(s')] = <v_s, v_s'> for s <= s', else untouched; returns the trace.
  double gram(const Side& side, const double* sample, double* matrix) const {
    const std::int64_t count = side.positions;
    const std::int64_t* const places = side.places.data();
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

  // sums[(y, x)][place of (y', x')] = sum over kernel columns k of gram[(y, x's input of k)][(y',
  // the input of k of x')] for y' >= y; x is an output column, y and y' are input rows.
  void add_along_rows(const double* x_gram, double* sums) const {
    std::vector<const double*> taps(static_cast<std::size_t>(plan_.kernel.width));
    const double** const from = taps.data();
    versioned([&]() DPK_INLINE {
      double* to = sums;
      for (std::int64_t row = 0; row < rows_.count(); ++row) {
        const std::int64_t y = rows_.reached[static_cast<std::size_t>(row)];
        for (std::int64_t x = 0; x < plan_.output.width; ++x, to += sum_columns_) {
          int count = 0;
          for (std::int64_t k = 0; k < plan_.kernel.width; ++k) {
            const std::int64_t at = columns_.input_of(x, k);
            if (!columns_.holds(at)) continue;
            const std::int64_t position = row * columns_.count() + columns_.index_of(at);
            from[count++] = x_gram + position * x_.columns + columns_.tap(k);
          }
          for (const Block& block : blocks_) {
            const std::int64_t skipped =
                std::max<std::int64_t>(0, (y - block.first + rows_.stride - 1) / rows_.stride);
            const std::int64_t start = rows_.place(block.first);
            const std::int64_t end = (start + block.count) * pitch_;
            for (std::int64_t j = (start + skipped) * pitch_; j < end; j += kStep) {
              Step total{};
              for (int i = 0; i < count; ++i) total += load_step(from[i] + j);
              __builtin_memcpy(to + j, &total, sizeof(total));
            }
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
      const std::int64_t end = plan_.output.height * pitch_;
      Step total{};
      for (std::int64_t y = 0; y < plan_.output.height; ++y) {
        for (std::int64_t x = 0; x < width; ++x) {
          Step part{};
          const double* const weights = g_gram + (y * width + x) * g_.columns;
          for (std::int64_t k = 0; k < plan_.kernel.height; ++k) {
            const std::int64_t at = rows_.input_of(y, k);
            if (!rows_.holds(at)) continue;
            const double* const from =
                sums + (rows_.index_of(at) * width + x) * sum_columns_ + rows_.tap(k) * pitch_;
            for (std::int64_t j = y * pitch_; j < end; j += kStep) {
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
  const Axis rows_;
  const Axis columns_;
  const std::int64_t pitch_;
  const std::int64_t sum_columns_;
  Side x_;
  Side g_;
  std::vector<Block> blocks_;
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
