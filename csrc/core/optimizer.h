#pragma once
// One element of each optimizer rule, shared by every kernel: equal bits everywhere, as long as no
// compiler fuses a multiplication with an addition.

#include "core/layouts.h"
#include "core/numeric.h"

namespace dpkern {

#if !defined(__CUDACC__)
// The numbers that do not depend on the element, in float64.
DPK_HD RuleNumbers numbers_of(const Rule& rule) {
  RuleNumbers n{};
  n.form = rule.kind == RuleKind::kAdam ? RuleForm::kAdam
           : rule.momentum == 0         ? RuleForm::kPlain
           : rule.nesterov              ? RuleForm::kNesterov
                                        : RuleForm::kMomentum;
  n.first_step = rule.first_step ? 1 : 0;
  n.lr = rule.lr;
  n.decay = rule.decoupled ? 0 : rule.weight_decay;
  n.momentum = rule.momentum;
  n.fresh = 1 - rule.dampening;
  n.shrink = rule.decoupled ? 1 - rule.lr * rule.weight_decay : 1;
  n.fresh1 = 1 - rule.beta1;
  n.keep2 = rule.beta2;
  n.fresh2 = 1 - rule.beta2;
  n.eps = rule.eps;
  if (n.form == RuleForm::kAdam) {
    n.root2 = std::sqrt(rule.bias2);
    n.step = rule.lr / rule.bias1;
  }
  return n;
}
#endif

// A rule in the parameters' type. apply(rule, gradient, param, state1, state2) takes one step; a
// rule of kStates = 1 leaves state2 alone, one of 0 both.
template <class T>
struct PlainSgd {
  static constexpr int kStates = 0;
  T lr, decay;
};

template <class T>
struct Momentum {
  static constexpr int kStates = 1;
  T lr, decay, keep, fresh;
};

template <class T>
struct Nesterov {
  static constexpr int kStates = 1;
  T lr, decay, keep, fresh, momentum;
};

template <class T>
struct Adam {
  static constexpr int kStates = 2;
  T shrink, decay, fresh1, keep2, fresh2, eps, root2, step;
};

template <class T>
DPK_HD PlainSgd<T> plain_sgd(const RuleNumbers& n) {
  return {static_cast<T>(n.lr), static_cast<T>(n.decay)};
}

template <class T>
DPK_HD Nesterov<T> nesterov(const RuleNumbers& n) {
  const bool first = n.first_step != 0;
  const T momentum = static_cast<T>(n.momentum);
  return {static_cast<T>(n.lr), static_cast<T>(n.decay), first ? T{0} : momentum,
          first ? T{1} : static_cast<T>(n.fresh), momentum};
}

template <class T>
DPK_HD Momentum<T> momentum(const RuleNumbers& n) {
  const Nesterov<T> same = nesterov<T>(n);
  return {same.lr, same.decay, same.keep, same.fresh};
}

template <class T>
DPK_HD Adam<T> adam(const RuleNumbers& n) {
  return {static_cast<T>(n.shrink), static_cast<T>(n.decay),  static_cast<T>(n.fresh1),
          static_cast<T>(n.keep2),  static_cast<T>(n.fresh2), static_cast<T>(n.eps),
          static_cast<T>(n.root2),  static_cast<T>(n.step)};
}

template <class T>
DPK_HD void apply(const PlainSgd<T>& rule, T gradient, T& param, T&, T&) {
  param -= rule.lr * (gradient + rule.decay * param);
}

template <class T>
DPK_HD void apply(const Momentum<T>& rule, T gradient, T& param, T& buffer, T&) {
  const T g = gradient + rule.decay * param;
  const T b = rule.keep * buffer + rule.fresh * g;
  buffer = b;
  param -= rule.lr * b;
}

template <class T>
DPK_HD void apply(const Nesterov<T>& rule, T gradient, T& param, T& buffer, T&) {
  const T g = gradient + rule.decay * param;
  const T b = rule.keep * buffer + rule.fresh * g;
  buffer = b;
  param -= rule.lr * (g + rule.momentum * b);
}

template <class T>
DPK_HD T over_root2(const Adam<T>& rule, T x) {
  return x / rule.root2;
}

// For every type of rule with Adam's numbers and an `over_root2`.
template <class Rule, class T>
DPK_HD void apply_adam(const Rule& rule, T gradient, T& param, T& mean, T& square) {
  using std::sqrt;
  const T p = param * rule.shrink;
  const T g = gradient + rule.decay * param;
  const T m = mean + rule.fresh1 * (g - mean);
  const T v = rule.keep2 * square + rule.fresh2 * g * g;
  mean = m;
  square = v;
  param = p - rule.step * (m / (over_root2(rule, sqrt(v)) + rule.eps));
}

template <class T>
DPK_HD void apply(const Adam<T>& rule, T gradient, T& param, T& mean, T& square) {
  apply_adam(rule, gradient, param, mean, square);
}

}  // namespace dpkern
