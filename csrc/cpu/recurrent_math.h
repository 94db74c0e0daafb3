#pragma once
// Logistic function and hyperbolic tangent of whole vectors (core/logistic.h).
//
//   tanh(|x|)  = -m / (2 + m) with m = e^(-2 |x|) - 1 = 2^n p + (2^n - 1)

#include "core/logistic.h"
#include "cpu/isa.h"

namespace dpkern::cpu::recurrent {

template <class F, int kLanes>
struct Functions {
  using V = Vector<F, kLanes>;

  static DPK_INLINE V sigmoid(V x) { return dpkern::sigmoid<F>(x); }
  static DPK_INLINE V tanh(V x) {
    const V y = -2 * (x < 0 ? -x : x);
    V power, rest;
    exponential<F>(y, power, rest);
    const V minus = y < ExponentialOf<F>::kLowest ? V{} - 1 : power * rest + (power - 1);
    const V t = minus / (2 + minus);  // of -|x|
    return x < 0 ? t : 0 - t;
  }
};

}  // namespace dpkern::cpu::recurrent
