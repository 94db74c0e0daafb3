#include <memory>

#include "core/counted.h"
#include "core/optimizer.h"
#include "counted/kernels.h"
#include "counted/tensor_noise.h"

namespace dpkern::counted {
namespace {

// One tensor: `gradient(i)`, then the rule.
template <class Rule, class T, class Gradient>
void apply_rule(const Rule& rule, const cpu::UpdateItem& item, const Gradient& gradient) {
  Operand<T> param(static_cast<T*>(item.param), item.size);
  Operand<T> state1(static_cast<T*>(item.state1), Rule::kStates > 0 ? item.size : 0);
  Operand<T> state2(static_cast<T*>(item.state2), Rule::kStates > 1 ? item.size : 0);
  for (std::int64_t i = 0; i < item.size; ++i) {
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
void apply_form(const RuleNumbers& numbers, const cpu::UpdateItem& item, const Gradient& gradient) {
  using C = Counted<T>;
  switch (numbers.form) {
    case RuleForm::kPlain:
      return apply_rule<PlainSgd<C>, T>(plain_sgd<C>(numbers), item, gradient);
    case RuleForm::kMomentum:
      return apply_rule<Momentum<C>, T>(momentum<C>(numbers), item, gradient);
    case RuleForm::kNesterov:
      return apply_rule<Nesterov<C>, T>(nesterov<C>(numbers), item, gradient);
    case RuleForm::kAdam:
      return apply_rule<Adam<C>, T>(adam<C>(numbers), item, gradient);
  }
}

}  // namespace

template <class T>
std::int64_t update_step(const Rule& rule, const cpu::UpdateNoise& noise, const Draws& ahead,
                         SumType sum_type, double gradient_scale,
                         const std::vector<cpu::UpdateItem>& items) {
  using C = Counted<T>;
  const RuleNumbers numbers = numbers_of(rule);
  Counted<std::int64_t> nonfinite{};
  const bool rounded = noise.on && sum_type == SumType::kFloat;
  TensorNoise made(noise, ahead, rounded);
  const auto is_finite = [&](C x) {
    const bool finite = isfinite(x);
    nonfinite += finite ? 0 : 1;
    return finite;
  };
  for (const cpu::UpdateItem& item : items) {
    if (!noise.on) {
      const Operand<const T> sum(static_cast<const T*>(item.sum), item.size);
      const C factor(gradient_scale);
      apply_form<T>(numbers, item, [&](std::int64_t i) {
        const C total = sum[i];
        return choose(is_finite(total), total * factor, C{});
      });
      continue;
    }
    made.make(item.first_position, item.size);
    const auto draw = [&](std::int64_t i) { return made.draws[static_cast<std::size_t>(i)]; };
    const C step(item.scale / 64 * gradient_scale);
    const auto integers = [&](const auto& sum) {
      apply_form<T>(numbers, item,
                    [&](std::int64_t i) { return C(release_integer(sum[i], draw(i))) * step; });
    };
    if (sum_type == SumType::kInt32) {
      integers(Operand<const std::int32_t>(static_cast<const std::int32_t*>(item.sum), item.size));
    } else if (sum_type == SumType::kInt64) {
      integers(Operand<const std::int64_t>(static_cast<const std::int64_t*>(item.sum), item.size));
    } else {
      const Operand<const T> sum(static_cast<const T*>(item.sum), item.size);
      const C per_unit(cpu::Lattice<T>(item.scale).per_unit);
      apply_form<T>(numbers, item, [&](std::int64_t i) {
        const C units = sum[i] * per_unit;
        const C finite = choose(is_finite(units), units, C{});
        return release_float(finite, made.bits[static_cast<std::size_t>(i)], draw(i)) * step;
      });
    }
  }
  return nonfinite.value;
}

void advance(std::int64_t* clock, double beta1, double beta2) {
  Operand<std::int64_t> steps(clock, 1);
  steps.store(0, steps[0] + 1);
  Operand<double> powers(reinterpret_cast<double*>(clock + 1), 2);
  powers.store(0, powers[0] * beta1);
  powers.store(1, powers[1] * beta2);
}

template std::int64_t update_step<float>(const Rule&, const cpu::UpdateNoise&, const Draws&,
                                         SumType, double, const std::vector<cpu::UpdateItem>&);
template std::int64_t update_step<double>(const Rule&, const cpu::UpdateNoise&, const Draws&,
                                          SumType, double, const std::vector<cpu::UpdateItem>&);

}  // namespace dpkern::counted
