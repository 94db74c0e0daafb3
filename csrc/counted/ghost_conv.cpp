// Zeros of the padding are multiplied like other inputs, as in the kernels.

#include "counted/ghost.h"
#include "counted/plain.h"

namespace dpkern::counted {
namespace {

std::int64_t product(const std::int64_t (&size)[3]) { return size[0] * size[1] * size[2]; }

// Where each tap of each output position finds its input, -1 in the padding.
class Windows {
 public:
  explicit Windows(const ConvSizes& s)
      : positions(product(s.output)), taps(product(s.kernel)), inputs(product(s.input)) {
    for (std::int64_t k = 0; k < taps; ++k) {
      const std::int64_t tap[3] = {k / (s.kernel[1] * s.kernel[2]), k / s.kernel[2] % s.kernel[1],
                                   k % s.kernel[2]};
      for (std::int64_t t = 0; t < positions; ++t) {
        const std::int64_t place[3] = {t / (s.output[1] * s.output[2]),
                                       t / s.output[2] % s.output[1], t % s.output[2]};
        std::int64_t at = 0;
        for (int d = 0; d < 3; ++d) {
          const std::int64_t i = place[d] * s.stride[d] + tap[d] * s.dilation[d] - s.padding[d];
          at = at < 0 || i < 0 || i >= s.input[d] ? -1 : at * s.input[d] + i;
        }
        at_.push_back(at);
      }
    }
  }
  std::int64_t at(std::int64_t tap, std::int64_t position) const {
    return at_[static_cast<std::size_t>(tap * positions + position)];
  }
  const std::vector<std::int64_t>& all() const { return at_; }

  const std::int64_t positions, taps, inputs;

 private:
  std::vector<std::int64_t> at_;
};

// One sample; of the input, what some output sees.
template <class W>
class Sample {
 public:
  template <class F>
  Sample(const ConvSizes& sizes, const Windows& windows, const Operand<const F>& x,
         const Operand<const F>& g, std::int64_t b)
      : windows_(windows),
        in_(sizes.in_channels / sizes.groups),
        out_(sizes.out_channels / sizes.groups),
        x_(zeros<W>(sizes.in_channels * windows.inputs)),
        g_(loaded<W>(g, b * sizes.out_channels * windows.positions,
                     sizes.out_channels * windows.positions)) {
    std::vector<char> seen(static_cast<std::size_t>(windows.inputs));
    for (const std::int64_t at : windows.all()) {
      if (at < 0 || seen[static_cast<std::size_t>(at)]) continue;
      seen[static_cast<std::size_t>(at)] = 1;
      for (std::int64_t c = 0; c < sizes.in_channels; ++c) {
        const std::int64_t i = c * windows.inputs + at;
        x_[static_cast<std::size_t>(i)] = Counted<W>(x[b * sizes.in_channels * windows.inputs + i]);
        reached_.push_back(x_[static_cast<std::size_t>(i)]);
      }
    }
  }

  void scale(Counted<W> factor) {
    for (Counted<W>& value : g_) value *= factor;
  }
  const Row<W>& reached() const { return reached_; }
  const Row<W>& gradient() const { return g_; }

  // Adds the gradient's entry [o, c, tap].
  void add(std::int64_t entry, Counted<W>& total) const {
    const std::int64_t tap = entry % windows_.taps, c = entry / windows_.taps % in_;
    const std::int64_t o = entry / windows_.taps / in_;
    const Counted<W>* const from = x_.data() + (o / out_ * in_ + c) * windows_.inputs;
    const Counted<W>* const weight = g_.data() + o * windows_.positions;
    for (std::int64_t t = 0; t < windows_.positions; ++t) {
      const std::int64_t at = windows_.at(tap, t);
      total += weight[t] * (at < 0 ? Counted<W>() : from[at]);
    }
  }

 private:
  const Windows& windows_;
  const std::int64_t in_, out_;
  Row<W> x_, g_, reached_;
};

std::int64_t entries_of(const ConvSizes& s) {
  return s.out_channels * (s.in_channels / s.groups) * product(s.kernel);
}

template <class F>
struct Operands {
  Operand<const F> x, g;
  Operands(const ConvSizes& s, const F* input, const F* gradient)
      : x(input, s.batch * s.in_channels * product(s.input)),
        g(gradient, s.batch * s.out_channels * product(s.output)) {}
};

// Symmetric: <v_s, v_s'> over channels, for s' <= s.
class Gram {
 public:
  template <class F>
  Gram(const Operand<const F>& from, std::int64_t begin, std::int64_t channels,
       std::int64_t positions)
      : positions_(positions) {
    const Row<double> v = loaded<double>(from, begin, channels * positions);
    for (std::int64_t s = 0; s < positions; ++s) {
      for (std::int64_t other = 0; other <= s; ++other) {
        cells_.push_back(dot(v.data() + s, v.data() + other, channels, positions));
      }
    }
  }
  Counted<double> at(std::int64_t s, std::int64_t other) const {
    if (s < other) return at(other, s);
    return cells_[static_cast<std::size_t>(s * (s + 1) / 2 + other)];
  }
  Counted<double> trace() const {
    Counted<double> total;
    for (std::int64_t s = 0; s < positions_; ++s) total += at(s, s);
    return total;
  }

 private:
  const std::int64_t positions_;
  Row<double> cells_;
};

// sum over s, s' of <g_s, g_s'> times the sum over taps k of <x_(s+k), x_(s'+k)>: first along the
// kernel's rows, for all pairs of an input row with one not above it, then along its columns.
Counted<double> gram_square(const ConvSizes& sizes, const Gram& x, const Gram& g) {
  const std::int64_t height = sizes.input[1], width = sizes.input[2];
  const std::int64_t rows = sizes.output[1], columns = sizes.output[2];
  const std::int64_t top = sizes.padding[1], left = sizes.padding[2];
  const auto along = [&](std::int64_t y, std::int64_t i, std::int64_t y_other, std::int64_t j) {
    return static_cast<std::size_t>(((y * columns + i) * height + y_other) * columns + j);
  };
  Row<double> sums = zeros<double>(height * columns * height * columns);
  for (std::int64_t y = 0; y < height; ++y) {
    for (std::int64_t other = 0; other <= y; ++other) {
      for (std::int64_t i = 0; i < columns; ++i) {
        for (std::int64_t j = 0; j < columns; ++j) {
          Counted<double>& sum = sums[along(y, i, other, j)];
          for (std::int64_t k = -left; k < sizes.kernel[2] - left; ++k) {
            const bool inside = i + k >= 0 && i + k < width && j + k >= 0 && j + k < width;
            sum += inside ? x.at(y * width + i + k, other * width + j + k) : Counted<double>();
          }
        }
      }
    }
  }
  Counted<double> diagonal, rest;
  for (std::int64_t s = 0; s < rows * columns; ++s) {
    for (std::int64_t other = 0; other <= s; ++other) {
      const std::int64_t y = s / columns, y_other = other / columns;
      Counted<double>& total = s == other ? diagonal : rest;
      for (std::int64_t k = -top; k < sizes.kernel[1] - top; ++k) {
        const bool inside = y_other + k >= 0 && y + k < height;
        total +=
            g.at(s, other) * (inside ? sums[along(y + k, s % columns, y_other + k, other % columns)]
                                     : Counted<double>());
      }
    }
  }
  return diagonal + 2.0 * rest;
}

}  // namespace

template <class F>
void conv_norm(const ConvSizes& sizes, const F* x, const F* g, double* squares) {
  const Windows windows(sizes);
  const Operands<F> operands(sizes, x, g);
  Operand<double> out(squares, sizes.batch);
  const std::int64_t entries = entries_of(sizes);
  const double slack = gamma(windows.positions + 4) * std::sqrt(static_cast<double>(windows.taps));
  for (std::int64_t b = 0; b < sizes.batch; ++b) {
    const Sample<double> sample(sizes, windows, operands.x, operands.g, b);
    Counted<double> square;
    for (std::int64_t e = 0; e < entries; ++e) {
      Counted<double> entry;
      sample.add(e, entry);
      square += entry * entry;
    }
    const Row<double>&xs = sample.reached(), &gs = sample.gradient();
    const Counted<double> plain = square_of(xs.data(), static_cast<std::int64_t>(xs.size())) *
                                  square_of(gs.data(), static_cast<std::int64_t>(gs.size()));
    const Counted<double> norm = sqrt(square) + slack * sqrt(plain);
    out.store(b, norm * norm * (1 + gamma(entries + 16)));
  }
}

template <class F>
void conv_gram_norm(const ConvSizes& sizes, const F* x, const F* g, double* squares) {
  const Operands<F> operands(sizes, x, g);
  Operand<double> out(squares, sizes.batch);
  const std::int64_t inputs = product(sizes.input), outputs = product(sizes.output);
  const std::int64_t roundings = sizes.in_channels + sizes.out_channels + sizes.kernel[2] +
                                 outputs * (outputs + sizes.kernel[1]) + 16;
  const double slack = gamma(roundings), taps = static_cast<double>(product(sizes.kernel));
  for (std::int64_t b = 0; b < sizes.batch; ++b) {
    const Gram xs(operands.x, b * sizes.in_channels * inputs, sizes.in_channels, inputs);
    const Gram gs(operands.g, b * sizes.out_channels * outputs, sizes.out_channels, outputs);
    const Counted<double> plain = taps * xs.trace() * gs.trace();
    const Counted<double> square = gram_square(sizes, xs, gs) + slack * plain;
    out.store(b, square * (1 + 0x1p-50));
  }
}

template <class F>
void conv_gradient(const ConvSizes& sizes, const F* x, const F* g, F* grads, double* squares) {
  const Windows windows(sizes);
  const Operands<F> operands(sizes, x, g);
  const std::int64_t entries = entries_of(sizes);
  Operand<F> kept(grads, sizes.batch * entries);
  Operand<double> out(squares, sizes.batch);
  for (std::int64_t b = 0; b < sizes.batch; ++b) {
    const Sample<F> sample(sizes, windows, operands.x, operands.g, b);
    Counted<double> square;
    for (std::int64_t e = 0; e < entries; ++e) {
      Counted<F> entry;
      sample.add(e, entry);
      kept.store(b * entries + e, entry);
      const Counted<double> wide(entry);
      square += wide * wide;
    }
    out.store(b, square * (1 + gamma(entries + 4)));
  }
}

template <class F>
void conv_sum(const ConvSizes& sizes, const F* x, const F* g, const F* factors, F* out) {
  const Windows windows(sizes);
  const Operands<F> operands(sizes, x, g);
  const std::int64_t entries = entries_of(sizes);
  const Operand<const F> weights(factors, sizes.batch);
  Operand<F> total(out, entries);
  Row<F> sums = zeros<F>(entries);
  bool any = false;
  for (std::int64_t b = 0; b < sizes.batch; ++b) {
    const Counted<F> factor = weights[b];
    if (factor == F{0}) continue;
    any = true;
    Sample<F> sample(sizes, windows, operands.x, operands.g, b);
    sample.scale(factor);
    for (std::int64_t e = 0; e < entries; ++e) sample.add(e, sums[static_cast<std::size_t>(e)]);
  }
  for (std::int64_t e = 0; any && e < entries; ++e) {
    total.store(e, Counted<F>(total[e]) + sums[static_cast<std::size_t>(e)]);
  }
}

#define DPK_COUNTED(F)                                                            \
  template void conv_norm(const ConvSizes&, const F*, const F*, double*);         \
  template void conv_gram_norm(const ConvSizes&, const F*, const F*, double*);    \
  template void conv_gradient(const ConvSizes&, const F*, const F*, F*, double*); \
  template void conv_sum(const ConvSizes&, const F*, const F*, const F*, F*);
DPK_COUNTED(float)
DPK_COUNTED(double)
#undef DPK_COUNTED

}  // namespace dpkern::counted
