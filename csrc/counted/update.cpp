#include <memory>
#include <vector>

#include "core/counted.h"
#include "core/optimizer.h"
#include "counted/kernels.h"
#include "counted/tensor_noise.h"

namespace dpkern::counted {
namespace {

// One tensor: `gradient(i)`, then the rule.
template <class Rule, class T, class Gradient>
void apply_rule(const Rule& rule, const cpu::UpdateTensors<T>& call, std::size_t item,
                const Gradient& gradient) {
  const std::int64_t size = call.P[item];
  const auto state = [&](std::size_t place) {
    const bool used = static_cast<std::size_t>(Rule::kStates) > place;
    return Operand<T>(used ? call.buffers[place * call.P.size() + item] : nullptr, used ? size : 0);
  };
  Operand<T> param(call.params[item], size), state1 = state(0), state2 = state(1);
  for (std::int64_t i = 0; i < size; ++i) {
    const Counted<T> g = gradient(i);
    Counted<T> p = param[i];
    Counted<T> first = Rule::kStates > 0 ? state1[i] : Counted<T>{};
    Counted<T> second = Rule::kStates > 1 ? state2[i] : Counted<T>{};
    apply(rule, g, p, first, second);
    param.store(i, p);
    if (Rule::kStates > 0) state1.store(i, first);
    if (Rule::kStates > 1) state2.store(i, second);
  }
}

template <class T, class Gradient>
void apply_form(const RuleNumbers& numbers, const cpu::UpdateTensors<T>& call, std::size_t item,
                const Gradient& gradient) {
  using C = Counted<T>;
  switch (numbers.form) {
    case RuleForm::kPlain:
      return apply_rule<PlainSgd<C>, T>(plain_sgd<C>(numbers), call, item, gradient);
    case RuleForm::kMomentum:
      return apply_rule<Momentum<C>, T>(momentum<C>(numbers), call, item, gradient);
    case RuleForm::kNesterov:
      return apply_rule<Nesterov<C>, T>(nesterov<C>(numbers), call, item, gradient);
    case RuleForm::kAdam:
      return apply_rule<Adam<C>, T>(adam<C>(numbers), call, item, gradient);
  }
}

// A row of the matrix, whose entries are constants, times numbers.
Counted<double> times(const double* row, const std::vector<Counted<double>>& numbers) {
  Total<double> total;
  for (std::size_t i = 0; i < numbers.size(); ++i) total.add(Counted<double>(row[i]) * numbers[i]);
  return total.total();
}

// The gradient of a sum that is noised in the coordinates of its channel pairs;
// released(pair, r): a coordinate with its noise.
template <class T, class Released>
std::vector<Counted<T>> led_back(const PairMap& map, std::int64_t pairs, double factor,
                                 const Released& released) {
  std::vector<Counted<T>> gradient;
  for (std::int64_t pair = 0; pair < pairs; ++pair) {
    std::vector<Counted<double>> coordinates;
    for (std::int64_t r = 0; r < map.rank; ++r) coordinates.push_back(released(pair, r));
    for (std::int64_t t = 0; t < map.taps; ++t) {
      gradient.emplace_back(times(map.back + t * map.rank, coordinates) * factor);
    }
  }
  return gradient;
}

template <class T, class IsFinite>
std::vector<Counted<T>> mapped_gradient(const cpu::UpdateTensors<T>& call, std::size_t item,
                                        TensorNoise& made, const IsFinite& is_finite) {
  using C = Counted<T>;
  const PairMap& map = call.maps[item];
  const std::int64_t pairs = call.P[item] / map.taps, noised = pairs * map.rank;
  const double scale = call.scales[item];
  made.make(static_cast<std::uint64_t>(call.positions[item]), noised);
  const auto count = [&](auto zero) {
    using Sum = decltype(zero);
    const Operand<const Sum> sum(static_cast<const Sum*>(call.sums[item]), noised);
    return led_back<T>(map, pairs, scale / 64 * call.gradient_scale,
                       [&](std::int64_t pair, std::int64_t r) {
                         const std::int64_t at = pair * map.rank + r;
                         return Counted<double>(
                             release_integer(sum[at], made.draws[static_cast<std::size_t>(at)]));
                       });
  };
  if (call.sums_kind == cpu::Summed::kInt32) return count(std::int32_t{});
  if (call.sums_kind == cpu::Summed::kInt64) return count(std::int64_t{});
  const bool coordinates = map.signal == nullptr;
  const Operand<const T> sum(static_cast<const T*>(call.sums[item]),
                             coordinates ? noised : call.P[item]);
  const cpu::Lattice<T> lattice(scale);
  const C per_unit(lattice.per_unit), cell(lattice.cell);
  std::vector<Counted<double>> taps;
  return led_back<T>(map, pairs, call.gradient_scale, [&](std::int64_t pair, std::int64_t r) {
    const auto at = static_cast<std::size_t>(pair * map.rank + r);
    if (r == 0 && !coordinates) {
      taps.clear();
      for (std::int64_t t = 0; t < map.taps; ++t) taps.emplace_back(sum[pair * map.taps + t]);
    }
    const C value = coordinates ? C(sum[static_cast<std::int64_t>(at)])
                                : C(times(map.signal + r * map.taps, taps));
    const C units = value * per_unit;
    const C finite = choose(is_finite(units), units, C{});
    return Counted<double>(release_float(finite, made.bits[at], made.draws[at]) * cell);
  });
}

}  // namespace

template <class T>
std::int64_t update_tensors(const cpu::UpdateTensors<T>& call) {
  using C = Counted<T>;
  const RuleNumbers numbers = numbers_of(call.rule);
  const UpdateNoise& noise = call.noise;
  Counted<std::int64_t> nonfinite{};
  const bool integers = call.sums_kind <= cpu::Summed::kInt64;
  TensorNoise made(noise, noise.on && !integers);
  const auto is_finite = [&](C x) {
    const bool finite = isfinite(x);
    nonfinite += finite ? 0 : 1;
    return finite;
  };
  for (std::size_t item = 0; item < call.P.size(); ++item) {
    const std::int64_t size = call.P[item];
    const auto sum_of = [&](auto zero) {
      return Operand<const decltype(zero)>(static_cast<const decltype(zero)*>(call.sums[item]),
                                           size);
    };
    if (!noise.on) {
      const auto sum = sum_of(T{});
      const C factor(call.gradient_scale);
      apply_form<T>(numbers, call, item, [&](std::int64_t i) {
        const C total = sum[i];
        return choose(is_finite(total), total * factor, C{});
      });
      continue;
    }
    if (!call.maps.empty() && call.maps[item].rank > 0) {
      const std::vector<C> gradient = mapped_gradient<T>(call, item, made, is_finite);
      apply_form<T>(numbers, call, item,
                    [&](std::int64_t i) { return gradient[static_cast<std::size_t>(i)]; });
      continue;
    }
    const double scale = call.scales[item];
    made.make(static_cast<std::uint64_t>(call.positions[item]), size);
    const auto draw = [&](std::int64_t i) { return made.draws[static_cast<std::size_t>(i)]; };
    const C step(scale / 64 * call.gradient_scale);
    const auto count = [&](const auto& sum) {
      apply_form<T>(numbers, call, item,
                    [&](std::int64_t i) { return C(release_integer(sum[i], draw(i))) * step; });
    };
    if (call.sums_kind == cpu::Summed::kInt32) {
      count(sum_of(std::int32_t{}));
    } else if (call.sums_kind == cpu::Summed::kInt64) {
      count(sum_of(std::int64_t{}));
    } else {
      const auto sum = sum_of(T{});
      const C per_unit(cpu::Lattice<T>(scale).per_unit);
      apply_form<T>(numbers, call, item, [&](std::int64_t i) {
        const C units = sum[i] * per_unit;
        const C finite = choose(is_finite(units), units, C{});
        return release_float(finite, made.bits[static_cast<std::size_t>(i)], draw(i)) * step;
      });
    }
  }
  return nonfinite.value;
}

template std::int64_t update_tensors(const cpu::UpdateTensors<float>&);
template std::int64_t update_tensors(const cpu::UpdateTensors<double>&);

}  // namespace dpkern::counted
