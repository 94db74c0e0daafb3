// The update: equal bits for every setting and split of the tensors, near a plain double
// computation that takes its noise from the noise op.

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <type_traits>
#include <utility>

#include "check.h"
#include "cpu/noise.h"
#include "cpu/ops.h"

namespace dpkern::test {
namespace {

constexpr double kScale = 3.0;
constexpr double kGradientScale = 1.0 / 64;

struct NamedRule {
  const char* name;
  Rule rule;
  int states;
};

std::vector<NamedRule> rules() {
  Rule sgd{};
  sgd.kind = RuleKind::kSgd;
  sgd.lr = 0.1;
  Rule decayed = sgd;
  decayed.weight_decay = 0.01;
  Rule first = decayed;
  first.momentum = 0.9;
  first.dampening = 0.1;
  first.first_step = true;
  Rule momentum = first;
  momentum.first_step = false;
  Rule nesterov = sgd;
  nesterov.momentum = 0.9;
  nesterov.nesterov = true;
  Rule adam{};
  adam.kind = RuleKind::kAdam;
  adam.lr = 1e-2;
  adam.beta1 = 0.9;
  adam.beta2 = 0.999;
  adam.eps = 1e-8;
  adam.bias1 = 1 - 0.9 * 0.9;
  adam.bias2 = 1 - 0.999 * 0.999;
  adam.weight_decay = 0.01;
  Rule adamw = adam;
  adamw.decoupled = true;
  return {{"SGD", sgd, 0},           {"SGD with decay", decayed, 0}, {"first momentum", first, 1},
          {"momentum", momentum, 1}, {"Nesterov", nesterov, 1},      {"Adam", adam, 2},
          {"AdamW", adamw, 2}};
}

template <class T>
struct Tensor {
  std::uint64_t first;  // noise position
  std::vector<T> param, state1, state2;
};

template <class T, class Sum>
struct Problem {
  std::vector<Tensor<T>> tensors;
  std::vector<std::vector<Sum>> sums;
};

template <class T, class Sum>
Problem<T, Sum> make(const std::vector<std::int64_t>& sizes, std::uint64_t shift,
                     const UpdateNoise& noise) {
  std::mt19937 random(5);
  std::normal_distribution<double> normal(0, 1);
  Problem<T, Sum> problem;
  std::uint64_t position = shift;
  for (const std::int64_t size : sizes) {
    Tensor<T> tensor{position, {}, {}, {}};
    std::vector<Sum> sum;
    std::vector<std::int32_t> draws(static_cast<std::size_t>(size));
    lattice_draws(noise.stream, noise.law, position, size, draws.data(), 1);
    for (std::int64_t i = 0; i < size; ++i) {
      tensor.param.push_back(static_cast<T>(normal(random)));
      tensor.state1.push_back(static_cast<T>(normal(random)));
      tensor.state2.push_back(static_cast<T>(std::fabs(normal(random))));
      sum.push_back(static_cast<Sum>(
          std::is_integral_v<Sum> ? normal(random) * 1e6
                                  : at_cell_edge(draws[static_cast<std::size_t>(i)], kScale)));
    }
    problem.tensors.push_back(tensor);
    problem.sums.push_back(sum);
    position += (static_cast<std::uint64_t>(size) + kTile - 1) / kTile * kTile;
  }
  return problem;
}

// Every tensor cut in two, the second part at its own noise position.
template <class T, class Sum>
Problem<T, Sum> cut(const Problem<T, Sum>& whole) {
  Problem<T, Sum> parts;
  const auto slice = [](const auto& v, std::size_t begin, std::size_t end) {
    using V = std::decay_t<decltype(v)>;
    return V(v.begin() + static_cast<std::ptrdiff_t>(begin),
             v.begin() + static_cast<std::ptrdiff_t>(end));
  };
  for (std::size_t i = 0; i < whole.tensors.size(); ++i) {
    const Tensor<T>& t = whole.tensors[i];
    const std::size_t size = t.param.size(), middle = size / 3;
    for (const auto& [begin, end] : {std::pair{std::size_t{0}, middle}, std::pair{middle, size}}) {
      parts.tensors.push_back({t.first + begin, slice(t.param, begin, end),
                               slice(t.state1, begin, end), slice(t.state2, begin, end)});
      parts.sums.push_back(slice(whole.sums[i], begin, end));
    }
  }
  return parts;
}

template <class Sum>
constexpr cpu::Summed sum_kind = std::is_same_v<Sum, std::int32_t>   ? cpu::Summed::kInt32
                                 : std::is_same_v<Sum, std::int64_t> ? cpu::Summed::kInt64
                                 : sizeof(Sum) == 4                  ? cpu::Summed::kFloat32
                                                                     : cpu::Summed::kFloat64;

// Parameters and states after the step, all tensors end to end: [params, state1, state2].
template <class T>
using Flat = std::vector<std::vector<T>>;

template <class T, class Sum>
Flat<T> run(const Problem<T, Sum>& problem, const NamedRule& named, const UpdateNoise& noise,
            int threads) {
  std::vector<Shifted<T>> params, first, second;
  std::vector<Shifted<Sum>> sums;
  for (std::size_t i = 0; i < problem.tensors.size(); ++i) {
    const Tensor<T>& t = problem.tensors[i];
    params.emplace_back(t.param, 1);
    first.emplace_back(t.state1, 2);
    second.emplace_back(t.state2, 3);
    sums.emplace_back(problem.sums[i], 1);
  }
  cpu::UpdateTensors<T> call{};
  for (std::size_t i = 0; i < params.size(); ++i) {
    call.params.push_back(params[i].data());
    call.sums.push_back(sums[i].data());
    call.P.push_back(static_cast<std::int64_t>(problem.sums[i].size()));
    if (!noise.on) continue;
    call.positions.push_back(static_cast<std::int64_t>(problem.tensors[i].first));
    call.scales.push_back(kScale);
  }
  for (int state = 0; state < named.states; ++state) {
    for (auto& buffer : state == 0 ? first : second) call.buffers.push_back(buffer.data());
  }
  call.sums_kind = sum_kind<Sum>;
  call.rule = named.rule;
  call.noise = noise;
  call.gradient_scale = kGradientScale;
  const std::int64_t bad = cpu::update_tensors(call, threads);
  check(bad == 0, "update: finite sums counted as non-finite");
  Flat<T> flat(3);
  for (std::size_t i = 0; i < params.size(); ++i) {
    const auto append = [](std::vector<T>& to, const std::vector<T>& from) {
      to.insert(to.end(), from.begin(), from.end());
    };
    append(flat[0], params[i].values());
    append(flat[1], first[i].values());
    append(flat[2], second[i].values());
  }
  return flat;
}

struct Expected {
  double param, state1, state2;
};

Expected stepped(const Rule& r, int states, double p, double s1, double s2, double gradient) {
  if (r.kind == RuleKind::kAdam) {
    if (r.decoupled) p *= 1 - r.lr * r.weight_decay;
    const double g = gradient + (r.decoupled ? 0 : r.weight_decay * p);
    s1 = r.beta1 * s1 + (1 - r.beta1) * g;
    s2 = r.beta2 * s2 + (1 - r.beta2) * g * g;
    return {p - r.lr * (s1 / r.bias1) / (std::sqrt(s2 / r.bias2) + r.eps), s1, s2};
  }
  const double g = gradient + r.weight_decay * p;
  if (states == 0) return {p - r.lr * g, s1, s2};
  s1 = r.first_step ? g : r.momentum * s1 + (1 - r.dampening) * g;
  return {p - r.lr * (r.nesterov ? g + r.momentum * s1 : s1), s1, s2};
}

// The gradient that one tensor's rule should see.
template <class T, class Sum>
std::vector<double> gradients(const Tensor<T>& tensor, std::vector<Sum> sum,
                              const UpdateNoise& noise) {
  const auto n = static_cast<std::int64_t>(sum.size());
  double scale = kGradientScale;
  if (noise.on) {
    if constexpr (std::is_integral_v<Sum>) {
      cpu::add_noise_integer(noise.stream, noise.law, Draws{}, tensor.first, n, sum.data(), 1);
      scale *= kScale / 64;
    } else {
      cpu::add_noise_float(noise.stream, noise.rounding, noise.law, Draws{}, tensor.first, n,
                           kScale, sum.data(), 1);
    }
  }
  std::vector<double> gradient;
  for (const Sum x : sum) gradient.push_back(static_cast<double>(x) * scale);
  return gradient;
}

template <class T, class Sum>
void check_near(const Flat<T>& got, const Problem<T, Sum>& problem, const NamedRule& named,
                const UpdateNoise& noise, const std::string& where) {
  std::size_t at = 0;
  for (std::size_t i = 0; i < problem.tensors.size(); ++i) {
    const Tensor<T>& t = problem.tensors[i];
    const auto gradient = gradients(t, problem.sums[i], noise);
    for (std::size_t j = 0; j < gradient.size(); ++j, ++at) {
      const Expected want =
          stepped(named.rule, named.states, static_cast<double>(t.param[j]),
                  static_cast<double>(t.state1[j]), static_cast<double>(t.state2[j]), gradient[j]);
      const auto near = [&](const std::vector<T>& values, double expected) {
        const double error = std::fabs(static_cast<double>(values[at]) - expected);
        check(error <= 2e-6 * (std::fabs(expected) + std::fabs(gradient[j]) + 1), where);
      };
      near(got[0], want.param);
      near(got[1], want.state1);
      near(got[2], want.state2);
    }
  }
}

// The noise of a problem whose draws are made before the update.
struct Made {
  std::vector<std::int32_t> values;
  std::vector<std::int16_t> rounding;
  UpdateNoise noise;

  template <class T, class Sum>
  Made(const UpdateNoise& inline_noise, std::uint64_t first, const Problem<T, Sum>& problem)
      : noise(inline_noise) {
    std::uint64_t end = first;
    for (const auto& tensor : problem.tensors) end = tensor.first + tensor.param.size();
    values.resize(end - first);
    rounding.resize(end - first);
    const auto n = static_cast<std::int64_t>(end - first);
    lattice_draws(noise.stream, noise.law, first, n, values.data(), 1);
    rounding_draws(noise.rounding, first, n, rounding.data(), 1);
    noise.draws.source = DrawSource::kValues;
    noise.draws.first = first;
    noise.draws.count = n;
    noise.draws.values = values.data();
    noise.draws.rounding = rounding.data();
    noise.stream = noise.rounding = counting_key(9, 9, 20);  // nothing may come from here
  }
};

template <class T, class Sum>
std::int64_t compare(const UpdateNoise& noise) {
  const std::vector<std::vector<std::int64_t>> shapes = {
      {}, {0}, {1}, {511, 0, 2, 513}, {20000, 7}};
  std::int64_t cases = 0;
  for (const NamedRule& named : rules()) {
    for (const auto& sizes : shapes) {
      for (const std::uint64_t shift : {0, 5}) {
        const auto problem = make<T, Sum>(sizes, shift, noise);
        const auto parts = cut(problem);
        const Made made(noise, shift, problem);
        Flat<T> first;
        for_every_setting([&](int threads, const std::string& setting) {
          const std::string where = std::string("update, ") + named.name + ", noise " +
                                    (noise.on ? "on" : "off") + setting;
          const auto whole = run(problem, named, noise, threads);
          const auto in_parts = run(parts, named, noise, threads);
          const auto ahead = run(problem, named, made.noise, threads);
          if (first.empty()) {
            check_near(whole, problem, named, noise, where);
            first = whole;
          }
          for (std::size_t k = 0; k < first.size(); ++k) {
            check_same(whole[k], first[k], where);
            check_same(in_parts[k], first[k], where + ", cut in two");
            check_same(ahead[k], first[k], where + ", draws made ahead");
          }
          cases += 3;
        });
      }
    }
  }
  return cases;
}

template <class T>
void check_nonfinite() {
  const T infinity = std::numeric_limits<T>::infinity();
  for (const bool on : {false, true}) {
    std::vector<T> param(3, T{1}), sum = {infinity, T{0}, std::numeric_limits<T>::quiet_NaN()};
    cpu::UpdateTensors<T> call{};
    call.params = {param.data()};
    call.sums = {sum.data()};
    call.sums_kind = sum_kind<T>;
    call.positions = {0};
    call.scales = {kScale};
    call.rule = rules()[0].rule;
    call.noise = {on, Distribution::kGaussian, counting_key(1, 0, 20), counting_key(2, 0, 20), {}};
    call.gradient_scale = kGradientScale;
    call.P = {3};
    const auto bad = cpu::update_tensors(call, 1);
    check(bad == 2, "update counts non-finite sums");
    for (const T x : param) check(std::isfinite(x), "update keeps parameters finite");
  }
}

template <class T>
std::int64_t compare_type() {
  check_nonfinite<T>();
  UpdateNoise noise{};
  std::int64_t cases = compare<T, T>(noise);
  noise.on = true;
  noise.stream = counting_key(0x4a000000, 0, 20);
  noise.rounding = counting_key(0x01000000, 0, 20);
  for (const Distribution law : {Distribution::kGaussian, Distribution::kLaplace}) {
    noise.law = law;
    cases +=
        compare<T, std::int32_t>(noise) + compare<T, std::int64_t>(noise) + compare<T, T>(noise);
  }
  return cases;
}

}  // namespace

std::int64_t test_update() { return compare_type<float>() + compare_type<double>(); }

}  // namespace dpkern::test
