#include "counted/coef.h"

#include <cmath>

#include "core/logistic.h"
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

// The logistic function of core/logistic.h, whose exponential is one operation.
template <class T>
Counted<T> sigmoid(Counted<T> x) {
  count(kAnd);
  const Counted<T> size(std::fabs(x.value)), y = -size;
  T power, rest;
  count(kExp);
  exponential<T>(y.value, power, rest);
  const Counted<T> small(y.value < ExponentialOf<T>::kLowest ? T{0} : power + power * rest);
  const Counted<T> one(T{1}), upper = one / (one + small);
  return choose(x < Counted<T>{}, small * upper, upper);
}

// The sum of `count` terms, in lanes that meet by halves.
template <class T, class F>
Counted<T> summed(std::int64_t count, const F& term) {
  Counted<T> lanes[kLossLanes];
  for (std::int64_t i = 0; i < count; ++i) lanes[i % kLossLanes] += term(i);
  return sum_of_lanes(lanes);
}

// One record of one user: what a step makes of it, and what it changes.
template <class T>
class Visit {
 public:
  using C = Counted<T>;
  using Weights = std::vector<C>;  // of one user: the encoder [n, l], or the decoder [l, n]

  // `visit`: the place among all of the call's.
  Visit(const cpu::Descend<T>& call, std::int64_t run, std::int64_t visit, std::int64_t row)
      : c_(call),
        run_(run),
        visit_(visit),
        inputs_(row_of(call.inputs, call.P, row), call.n),
        targets_(row_of(call.targets, call.Q, row), call.n),
        constant_(static_cast<T>(call.constant)) {}

  // Codes and logits; whether a logit lies beyond the limit.
  bool look(const Weights& encoder, const Weights& decoder) {
    const Operand<const T> added(c_.added + (c_.added == nullptr ? 0 : visit_ * c_.n), c_.n);
    for (std::int64_t i = 0; i < c_.n; ++i) {
      x_.push_back(c_.added == nullptr ? inputs_[i] : inputs_[i] + added[i]);
    }
    for (std::int64_t r = 0; r < c_.l; ++r) {
      h_.push_back(sigmoid(summed<T>(c_.n, [&](auto i) { return x_[i] * encoder[i * c_.l + r]; })));
    }
    shift_ = constant_ * summed<T>(c_.l, [&](auto r) { return h_[r]; });
    bool beyond = false;
    for (std::int64_t i = 0; i < c_.n; ++i) {
      z_.push_back(summed<T>(c_.l, [&](auto r) { return h_[r] * decoder[r * c_.n + i]; }) + shift_);
      count(kAnd);
      const C size(std::fabs(z_.back().value));
      beyond |= !(size <= C(static_cast<T>(c_.limit)));
    }
    return beyond;
  }
  void learn(Weights& encoder, Weights& decoder) {
    const std::vector<C> slopes = slopes_of_logits();
    const C moved = constant_ * summed<T>(c_.n, [&](auto i) { return slopes[i]; });
    const C rate(static_cast<T>(c_.lr));
    for (std::int64_t r = 0; r < c_.l; ++r) {
      const C sum = summed<T>(c_.n, [&](auto i) { return slopes[i] * decoder[r * c_.n + i]; });
      const C code = (sum + moved) * (h_[r] - h_[r] * h_[r]);
      const C by_code = code * rate, by_hidden = h_[r] * rate;
      for (std::int64_t i = 0; i < c_.n; ++i) {
        encoder[i * c_.l + r] -= x_[i] * by_code;
        decoder[r * c_.n + i] -= slopes[i] * by_hidden;
      }
    }
  }

 private:
  const T* row_of(const T* table, std::int64_t tables, std::int64_t row) const {
    return table + ((tables > 1 ? run_ * c_.N : 0) + row) * c_.n;
  }

  std::vector<C> slopes_of_logits() {
    std::vector<C> linear, quadratic, slopes;
    for (std::int64_t i = 0; i < c_.n; ++i) {
      const C target = targets_[i];
      linear.push_back(linear_coefficient(target));
      quadratic.push_back(quadratic_coefficient(target, c_.form));
    }
    if (c_.draws != nullptr) {
      const std::int64_t users = c_.M * c_.n, user = visit_ % c_.M * c_.n;
      const std::int64_t first = visit_ / c_.M * 2 * users + user;
      const Grid<T> grid = grid_of();
      add_noise(grid, first, linear);
      add_noise(grid, first + users, quadratic);
    }
    for (std::int64_t i = 0; i < c_.n; ++i) {
      slopes.push_back(quadratic_slope(linear[i], quadratic[i], z_[i]));
    }
    return slopes;
  }
  Grid<T> grid_of() const {
    if (c_.growth <= 0) return Grid<T>(c_.scale);
    const C scale(static_cast<T>(c_.scale)), growth(static_cast<T>(c_.growth));
    return Grid<T>(wide(scale_at(scale, growth, shift_)));
  }
  void add_noise(const Grid<T>& grid, std::int64_t first, std::vector<C>& values) const {
    const Operand<const std::int32_t> draws(c_.draws + first, c_.n);
    const Operand<const std::int16_t> bits(c_.rounding + first, c_.n);
    for (std::int64_t i = 0; i < c_.n; ++i) {
      const Counted<std::uint32_t> rounding(static_cast<std::uint16_t>(bits.raw(i)));
      values[i] = noised_coefficient(values[i], grid.per_unit, grid.cell, rounding, draws[i]);
    }
  }

  const cpu::Descend<T>& c_;
  std::int64_t run_, visit_;
  Operand<const T> inputs_, targets_;
  C constant_, shift_;
  std::vector<C> x_, h_, z_;
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

template <class T>
void descend(const cpu::Descend<T>& call) {
  if (call.n == 0 || call.l == 0 || call.M == 0 || call.S == 0) return;
  const std::int64_t pairs = call.n * call.l;
  Operand<std::int32_t> stopped(call.stopped, call.R);
  const Operand<const std::int64_t> order(call.order, call.R * call.S * call.M);
  for (std::int64_t run = 0; run < call.R; ++run) {
    if (stopped.raw(run) != 0) continue;
    Operand<T> encoders(call.encoder + run * call.M * pairs, call.M * pairs);
    Operand<T> decoders(call.decoder + run * call.M * pairs, call.M * pairs);
    std::vector<Coefficients<T>> encoder(call.M), decoder(call.M);
    for (std::int64_t i = 0; i < call.M * pairs; ++i) {
      encoder[i / pairs].push_back(encoders[i]);
      decoder[i / pairs].push_back(decoders[i]);
    }
    for (std::int64_t step = 0; step < call.S; ++step) {
      std::vector<Visit<T>> visits;
      bool beyond = false;
      for (std::int64_t user = 0; user < call.M; ++user) {
        const std::int64_t visit = (run * call.S + step) * call.M + user;
        visits.emplace_back(call, run, visit, order.raw(visit));
        beyond |= visits.back().look(encoder[user], decoder[user]);
      }
      if (beyond) {
        stopped.store(run, 1);
        break;
      }
      for (std::int64_t user = 0; user < call.M; ++user) {
        visits[user].learn(encoder[user], decoder[user]);
      }
    }
    for (std::int64_t i = 0; i < call.M * pairs; ++i) {
      encoders.store(i, encoder[i / pairs][i % pairs]);
      decoders.store(i, decoder[i / pairs][i % pairs]);
    }
  }
}

template void perturb(const cpu::Perturb<float>&);
template void perturb(const cpu::Perturb<double>&);
template void quadratic(const cpu::Quadratic<float>&);
template void quadratic(const cpu::Quadratic<double>&);
template void descend(const cpu::Descend<float>&);
template void descend(const cpu::Descend<double>&);

}  // namespace dpkern::counted
