#include "counted/coef.h"

#include "counted/coef_noise.h"

namespace dpkern::counted {
namespace {

// Both coefficients of every target.
template <class T>
struct Made {
  Coefficients<T> linear;
  Coefficients<T> quadratic;

  // For a call that has targets, a form and noise.
  template <class Call>
  explicit Made(const Call& call) {
    const Operand<const T> targets(call.targets, call.B * call.D);
    for (std::int64_t i = 0; i < call.B * call.D; ++i) {
      linear.push_back(linear_coefficient(targets[i]));
      quadratic.push_back(quadratic_coefficient(targets[i], call.form));
    }
    add_noise(call.noise, call.B, linear, quadratic);
  }
};

}  // namespace

template <class T>
void perturb(const cpu::Perturb<T>& call) {
  const std::int64_t count = call.B * call.D;
  const Made<T> made(call);
  Operand<T> a1(call.linear, count), a2(call.quadratic, count);
  for (std::int64_t i = 0; i < count; ++i) {
    a1.store(i, made.linear[static_cast<std::size_t>(i)]);
    a2.store(i, made.quadratic[static_cast<std::size_t>(i)]);
  }
}

template <class T>
void quadratic(const cpu::Quadratic<T>& call) {
  const std::int64_t count = call.B * call.D;
  const bool shifted = call.shift != nullptr;
  const Made<T> made(call);
  const Operand<const T> logits(call.z, count), shifts(call.shift, shifted ? call.B : 0);
  Operand<T> slopes(call.dz, count);
  Operand<double> losses(call.loss, call.B);
  for (std::int64_t row = 0; row < call.B; ++row) {
    const Counted<T> moved = shifted ? shifts[row] : Counted<T>{};
    Counted<double> lanes[kLossLanes];
    for (std::int64_t column = 0; column < call.D; ++column) {
      const std::int64_t i = row * call.D + column;
      const Counted<T> w = shifted ? logits[i] + moved : logits[i];
      const Counted<T> a1 = made.linear[static_cast<std::size_t>(i)];
      const Counted<T> a2 = made.quadratic[static_cast<std::size_t>(i)];
      slopes.store(i, quadratic_slope(a1, a2, w));
      lanes[column % kLossLanes] += quadratic_term(wide(a1), wide(a2), wide(w));
    }
    losses.store(row, sum_of_lanes(lanes));
  }
}

template void perturb(const cpu::Perturb<float>&);
template void perturb(const cpu::Perturb<double>&);
template void quadratic(const cpu::Quadratic<float>&);
template void quadratic(const cpu::Quadratic<double>&);

}  // namespace dpkern::counted
