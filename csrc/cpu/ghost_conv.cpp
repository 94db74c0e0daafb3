#include "cpu/ghost_conv.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

#include "cpu/exact.h"
#include "cpu/ghost_conv_direct.h"
#include "cpu/ghost_conv_pack.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace dpkern::cpu {
namespace {

constexpr std::int64_t kPositionsOfSum = 256;  // positions between two loads of the sums
constexpr std::int64_t kBytesOfSum = 1 << 19;  // bytes of the samples packed for them

[[maybe_unused]] constexpr std::int64_t kBytesWorthLargePages = 4 << 20;

template <class T>
constexpr double kUnit = static_cast<double>(std::numeric_limits<T>::epsilon()) / 2;

// Page faults of 4 KiB would cost more than the computation; where it fails nothing changes.
void ask_for_large_pages([[maybe_unused]] void* data, [[maybe_unused]] std::int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr std::uintptr_t kPage = 4096;
  if (bytes < kBytesWorthLargePages) return;
  const auto begin = (reinterpret_cast<std::uintptr_t>(data) + kPage - 1) / kPage * kPage;
  const auto end =
      (reinterpret_cast<std::uintptr_t>(data) + static_cast<std::uintptr_t>(bytes)) / kPage * kPage;
  static_cast<void>(madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE));
#endif
}

std::int64_t entries_of(const Geometry& plan) {
  return plan.out_channels * (plan.in_channels / plan.groups) * plan.kernel.height *
         plan.kernel.width;
}

std::int64_t area_of(ConvSize size) { return size.height * size.width; }

// Sums of squares have at most 108 terms of type T inside some tiles, and are float64 above them.
template <class T>
double inflated(double squares, std::int64_t additions) {
  return squares * (1 + 128 * kUnit<T> + static_cast<double>(additions) * kUnit<double>);
}

// Whether squares of floats neither overflowed nor lost anything that matters at the small end.
bool in_range(double squares) { return squares > 1e-24 && squares < 1e37; }

// sum over rows and positions of weights[position] x[row, position]^2.
template <class In>
double weighted_squares(const In* x, std::int64_t rows, const std::vector<double>& weights) {
  double total = 0;
  versioned_by_width([&](auto width) DPK_INLINE {
    constexpr int kSums = 16, kLanes = decltype(width)::value / static_cast<int>(sizeof(double));
    const auto count = static_cast<std::int64_t>(weights.size());
    const double* const weight = weights.data();
    Vector<double, kLanes> sums[kSums / kLanes] = {};
    double rest = 0;
    const In* row = x;
    for (std::int64_t r = 0; r < rows; ++r, row += count) {
      std::int64_t i = 0;
      for (; i + kSums <= count; i += kSums) {
#pragma GCC unroll 4
        for (int k = 0; k < kSums / kLanes; k += 2) {
          Vector<double, kLanes> value[2], factor[2];
          load_two<kLanes>(row + i + k * kLanes, value);
          load_two<kLanes>(weight + i + k * kLanes, factor);
          for (int j = 0; j < 2; ++j) sums[k + j] += factor[j] * (value[j] * value[j]);
        }
      }
      for (; i < count; ++i) {
        const double value = static_cast<double>(row[i]);
        rest += weight[i] * (value * value);
      }
    }
    total = total_of<kSums>(sums, rest);
  });
  return total;
}

// The number of times that the kernel touches each input position along one dimension.
std::vector<double> touches(std::int64_t input, std::int64_t output, std::int64_t kernel,
                            std::int64_t stride, std::int64_t padding, std::int64_t dilation) {
  std::vector<double> count(static_cast<std::size_t>(input));
  for (std::int64_t o = 0; o < output; ++o) {
    for (std::int64_t k = 0; k < kernel; ++k) {
      const std::int64_t at = o * stride + k * dilation - padding;
      if (at >= 0 && at < input) count[static_cast<std::size_t>(at)] += 1;
    }
  }
  return count;
}

// Squares of a sample's input and output gradient, which bound sums of absolute products.
class TouchedSquares {
 public:
  explicit TouchedSquares(const Geometry& plan) : plan_(plan) {
    const auto rows = touches(plan.input.height, plan.output.height, plan.kernel.height,
                              plan.stride.height, plan.padding.height, plan.dilation.height);
    const auto columns = touches(plan.input.width, plan.output.width, plan.kernel.width,
                                 plan.stride.width, plan.padding.width, plan.dilation.width);
    for (const double row : rows) {
      for (const double column : columns) touched_.push_back(row * column);
    }
  }

  // At least the sum over all entries of (sum over positions of sqrt(weight) |x| |g|)^2.
  template <class In>
  double products(const In* x, const In* g, const std::vector<double>& weights) const {
    const std::int64_t in = plan_.in_channels / plan_.groups;
    const std::int64_t out = plan_.out_channels / plan_.groups;
    double total = 0;
    for (std::int64_t i = 0; i < plan_.groups; ++i) {
      total += weighted_squares(x + i * in * area_of(plan_.input), in, touched_) *
               weighted_squares(g + i * out * area_of(plan_.output), out, weights);
    }
    return total;
  }

 private:
  const Geometry plan_;
  std::vector<double> touched_;  // [input position]
};

// Squared norms from above, one sample after another; docs/ghost_conv.md proves the bound.
template <class T, class In>
class UpperNorm {
 public:
  UpperNorm(const Geometry& plan, std::int64_t longest)
      : plan_(plan), conv_(plan, ConvLayout::kPlain, longest), touched_(plan) {
    roundings_.resize(static_cast<std::size_t>(area_of(plan.output)));
    for (const Segment& s : conv_.segments()) {
      // A product is rounded once itself and once in every addition until the spill.
      auto left = static_cast<double>(s.rows * s.columns + 1);
      for (std::int64_t y = 0; y < s.rows; ++y) {
        for (std::int64_t x = 0; x < s.columns; ++x, --left) {
          const std::int64_t at = (s.row + y) * plan.output.width + s.column + x;
          roundings_[static_cast<std::size_t>(at)] = left * left;
        }
      }
    }
  }

  std::int64_t vector_size() const { return conv_.vector_size(); }
  std::int64_t scalar_size() const { return conv_.scalar_size(); }

  struct Result {
    double square;
    bool tight;
  };

  Result run(const In* x, const In* g, T* vectors, T* scalars) const {
    const double plain = touched_.products(x, g, roundings_);
    if (plain == 0) return {0, true};
    const auto squares = conv_.run(x, g, vectors, scalars, nullptr);
    const auto spills = static_cast<double>(conv_.segments().size());
    const auto entries = static_cast<double>(entries_of(plan_));
    const double smallest = static_cast<double>(std::numeric_limits<T>::denorm_min());
    const double within = 1.01 * kUnit<T> * std::sqrt(plain);
    const double between = spills > 1 ? 1.01 * kUnit<T> * std::sqrt(spills * squares.all) : 0;
    const double underflow =
        2 * smallest * std::sqrt(entries) * static_cast<double>(area_of(plan_.output)) +
        kUnit<T> * spills * std::sqrt(entries * smallest);
    const double sure = inflated<T>(squares.last, conv_.additions());
    const double norm = std::sqrt(sure) + within + between + underflow;
    const double square = norm * norm * (1 + 16 * kUnit<double>);
    // The exact norm may lie as far below the computed one as the bound lies above it.
    const bool tight = in_range(squares.last) && norm - std::sqrt(sure) < 2.2e-5 * norm;
    return {square, tight};
  }

 private:
  const Geometry plan_;
  const DirectConv<T, In> conv_;
  const TouchedSquares touched_;
  std::vector<double> roundings_;  // [output position], squared
};

template <class T, class In>
void upper_norms(const Geometry& plan, std::int64_t longest, const In* x, const In* g,
                 double* squares, const std::vector<std::int64_t>& samples,
                 std::vector<char>* loose, int threads) {
  const UpperNorm<T, In> norm(plan, longest);
  const std::int64_t x_size = plan.in_channels * area_of(plan.input);
  const std::int64_t g_size = plan.out_channels * area_of(plan.output);
  const auto count = static_cast<std::int64_t>(samples.size());
  parallel_for(count, 1, threads, [&](std::int64_t begin, std::int64_t end) {
    std::unique_ptr<T[]> large[2];
    T* const vectors = conv_scratch<T, 0>(norm.vector_size(), large[0]);
    T* const scalars = conv_scratch<T, 1>(norm.scalar_size(), large[1]);
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t b = samples[static_cast<std::size_t>(i)];
      const auto result = norm.run(x + b * x_size, g + b * g_size, vectors, scalars);
      squares[b] = result.square;
      if (loose != nullptr) (*loose)[static_cast<std::size_t>(i)] = !result.tight;
    }
  });
}

}  // namespace

template <class In>
void conv_wide_norm(const Geometry& plan, const In* x, const In* g, double* squares,
                    const std::vector<std::int64_t>& samples, int threads) {
  upper_norms<double, In>(plan, 0, x, g, squares, samples, nullptr, threads);
}

std::int64_t conv_order(const ConvOrder& call, int) {
  return static_cast<std::int64_t>(conv_layout(call.plan, call.wide));
}

// grads [batch][order of conv_order]; squares [batch]: of these numbers, from above.
template <class T>
void conv_gradient(const ConvGradient<T>& call, int threads) {
  const Geometry& plan = call.plan;
  const DirectConv<T, T> conv(plan, conv_layout(plan, sizeof(T) == sizeof(double)), 0);
  const std::int64_t x_size = plan.in_channels * area_of(plan.input);
  const std::int64_t g_size = plan.out_channels * area_of(plan.output);
  const std::int64_t entries = entries_of(plan);
  ask_for_large_pages(call.grads, plan.batch * entries * static_cast<std::int64_t>(sizeof(T)));
  parallel_for(plan.batch, 1, threads, [&](std::int64_t begin, std::int64_t end) {
    std::unique_ptr<T[]> large[2];
    T* const vectors = conv_scratch<T, 0>(conv.vector_size(), large[0]);
    T* const scalars = conv_scratch<T, 1>(conv.scalar_size(), large[1]);
    for (std::int64_t b = begin; b < end; ++b) {
      T* const gradient = call.grads + b * entries;
      double square =
          conv.run(call.x + b * x_size, call.g + b * g_size, vectors, scalars, gradient).last;
      if (std::is_same_v<T, float> && !in_range(square)) square = power_sum(gradient, entries, 2);
      call.squares[b] = inflated<T>(square, conv.additions());
    }
  });
}

// squares [batch]: of the exact gradients, from above; directly unless the route is Gram's.
template <class T>
void conv_norm(const ConvNorm<T>& call, int threads) {
  if (call.route == ConvRoute::kGram) return conv_gram_norm(call, threads);
  const Geometry& plan = call.plan;
  std::vector<std::int64_t> samples(static_cast<std::size_t>(plan.batch));
  for (std::size_t b = 0; b < samples.size(); ++b) samples[b] = static_cast<std::int64_t>(b);
  if constexpr (std::is_same_v<T, double>) {
    conv_wide_norm(plan, call.x, call.g, call.squares, samples, threads);
  } else {
    // Random products keep 1 / sqrt(positions) of their plain sum: so short are the runs of floats.
    const double positions = static_cast<double>(std::max<std::int64_t>(1, area_of(plan.output)));
    const auto longest = static_cast<std::int64_t>(std::max(4.0, 360 / std::sqrt(positions)));
    std::vector<char> loose(samples.size());
    upper_norms<float, float>(plan, longest, call.x, call.g, call.squares, samples, &loose,
                              threads);
    std::vector<std::int64_t> again;
    for (std::size_t i = 0; i < samples.size(); ++i) {
      if (loose[i]) again.push_back(samples[i]);
    }
    if (!again.empty()) conv_wide_norm(plan, call.x, call.g, call.squares, again, threads);
  }
}

namespace {

// out [co, ci / groups, kh, kw] += what `add` makes of runs of samples; those of factor 0 are not
// read. S is the type of the sums.
template <class S, class T, class Add>
void sum_samples(const Geometry& plan, const DirectConv<T, T>& conv, const T* x, const T* g,
                 const T* factors, S* out, int threads, const Add& add) {
  if (plan.batch == 0) return;
  const std::int64_t x_size = plan.in_channels * area_of(plan.input);
  const std::int64_t g_size = plan.out_channels * area_of(plan.output);
  // Enough samples at a time to hide the load and store of the sums.
  const std::int64_t sample_bytes =
      (conv.vector_size() + conv.scalar_size()) * static_cast<std::int64_t>(sizeof(T));
  const std::int64_t most = std::clamp<std::int64_t>(
      std::min(kPositionsOfSum / std::max<std::int64_t>(1, area_of(plan.output)),
               kBytesOfSum / sample_bytes),
      1, plan.batch);
  const int team = useful_threads(plan.batch, 1, threads);
  // Not a worker's own memory: its thread may end before the sums are added up.
  const std::int64_t each = conv.sums_size();
  const std::unique_ptr<S[]> all(new S[static_cast<std::size_t>(each * team)]);
  std::vector<S*> own(static_cast<std::size_t>(team), nullptr);
  const auto share = [&](int index, int parts) {
    std::unique_ptr<T[]> scratch[2];
    T* const vectors = conv_scratch<T, 0>(most * conv.vector_size(), scratch[0]);
    T* const scalars = conv_scratch<T, 1>(most * conv.scalar_size(), scratch[1]);
    S* const sums = all.get() + each * index;
    std::fill(sums, sums + each, S{0});
    own[static_cast<std::size_t>(index)] = sums;
    const Range range = part_of(plan.batch, index, parts);
    for (std::int64_t b = range.begin; b < range.end;) {
      std::int64_t count = 0;  // neighbours that are used: 0 times NaN would not vanish
      while (count < most && b + count < range.end && factors[b + count] != 0) ++count;
      if (count > 0) {
        add(x + b * x_size, g + b * g_size, factors + b, count, vectors, scalars, sums);
      }
      b += std::max<std::int64_t>(1, count);
    }
  };
  if (team <= 1) {
    share(0, 1);
  } else {
#if defined(_OPENMP)
#pragma omp parallel num_threads(team)
#endif
    share(thread_index(), team_size());
  }
  own.erase(std::remove(own.begin(), own.end(), nullptr), own.end());
  conv.finish(own, threads, out);
}

}  // namespace

template <class T>
void conv_sum(const ConvSum<T>& call, int threads) {
  const DirectConv<T, T> conv(call.plan, ConvLayout::kPlain, 0);
  sum_samples(call.plan, conv, call.x, call.g, call.factors, call.out, threads,
              [&](const auto&... samples) { conv.add(samples...); });
}

// The same in integers, sample by sample.
template <class T>
void conv_integer_sum(const ConvIntegerSum<T>& call, int threads) {
  const DirectConv<T, T> conv(call.plan, ConvLayout::kPlain, 0);
  sum_samples(call.plan, conv, call.x, call.g, call.factors, call.out, threads,
              [&](const auto&... samples) { conv.add_integers(samples...); });
}

// errors [batch]: at least the norm of the difference between the gradient that is truncated and
// the one in real arithmetic.
template <class T>
void conv_sum_error(const ConvSumError<T>& call, int threads) {
  const Geometry& plan = call.plan;
  const TouchedSquares touched(plan);
  const std::int64_t positions = area_of(plan.output), roundings = positions + kOtherRoundings;
  const double flushed = 2 * static_cast<double>(roundings) * kFlushed<T> *
                         std::sqrt(static_cast<double>(entries_of(plan)));
  const std::vector<double> ones(static_cast<std::size_t>(positions), 1.0);
  parallel_for(plan.batch, 1, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t b = begin; b < end; ++b) {
      const T* const x = call.x + b * plan.in_channels * area_of(plan.input);
      const T* const g = call.g + b * plan.out_channels * positions;
      call.errors[b] = chain_error<T>(roundings, std::sqrt(touched.products(x, g, ones))) + flushed;
    }
  });
}

template void conv_gradient<float>(const ConvGradient<float>&, int);
template void conv_gradient<double>(const ConvGradient<double>&, int);
template void conv_sum<float>(const ConvSum<float>&, int);
template void conv_sum<double>(const ConvSum<double>&, int);
template void conv_integer_sum<float>(const ConvIntegerSum<float>&, int);
template void conv_integer_sum<double>(const ConvIntegerSum<double>&, int);
template void conv_sum_error<float>(const ConvSumError<float>&, int);
template void conv_sum_error<double>(const ConvSumError<double>&, int);
template void conv_wide_norm(const Geometry&, const float*, const float*, double*,
                             const std::vector<std::int64_t>&, int);
template void conv_wide_norm(const Geometry&, const double*, const double*, double*,
                             const std::vector<std::int64_t>&, int);
template void conv_norm<float>(const ConvNorm<float>&, int);
template void conv_norm<double>(const ConvNorm<double>&, int);

}  // namespace dpkern::cpu
