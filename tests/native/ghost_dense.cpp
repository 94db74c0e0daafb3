// Ghost kernels of linear, embedding and normalisation layers over odd sizes and offsets: near a
// plain double computation for every instruction set, the same bits for every number of threads.

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <random>
#include <type_traits>

#include "check.h"
#include "cpu/ghost_embedding.h"
#include "cpu/ghost_linear.h"
#include "cpu/ops.h"

namespace dpkern::test {
namespace {

using Size = std::int64_t;

template <class F>
constexpr double kRounding = std::is_same_v<F, float> ? 2e-5 : 1e-13;
constexpr int kMany = 1 << 12;
template <class F>
constexpr double kExcess = std::is_same_v<F, float> ? 1e-4 : 1e-10;

std::size_t index_of(Size i) { return static_cast<std::size_t>(i); }

template <class F>
std::vector<F> random_values(Size count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal(0, 1);
  std::vector<F> values(index_of(count));
  for (F& x : values) x = static_cast<F>(normal(random));
  return values;
}

template <class F>
void check_near(const std::vector<F>& got, const std::vector<double>& want,
                const std::vector<double>& sizes, const std::string& what) {
  check(got.size() == want.size(), what + ": sizes differ");
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double off = std::fabs(static_cast<double>(got[i]) - want[i]);
    check(off <= kRounding<F> * (1 + sizes[i]), what + ": element " + std::to_string(i));
  }
}

// Factors that lead to integers of some thousands.
template <class F>
std::vector<F> many(std::vector<F> factors) {
  for (F& factor : factors) factor *= kMany;
  return factors;
}

// Sums of integers: of each sample's term one more or less where a rounding crosses an integer.
template <class F>
void check_whole(const std::vector<std::int32_t>& got, const std::vector<double>& want,
                 const std::vector<double>& sizes, Size batch, const std::string& what) {
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double off = std::fabs(static_cast<double>(got[i]) - 7 - kMany * want[i]);
    const double rounding = kRounding<F> * kMany * sizes[i];
    check(off <= static_cast<double>(batch) + rounding, what + ": element " + std::to_string(i));
  }
}

template <class F>
void append(const std::vector<std::int32_t>& integers, std::vector<F>& outputs) {
  for (const std::int32_t x : integers) outputs.push_back(static_cast<F>(x));
}

// At least the true square, and hardly above it.
template <class F>
void check_square(double got, double want, const std::string& what) {
  check(got >= want * (1 - 1e-13) && got <= want * (1 + kExcess<F>), what + ": square");
}

// body(threads, where) returns all outputs in a row; equal bits for every number of threads.
template <class F, class Body>
Size sweep(const std::string& what, const Body& body) {
  Size cases = 0;
  std::map<cpu::Isa, std::vector<F>> first;
  for_every_setting([&](int threads, const std::string& setting) {
    const std::vector<F> outputs = body(threads, what + setting);
    const auto seen = first.find(cpu::isa());
    if (seen == first.end()) {
      first.emplace(cpu::isa(), outputs);
    } else {
      check_same(outputs, seen->second, what + setting);
    }
    ++cases;
  });
  return cases;
}

template <class F>
double square_of(const F* numbers, Size count) {
  double square = 0;
  for (Size i = 0; i < count; ++i) {
    const auto x = static_cast<double>(numbers[i]);
    square += x * x;
  }
  return square;
}

// Products of vectors of integers: no longer than the gradient, sums of what each sample makes
// alone, and the same on every processor.
template <class F>
Size test_factored(const cpu::LinearShape& shape) {
  Shifted<F> a(random_values<F>(shape.batch * shape.inputs, 1), 1);
  Shifted<F> g(random_values<F>(shape.batch * shape.outputs, 2), 3);
  Shifted<F> factors(many(random_values<F>(shape.batch, 3)), 1);
  const auto sum = [&](Size first, Size count, int threads) {
    Shifted<std::int32_t> out(std::vector<std::int32_t>(index_of(shape.inputs * shape.outputs)), 1);
    cpu::linear_integer_sum<F>(
        {a.data() + first * shape.inputs, g.data() + first * shape.outputs, factors.data() + first,
         out.data(), cpu::LinearRounding::kFactors, count, 1, shape.inputs, shape.outputs},
        threads);
    return out.values();
  };
  const std::string what =
      "factored " + std::to_string(shape.inputs) + " x " + std::to_string(shape.outputs);
  std::vector<std::int32_t> total(index_of(shape.inputs * shape.outputs));
  for (Size b = 0; b < shape.batch; ++b) {
    const auto alone = sum(b, 1, 1);
    const double factor = static_cast<double>(factors.data()[b]);
    const double most = factor * factor * square_of(a.data() + b * shape.inputs, shape.inputs) *
                        square_of(g.data() + b * shape.outputs, shape.outputs);
    const double square = square_of(alone.data(), shape.inputs * shape.outputs);
    check(square <= most * (1 + 1e-9), what + ": norm");
    check(square >= 0.8 * most || most < 1e6, what + ": a norm that is too short");
    for (std::size_t i = 0; i < total.size(); ++i) total[i] += alone[i];
  }
  Size cases = 0;
  for_every_setting([&](int threads, const std::string& setting) {
    check(sum(0, shape.batch, threads) == total, what + setting);
    ++cases;
  });
  return cases;
}

template <class F>
Size test_linear(const cpu::LinearShape& shape) {
  const Size entries = shape.inputs * shape.outputs;
  const auto a = random_values<F>(shape.batch * shape.positions * shape.inputs, 1);
  const auto g = random_values<F>(shape.batch * shape.positions * shape.outputs, 2);
  auto factors = random_values<F>(shape.batch, 3);
  if (shape.batch > 1) factors[1] = 0;
  std::vector<double> grads(index_of(shape.batch * entries)), sizes(grads.size());
  std::vector<double> sum(index_of(entries), 5), sum_sizes(sum);
  for (Size b = 0; b < shape.batch; ++b) {
    for (Size t = 0; t < shape.positions; ++t) {
      for (Size i = 0; i < entries; ++i) {
        const Size row = b * shape.positions + t;
        const double x = static_cast<double>(a[index_of(row * shape.inputs + i % shape.inputs)]) *
                         static_cast<double>(g[index_of(row * shape.outputs + i / shape.inputs)]);
        grads[index_of(b * entries + i)] += x;
        sizes[index_of(b * entries + i)] += std::fabs(x);
      }
    }
    for (Size i = 0; i < entries; ++i) {
      const double factor = static_cast<double>(factors[index_of(b)]);
      sum[index_of(i)] += factor * grads[index_of(b * entries + i)];
      sum_sizes[index_of(i)] += std::fabs(factor) * sizes[index_of(b * entries + i)];
    }
  }
  const std::string what = "linear " + std::to_string(shape.positions) + " x " +
                           std::to_string(shape.inputs) + " x " + std::to_string(shape.outputs);
  return sweep<F>(what, [&](int threads, const std::string& where) {
    Shifted<F> x(a, 1), y(g, 3), weights(factors, 1);
    for (const auto route :
         {cpu::LinearRoute::kAuto, cpu::LinearRoute::kGram, cpu::LinearRoute::kDirect}) {
      Shifted<double> squares(std::vector<double>(index_of(shape.batch)), 1);
      cpu::linear_norm<F>({x.data(), y.data(), route, squares.data(), shape.batch, shape.positions,
                           shape.inputs, shape.outputs},
                          threads);
      for (Size b = 0; b < shape.batch; ++b) {
        double want = 0;
        for (Size i = 0; i < entries; ++i) {
          want += grads[index_of(b * entries + i)] * grads[index_of(b * entries + i)];
        }
        check_square<F>(squares.data()[b], want, where);
      }
    }
    Shifted<F> kept(std::vector<F>(grads.size()), 1), total(std::vector<F>(sum.size(), 5), 1);
    Shifted<double> squares(std::vector<double>(index_of(shape.batch)), 1);
    cpu::linear_gradient<F>({x.data(), y.data(), kept.data(), squares.data(), shape.batch,
                             shape.positions, shape.inputs, shape.outputs},
                            threads);
    check_near(kept.values(), grads, sizes, where + ": gradient");
    cpu::linear_sum<F>({x.data(), y.data(), weights.data(), total.data(), shape.batch,
                        shape.positions, shape.inputs, shape.outputs},
                       threads);
    check_near(total.values(), sum, sum_sizes, where + ": sum");
    Shifted<F> contracted(std::vector<F>(sum.size(), 5), 1);
    cpu::contract<F>({{kept.data()}, weights.data(), {contracted.data()}, shape.batch, {entries}},
                     threads);
    check_near(contracted.values(), sum, sum_sizes, where + ": contract");
    std::vector<F> outputs = kept.values();
    for (const auto& part : {total.values(), contracted.values()}) {
      outputs.insert(outputs.end(), part.begin(), part.end());
    }
    Shifted<F> wide_weights(many(factors), 3);
    std::vector<double> terms(sum);
    for (double& term : terms) term -= 5;
    Shifted<std::int32_t> whole(std::vector<std::int32_t>(sum.size(), 7), 1);
    cpu::linear_integer_sum<F>(
        {x.data(), y.data(), wide_weights.data(), whole.data(), cpu::LinearRounding::kTruncate,
         shape.batch, shape.positions, shape.inputs, shape.outputs},
        threads);
    check_whole<F>(whole.values(), terms, sum_sizes, shape.batch, where + ": integers");
    append(whole.values(), outputs);
    whole = Shifted<std::int32_t>(std::vector<std::int32_t>(sum.size(), 7), 1);
    cpu::linear_integer_sum<F>(
        {x.data(), y.data(), wide_weights.data(), whole.data(), cpu::LinearRounding::kOperands,
         shape.batch, shape.positions, shape.inputs, shape.outputs},
        threads);
    const double most = kMany * *std::max_element(sum_sizes.begin(), sum_sizes.end());
    for (std::size_t i = 0; i < terms.size(); ++i) {
      const double off = static_cast<double>(whole.values()[i] - 7) - kMany * terms[i];
      check(std::fabs(off) <= 1e-2 * most + static_cast<double>(shape.batch),
            where + ": integers of rounded operands");
    }
    append(whole.values(), outputs);
    Shifted<double> norms(std::vector<double>(index_of(shape.batch)), 1);
    cpu::linear_integer_norm<F>({x.data(), y.data(), norms.data(), shape.batch, shape.positions,
                                 shape.inputs, shape.outputs},
                                threads);
    for (Size b = 0; b < shape.batch; ++b) {
      double want = 0, size = 0;
      for (Size i = 0; i < entries; ++i) {
        const std::size_t at = index_of(b * entries + i);
        want += grads[at] * grads[at], size += sizes[at] * sizes[at];
      }
      const double off = std::sqrt(norms.data()[b]) - std::sqrt(want);
      check(std::fabs(off) <= 1e-2 * std::sqrt(size), where + ": norm of rounded operands");
    }
    whole = Shifted<std::int32_t>(std::vector<std::int32_t>(sum.size(), 7), 1);
    cpu::explicit_integer_sum<F>(
        {{kept.data()}, wide_weights.data(), {whole.data()}, shape.batch, {entries}}, threads);
    check_whole<F>(whole.values(), terms, sum_sizes, shape.batch, where + ": explicit integers");
    append(whole.values(), outputs);
    Shifted<double> errors(std::vector<double>(index_of(shape.batch)), 1);
    cpu::linear_sum_error<F>({x.data(), y.data(), errors.data(), shape.batch, shape.positions,
                              shape.inputs, shape.outputs},
                             threads);
    for (Size b = 0; b < shape.batch; ++b) {
      double off = 0;
      for (Size i = 0; i < entries; ++i) {
        const std::size_t at = index_of(b * entries + i);
        const double one = static_cast<double>(kept.data()[at]) - grads[at];
        off += one * one;
      }
      check(errors.data()[b] >= std::sqrt(off), where + ": error");
    }
    return outputs;
  });
}

template <class F>
Size test_embedding(const cpu::EmbeddingShape& shape) {
  const auto padding =
      shape.padding == cpu::kNoPadding ? std::nullopt : std::optional<Size>(shape.padding);
  constexpr Size kRows = 7, kPlaces = 5;
  const Size rows = shape.batch * shape.positions;
  const auto g = random_values<F>(rows * shape.columns, 4);
  const auto a = random_values<F>(shape.batch * kPlaces * shape.columns, 5);
  const auto y = random_values<F>(shape.batch * kPlaces * kRows, 6);
  auto factors = random_values<F>(shape.batch, 7);
  if (shape.batch > 1) factors[1] = 0;
  std::vector<Size> ids(index_of(rows));
  for (Size i = 0; i < rows; ++i) ids[index_of(i)] = i * 5 % 11 % kRows;
  std::vector<double> sum(index_of(kRows * shape.columns)), sizes(sum);
  std::vector<double> squares, products;
  for (Size b = 0; b < shape.batch; ++b) {
    std::vector<double> grad(sum.size());
    double product = 0, square = 0;
    for (Size s = b * shape.positions; s < (b + 1) * shape.positions; ++s) {
      const Size id = ids[index_of(s)];
      if (id == shape.padding) continue;
      for (Size c = 0; c < shape.columns; ++c) {
        const double x = static_cast<double>(g[index_of(s * shape.columns + c)]);
        const double term = static_cast<double>(factors[index_of(b)]) * x;
        grad[index_of(id * shape.columns + c)] += x;
        sum[index_of(id * shape.columns + c)] += term;
        sizes[index_of(id * shape.columns + c)] += std::fabs(term);
        for (Size t = b * kPlaces; t < (b + 1) * kPlaces; ++t) {
          product += x * static_cast<double>(a[index_of(t * shape.columns + c)]) *
                     static_cast<double>(y[index_of(t * kRows + id)]);
        }
      }
    }
    for (const double x : grad) square += x * x;
    squares.push_back(square), products.push_back(product);
  }
  const std::string what =
      "embedding " + std::to_string(shape.positions) + " x " + std::to_string(shape.columns);
  return sweep<F>(what, [&](int threads, const std::string& where) {
    Shifted<F> values(g, 1), weights(factors, 3), inputs(a, 1), outputs(y, 1);
    Shifted<Size> places(ids, 1);
    Shifted<F> out(std::vector<F>(sum.size()), 1);
    Shifted<double> got(std::vector<double>(index_of(shape.batch)), 1);
    cpu::embedding_norm<F>({places.data(), values.data(), padding, got.data(), shape.batch,
                            shape.positions, shape.columns},
                           threads);
    for (std::size_t b = 0; b < squares.size(); ++b) {
      check_square<F>(got.data()[b], squares[b], where);
    }
    cpu::tied_cross<F>({places.data(), values.data(), inputs.data(), outputs.data(), padding,
                        got.data(), shape.batch, shape.positions, shape.columns, kPlaces, kRows},
                       threads);
    check_near(got.values(), products, std::vector<double>(products.size(), 1e5), where + ": tied");
    cpu::embedding_sum<F>({places.data(), values.data(), weights.data(), out.data(), padding,
                           shape.batch, shape.positions, shape.columns, kRows},
                          threads);
    check_near(out.values(), sum, sizes, where + ": sum");
    std::vector<F> everything = out.values();
    Shifted<F> wide_weights(many(factors), 1);
    Shifted<std::int32_t> whole(std::vector<std::int32_t>(sum.size(), 7), 1);
    cpu::embedding_integer_sum<F>({places.data(), values.data(), wide_weights.data(), whole.data(),
                                   padding, shape.batch, shape.positions, shape.columns, kRows},
                                  threads);
    check_whole<F>(whole.values(), sum, sizes, shape.batch, where + ": integers");
    append(whole.values(), everything);
    // The table's rows and an output layer on the same weight, truncated together.
    std::vector<double> both = sum, both_sizes = sizes;
    for (Size b = 0; b < shape.batch; ++b) {
      for (Size t = b * kPlaces; t < (b + 1) * kPlaces; ++t) {
        for (Size i = 0; i < kRows * shape.columns; ++i) {
          const double term =
              static_cast<double>(factors[index_of(b)]) *
              static_cast<double>(y[index_of(t * kRows + i / shape.columns)]) *
              static_cast<double>(a[index_of(t * shape.columns + i % shape.columns)]);
          both[index_of(i)] += term;
          both_sizes[index_of(i)] += std::fabs(term);
        }
      }
    }
    Shifted<std::int32_t> tied(std::vector<std::int32_t>(sum.size(), 7), 1);
    cpu::tied_integer_sum<F>(
        {places.data(), inputs.data(), outputs.data(), values.data(), wide_weights.data(),
         tied.data(), padding, shape.batch, shape.positions, kPlaces, shape.columns, kRows},
        threads);
    check_whole<F>(tied.values(), both, both_sizes, shape.batch, where + ": tied integers");
    append(tied.values(), everything);
    return everything;
  });
}

// A reduction in double, shared by both kinds: rows of `columns`, normalised together.
struct Affine {
  std::vector<double> dx, dweight, dbias;
};

// scale_of(i) is the index of the scale of entry i of a sample.
template <class F, class ScaleOf>
Affine affine(const std::vector<F>& g, const std::vector<F>& x, const std::vector<F>& mean,
              const std::vector<F>& rstd, const std::vector<F>& weight, bool centred, Size batch,
              Size groups, Size size, const ScaleOf& scale_of) {
  const Size scales = static_cast<Size>(weight.size());
  Affine result{std::vector<double>(g.size()), std::vector<double>(index_of(batch * scales)),
                std::vector<double>(index_of(batch * scales))};
  for (Size group = 0; group < batch * groups; ++group) {
    const double centre = centred ? static_cast<double>(mean[index_of(group)]) : 0;
    const double inverse = static_cast<double>(rstd[index_of(group)]);
    double h_sum = 0, hx_sum = 0;
    for (const bool last : {false, true}) {
      for (Size i = 0; i < size; ++i) {
        const std::size_t at = index_of(group * size + i);
        const Size scale = scale_of(group % groups * size + i);
        const double xhat = (static_cast<double>(x[at]) - centre) * inverse;
        const double grad = static_cast<double>(g[at]);
        const double h = grad * static_cast<double>(weight[index_of(scale)]);
        const double count = static_cast<double>(size);
        if (last) {
          result.dx[at] = inverse * (h - (centred ? h_sum / count : 0) - xhat * hx_sum / count);
          continue;
        }
        h_sum += h, hx_sum += h * xhat;
        result.dweight[index_of(group / groups * scales + scale)] += grad * xhat;
        result.dbias[index_of(group / groups * scales + scale)] += grad;
      }
    }
  }
  return result;
}

template <class F>
std::vector<F> joined(std::vector<F> x, const std::vector<F>& y, const std::vector<F>& z) {
  x.insert(x.end(), y.begin(), y.end());
  x.insert(x.end(), z.begin(), z.end());
  return x;
}

template <class F>
Size test_layer_norm(Size batch, Size rows, Size columns, bool centred) {
  const auto g = random_values<F>(batch * rows * columns, 8);
  const auto x = random_values<F>(batch * rows * columns, 9);
  const auto mean = random_values<F>(batch * rows, 10), rstd = random_values<F>(batch * rows, 11);
  const auto weight = random_values<F>(columns, 12);
  const Affine want = affine(g, x, mean, rstd, weight, centred, batch, rows, columns,
                             [&](Size i) { return i % columns; });
  const std::vector<double> slack(want.dx.size() + 2 * want.dweight.size(), 100);
  return sweep<F>("layer norm", [&](int threads, const std::string& where) {
    Shifted<F> grad(g, 1), in(x, 3), centre(mean, 1), inverse(rstd, 1), scale(weight, 1);
    Shifted<F> dx(std::vector<F>(g.size()), 1);
    Shifted<F> dweight(std::vector<F>(want.dweight.size()), 1), dbias(dweight);
    if (centred) {
      cpu::layer_norm_backward<F>(
          {grad.data(), in.data(), centre.data(), inverse.data(), scale.data(), dx.data(),
           dweight.data(), dbias.data(), batch, rows, columns},
          threads);
    } else {
      cpu::rms_norm_backward<F>({grad.data(), in.data(), inverse.data(), scale.data(), dx.data(),
                                 dweight.data(), batch, rows, columns},
                                threads);
    }
    const auto shift = centred ? want.dbias : std::vector<double>(want.dbias.size());
    const auto outputs = joined(dx.values(), dweight.values(), dbias.values());
    check_near(outputs, joined(want.dx, want.dweight, shift), slack, where);
    return outputs;
  });
}

template <class F>
Size test_group_norm(Size batch, Size groups, Size channels, Size places) {
  const Size count = batch * groups * channels * places;
  const auto g = random_values<F>(count, 8), x = random_values<F>(count, 9);
  const auto mean = random_values<F>(batch * groups, 10);
  const auto rstd = random_values<F>(batch * groups, 11);
  const auto weight = random_values<F>(groups * channels, 12);
  const Affine want = affine(g, x, mean, rstd, weight, true, batch, groups, channels * places,
                             [&](Size i) { return i / std::max<Size>(1, places); });
  const std::vector<double> slack(want.dx.size() + 2 * want.dweight.size(), 1000);
  return sweep<F>("group norm", [&](int threads, const std::string& where) {
    Shifted<F> grad(g, 1), in(x, 3), centre(mean, 1), inverse(rstd, 1), scale(weight, 1);
    Shifted<F> dx(std::vector<F>(g.size()), 1);
    Shifted<F> dweight(std::vector<F>(want.dweight.size()), 1), dbias(dweight);
    cpu::group_norm_backward<F>(
        {grad.data(), in.data(), centre.data(), inverse.data(), scale.data(), dx.data(),
         dweight.data(), dbias.data(), batch, groups * channels, places, groups},
        threads);
    const auto outputs = joined(dx.values(), dweight.values(), dbias.values());
    check_near(outputs, joined(want.dx, want.dweight, want.dbias), slack, where);
    return outputs;
  });
}

template <class F>
Size test_type() {
  Size cases = 0;
  for (const Size t : {0, 1, 2, 5, 33}) {
    for (const Size d : {1, 17, 64}) {
      for (const Size p : {1, 13, 130}) cases += test_linear<F>({3, t, d, p});
    }
  }
  for (const Size d : {1, 13, 130}) {
    for (const Size p : {1, 13, 130}) cases += test_factored<F>({300, 1, d, p});
  }
  cases += test_linear<F>({0, 3, 4, 5}) + test_linear<F>({2, 260, 9, 50});
  for (const Size t : {0, 1, 6, 40}) {
    for (const Size d : {1, 16, 37}) {
      cases += test_embedding<F>({3, t, d, cpu::kNoPadding}) + test_embedding<F>({3, t, d, 2});
    }
  }
  for (const Size d : {1, 15, 16, 130}) {
    for (const bool centred : {false, true}) cases += test_layer_norm<F>(3, 7, d, centred);
    cases += test_group_norm<F>(2, 3, 2, d);
  }
  return cases + test_layer_norm<F>(0, 2, 3, true) + test_group_norm<F>(1, 2, 1, 5000);
}

}  // namespace

std::int64_t test_ghost_dense() { return test_type<float>() + test_type<double>(); }

}  // namespace dpkern::test
