// Convolution gradients, their squares and sums against plain loops in double, over odd shapes.

#include "cpu/ghost_conv.h"

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "check.h"

namespace dpkern::test {
namespace {

using cpu::ConvLayout;

struct Shape {
  std::int64_t in;
  std::int64_t out;
  std::int64_t groups;
  ConvSize input;
  ConvSize kernel;
  ConvSize stride;
  ConvSize padding;
  ConvSize dilation;
};

std::int64_t extent(std::int64_t input, std::int64_t kernel, std::int64_t stride,
                    std::int64_t padding, std::int64_t dilation) {
  return (input + 2 * padding - dilation * (kernel - 1) - 1) / stride + 1;
}

Geometry plan_of(std::int64_t batch, const Shape& s) {
  const ConvSize output{
      extent(s.input.height, s.kernel.height, s.stride.height, s.padding.height, s.dilation.height),
      extent(s.input.width, s.kernel.width, s.stride.width, s.padding.width, s.dilation.width)};
  return {batch, s.in, s.out, s.groups, s.input, output, s.kernel, s.stride, s.padding, s.dilation};
}

std::int64_t entries_of(const Geometry& p) {
  return p.out_channels * (p.in_channels / p.groups) * p.kernel.height * p.kernel.width;
}

// body(index in plain order, index in `layout`) for every entry of a gradient.
template <class F>
void for_every_entry(const Geometry& p, ConvLayout layout, const F& body) {
  const std::int64_t in = p.in_channels / p.groups;
  const std::int64_t taps = p.kernel.height * p.kernel.width;
  for (std::int64_t o = 0; o < p.out_channels; ++o) {
    for (std::int64_t c = 0; c < in; ++c) {
      for (std::int64_t k = 0; k < taps; ++k) {
        const std::int64_t plain = (o * in + c) * taps + k;
        const std::int64_t at = layout == ConvLayout::kInputsLast ? (o * taps + k) * in + c
                                : layout == ConvLayout::kOutputsLast
                                    ? (c * taps + k) * p.out_channels + o
                                    : plain;
        body(static_cast<std::size_t>(plain), static_cast<std::size_t>(at));
      }
    }
  }
}

template <class T>
struct Problem {
  Geometry plan;
  std::vector<T> x;
  std::vector<T> g;
  std::vector<double> gradients;  // [batch][plain order]
  std::vector<double> sizes;      // sums of |x| |g| instead of x g
  std::vector<double> squares;

  explicit Problem(const Geometry& p) : plan(p) {
    std::mt19937 engine(7);
    std::normal_distribution<double> normal;
    const std::int64_t area = p.input.height * p.input.width;
    const std::int64_t positions = p.output.height * p.output.width;
    for (std::int64_t i = 0; i < p.batch * p.in_channels * area; ++i) {
      x.push_back(static_cast<T>(normal(engine)));
    }
    for (std::int64_t i = 0; i < p.batch * p.out_channels * positions; ++i) {
      g.push_back(static_cast<T>(normal(engine)));
    }
    for (std::int64_t b = 0; b < p.batch; ++b) {
      double square = 0;
      for (std::int64_t o = 0; o < p.out_channels; ++o) add_rows(b, o, square);
      squares.push_back(square);
    }
  }

 private:
  void add_rows(std::int64_t b, std::int64_t o, double& square) {
    const std::int64_t in = plan.in_channels / plan.groups;
    const std::int64_t group = o / (plan.out_channels / plan.groups);
    for (std::int64_t c = 0; c < in; ++c) {
      for (std::int64_t ky = 0; ky < plan.kernel.height; ++ky) {
        for (std::int64_t kx = 0; kx < plan.kernel.width; ++kx) {
          double sum = 0, size = 0;
          for (std::int64_t y = 0; y < plan.output.height; ++y) {
            for (std::int64_t z = 0; z < plan.output.width; ++z) {
              const double product = at(b, group * in + c, o, y, z, ky, kx);
              sum += product;
              size += std::fabs(product);
            }
          }
          gradients.push_back(sum);
          sizes.push_back(size);
          square += sum * sum;
        }
      }
    }
  }

  double at(std::int64_t b, std::int64_t c, std::int64_t o, std::int64_t y, std::int64_t z,
            std::int64_t ky, std::int64_t kx) const {
    const auto& p = plan;
    const std::int64_t row = y * p.stride.height + ky * p.dilation.height - p.padding.height;
    const std::int64_t column = z * p.stride.width + kx * p.dilation.width - p.padding.width;
    if (row < 0 || row >= p.input.height || column < 0 || column >= p.input.width) return 0;
    const std::int64_t from =
        ((b * p.in_channels + c) * p.input.height + row) * p.input.width + column;
    const std::int64_t to = ((b * p.out_channels + o) * p.output.height + y) * p.output.width + z;
    return static_cast<double>(x[static_cast<std::size_t>(from)]) *
           static_cast<double>(g[static_cast<std::size_t>(to)]);
  }
};

template <class T>
constexpr bool kSingle = std::is_same_v<T, float>;

template <class T>
void check_above(const std::vector<double>& got, const std::vector<double>& want,
                 const std::string& what) {
  check(got.size() == want.size(), what + ": sizes differ");
  for (std::size_t b = 0; b < got.size(); ++b) {
    const double above = got[b] / want[b] - 1;
    check(want[b] == 0 ? got[b] == 0 : above > -1e-13 && above < (kSingle<T> ? 1e-4 : 1e-10),
          what + ": sample " + std::to_string(b) + " is off by " + std::to_string(above));
  }
}

template <class T>
void compare_gradient(const Problem<T>& problem, int threads, const std::string& where) {
  const Geometry& p = problem.plan;
  const auto batch = static_cast<std::size_t>(p.batch);
  const auto entries = static_cast<std::size_t>(entries_of(p));
  Shifted<T> x(problem.x, 1), g(problem.g, 3);
  Shifted<T> gradients(std::vector<T>(batch * entries), 1);
  Shifted<double> squares(std::vector<double>(batch), 1);
  const ConvLayout layout = cpu::conv_layout(p, !kSingle<T>);
  check(cpu::conv_order({p, !kSingle<T>}, threads) == static_cast<int>(layout), where + ": order");
  cpu::ConvGradient<T> call{};
  call.x = x.data(), call.g = g.data(), call.plan = p;
  call.grads = gradients.data(), call.squares = squares.data();
  cpu::conv_gradient(call, threads);
  const double unit = kSingle<T> ? 0x1p-24 : 0x1p-53;
  const auto roundings = static_cast<double>(p.output.height * p.output.width + 2);
  std::vector<double> kept(batch);
  for (std::size_t b = 0; b < batch; ++b) {
    for_every_entry(p, layout, [&](std::size_t plain, std::size_t at) {
      const auto got = static_cast<double>(gradients.data()[b * entries + at]);
      const double away = std::fabs(got - problem.gradients[b * entries + plain]);
      check(away <= 1.01 * unit * roundings * problem.sizes[b * entries + plain],
            where + ": gradient entry " + std::to_string(plain));
      kept[b] += got * got;
    });
  }
  check_above<T>(squares.values(), kept, where + ": squares of what is kept");
}

template <class T>
void compare_norm(const Problem<T>& problem, int threads, const std::string& where) {
  const Geometry& p = problem.plan;
  Shifted<T> x(problem.x, 1), g(problem.g, 3);
  Shifted<double> squares(std::vector<double>(static_cast<std::size_t>(p.batch)), 1);
  cpu::ConvNorm<T> call{};
  call.x = x.data(), call.g = g.data(), call.plan = p, call.squares = squares.data();
  call.route = cpu::ConvRoute::kDirect;
  cpu::conv_norm(call, threads);
  check_above<T>(squares.values(), problem.squares, where + ": direct");
  if (p.groups != 1) return;
  call.route = cpu::ConvRoute::kGram;
  cpu::conv_norm(call, threads);
  check_above<T>(squares.values(), problem.squares, where + ": gram");
}

template <class T>
void compare_sum(const Problem<T>& problem, int threads, const std::string& where) {
  const Geometry& p = problem.plan;
  const auto entries = static_cast<std::size_t>(entries_of(p));
  std::vector<T> x = problem.x;
  std::vector<T> factors;
  for (std::int64_t b = 0; b < p.batch; ++b) factors.push_back(static_cast<T>(b == 1 ? 0 : 0.5));
  for (std::size_t i = 0; p.batch > 1 && i < x.size() / static_cast<std::size_t>(p.batch); ++i) {
    x[x.size() / static_cast<std::size_t>(p.batch) + i] = std::numeric_limits<T>::quiet_NaN();
  }
  Shifted<T> from(x, 1), g(problem.g, 3), weights(factors, 1);
  Shifted<T> total(std::vector<T>(entries, T{1}), 1);
  cpu::ConvSum<T> call{};
  call.x = from.data(), call.g = g.data(), call.factors = weights.data();
  call.out = total.data(), call.plan = p;
  cpu::conv_sum(call, threads);
  const double unit = kSingle<T> ? 0x1p-24 : 0x1p-53;
  const auto roundings =
      static_cast<double>(p.output.height * p.output.width * (p.batch + 1) + p.batch + 8);
  for (std::size_t i = 0; i < entries; ++i) {
    double want = 1, size = 1;
    for (std::size_t b = 0; b < factors.size(); ++b) {
      want += static_cast<double>(factors[b]) * problem.gradients[b * entries + i];
      size += static_cast<double>(factors[b]) * problem.sizes[b * entries + i];
    }
    check(std::fabs(static_cast<double>(total.data()[i]) - want) <= unit * roundings * size,
          where + ": sum entry " + std::to_string(i));
  }
  for (T& factor : factors) factor *= T{1 << 13};
  Shifted<T> many(factors, 3);
  Shifted<std::int32_t> whole(std::vector<std::int32_t>(entries, 7), 1);
  cpu::ConvIntegerSum<T> integers{};
  integers.x = from.data(), integers.g = g.data(), integers.factors = many.data();
  integers.out = whole.data(), integers.plan = p;
  cpu::conv_integer_sum(integers, threads);
  for (std::size_t i = 0; i < entries; ++i) {
    double want = 7, size = 1;
    for (std::size_t b = 0; b < factors.size(); ++b) {
      want += static_cast<double>(factors[b]) * problem.gradients[b * entries + i];
      size += static_cast<double>(factors[b]) * problem.sizes[b * entries + i];
    }
    // One more or less of each sample, where a rounding crosses an integer.
    const double off = std::fabs(static_cast<double>(whole.data()[i]) - want);
    check(off <= static_cast<double>(p.batch) + unit * roundings * size,
          where + ": integer " + std::to_string(i));
  }
  Shifted<T> clean(problem.x, 1);
  Shifted<double> errors(std::vector<double>(static_cast<std::size_t>(p.batch)), 1);
  cpu::ConvSumError<T> error{};
  error.x = clean.data(), error.g = g.data(), error.plan = p, error.errors = errors.data();
  cpu::conv_sum_error(error, threads);
  for (std::size_t b = 0; b < factors.size(); ++b) {
    double sizes = 0;  // of the sums of absolute products, which the bound is a multiple of
    for (std::size_t i = 0; i < entries; ++i) {
      sizes += problem.sizes[b * entries + i] * problem.sizes[b * entries + i];
    }
    const double least = static_cast<double>(p.output.height * p.output.width) * unit;
    check(errors.data()[b] >= least * std::sqrt(sizes), where + ": error");
  }
}

std::vector<Shape> shapes() {
  constexpr ConvSize one{1, 1};
  return {
      {1, 6, 1, {12, 13}, {5, 5}, one, {2, 2}, one},
      {6, 16, 1, {9, 9}, {5, 5}, one, {0, 0}, one},
      {3, 17, 1, {7, 9}, {3, 3}, one, {1, 1}, one},
      {16, 16, 1, {6, 8}, {3, 3}, one, {1, 1}, one},
      {33, 9, 1, {5, 4}, {3, 3}, one, {1, 1}, one},
      {16, 20, 1, {9, 7}, {3, 3}, {2, 2}, {1, 1}, one},
      {5, 32, 1, {8, 8}, {1, 1}, {2, 2}, {0, 0}, one},
      {2, 3, 1, {11, 12}, {2, 7}, {1, 3}, {3, 0}, {2, 1}},
      {4, 19, 1, {1, 30}, {1, 11}, one, {0, 3}, one},
      {4, 19, 1, {1, 30}, {1, 3}, one, {0, 0}, {1, 4}},
      {2, 2, 1, {3, 3}, {2, 2}, one, {3, 3}, one},
      {6, 6, 6, {7, 7}, {3, 3}, one, {1, 1}, one},
      {4, 40, 2, {6, 6}, {3, 3}, one, {1, 1}, one},
      {34, 6, 2, {5, 6}, {3, 2}, one, {1, 1}, one},
      {1, 1, 1, {1, 1}, {1, 1}, one, {0, 0}, one},
  };
}

template <class T>
std::int64_t compare_type() {
  std::int64_t cases = 0;
  for (const Shape& shape : shapes()) {
    for (const std::int64_t batch : {0, 1, 4}) {
      const Problem<T> problem(plan_of(batch, shape));
      for_every_setting([&](int threads, const std::string& setting) {
        const std::string where = "convolution " + std::to_string(shape.in) + " -> " +
                                  std::to_string(shape.out) + ", batch " + std::to_string(batch) +
                                  (kSingle<T> ? ", float" : ", double") + setting;
        compare_gradient(problem, threads, where);
        compare_norm(problem, threads, where);
        compare_sum(problem, threads, where);
        ++cases;
      });
    }
  }
  return cases;
}

}  // namespace

std::int64_t test_ghost_conv() { return compare_type<float>() + compare_type<double>(); }

}  // namespace dpkern::test
