#pragma once
// The polynomial that stands for a cross-entropy: coefficients of one target, one noised, one term.

#include "core/lattice.h"

namespace dpkern {

template <class T>
DPK_HD T linear_coefficient(T x) {
  return T{0.5} - x;
}

template <class T>
DPK_HD T quadratic_coefficient(T x, CoefForm form) {
  return form == CoefForm::kPrinted ? x * T{0.5} - T{0.25} : T{0.125};
}

// A finite number as a multiple of u, released, as a multiple of g.
template <class T, class U, class I>
DPK_HD T noised_coefficient(T value, T per_unit, T cell, U rounding, I x) {
  return cell * release_float(value * per_unit, rounding, x);
}

// d/dw of a1 w + a2 w^2.
template <class T>
DPK_HD T quadratic_slope(T a1, T a2, T w) {
  return (a2 + a2) * w + a1;
}

template <class T>
DPK_HD T quadratic_term(T a1, T a2, T w) {
  return w * (a1 + a2 * w);
}

// With the hidden layer in them: h_e h_g / 8, from h_e and h_g / 8.
template <class T>
DPK_HD T eighth_of(T h) {
  return h * T{0.125};
}

// d/ds of (1/2 - y) s + s^2 / 8, a derivative by a score s = h . W.
template <class T>
DPK_HD T score_slope(T factor, T score) {
  return factor + T{0.25} * score;
}

// Records whose slopes by the weights are summed one after the other, from 0 on; then the sums of
// the runs are, so that the bits depend on nothing else.
constexpr int kRecordRun = 16;

// A loss is summed in lanes: term i of a record joins lane i mod 16, from 0 on; then they meet by
// halves, so that its bits depend on nothing else.
constexpr int kLossLanes = 16;

template <class T>
DPK_HD T sum_of_lanes(T lanes[kLossLanes]) {
  for (int half = kLossLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] = lanes[i] + lanes[i + half];
  }
  return lanes[0];
}

// The noise scale of a record whose logits the stabilisation constant moves by `shift`: SPOF (32).
template <class T>
DPK_HD T scale_at(T scale, T growth, T shift) {
  return scale + growth * (shift * (shift * T{0.5} + T{2}));
}

}  // namespace dpkern
