#include "counted/coef.h"

#include "counted/coef_noise.h"

namespace dpkern::counted {
namespace {

// Both coefficients of every target.
template <class T>
struct Made {
  Coefficients<T> linear;
  Coefficients<T> quadratic;

  Made(CoefForm form, const cpu::CoefNoise& noise, const Draws& ahead, std::int64_t rows,
       std::int64_t columns, const Operand<const T>& targets) {
    for (std::int64_t i = 0; i < rows * columns; ++i) {
      linear.push_back(linear_coefficient(targets[i]));
      quadratic.push_back(quadratic_coefficient(targets[i], form));
    }
    add_noise(noise, ahead, rows, linear, quadratic);
  }
};

}  // namespace

template <class T>
void perturb(CoefForm form, const cpu::CoefNoise& noise, const Draws& ahead, std::int64_t rows,
             std::int64_t columns, const T* targets, T* linear, T* quadratic) {
  const Made<T> made(form, noise, ahead, rows, columns, {targets, rows * columns});
  Operand<T> a1(linear, rows * columns), a2(quadratic, rows * columns);
  for (std::int64_t i = 0; i < rows * columns; ++i) {
    a1.store(i, made.linear[static_cast<std::size_t>(i)]);
    a2.store(i, made.quadratic[static_cast<std::size_t>(i)]);
  }
}

template <class T>
void quadratic_loss(CoefForm form, const cpu::CoefNoise& noise, const Draws& ahead,
                    std::int64_t rows, std::int64_t columns, const T* z, const T* targets,
                    const T* shift, double* loss, T* dz) {
  const Made<T> made(form, noise, ahead, rows, columns, {targets, rows * columns});
  const Operand<const T> logits(z, rows * columns), shifts(shift, shift == nullptr ? 0 : rows);
  Operand<T> slopes(dz, rows * columns);
  Operand<double> losses(loss, rows);
  for (std::int64_t row = 0; row < rows; ++row) {
    const Counted<T> moved = shift == nullptr ? Counted<T>{} : shifts[row];
    Counted<double> lanes[kLossLanes];
    for (std::int64_t column = 0; column < columns; ++column) {
      const std::int64_t i = row * columns + column;
      const Counted<T> w = shift == nullptr ? logits[i] : logits[i] + moved;
      const Counted<T> a1 = made.linear[static_cast<std::size_t>(i)];
      const Counted<T> a2 = made.quadratic[static_cast<std::size_t>(i)];
      slopes.store(i, quadratic_slope(a1, a2, w));
      lanes[column % kLossLanes] += quadratic_term(wide(a1), wide(a2), wide(w));
    }
    losses.store(row, sum_of_lanes(lanes));
  }
}

template void perturb(CoefForm, const cpu::CoefNoise&, const Draws&, std::int64_t, std::int64_t,
                      const float*, float*, float*);
template void perturb(CoefForm, const cpu::CoefNoise&, const Draws&, std::int64_t, std::int64_t,
                      const double*, double*, double*);
template void quadratic_loss(CoefForm, const cpu::CoefNoise&, const Draws&, std::int64_t,
                             std::int64_t, const float*, const float*, const float*, double*,
                             float*);
template void quadratic_loss(CoefForm, const cpu::CoefNoise&, const Draws&, std::int64_t,
                             std::int64_t, const double*, const double*, const double*, double*,
                             double*);

}  // namespace dpkern::counted
