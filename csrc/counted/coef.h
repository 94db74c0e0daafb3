#pragma once
// Coefficients of polynomial losses, counted. T = float or double.

#include "counted/kernels.h"

namespace dpkern::counted {

template <class T>
void perturb(const cpu::Perturb<T>& call);
template <class T>
void quadratic(const cpu::Quadratic<T>& call);
template <class T>
void descend(const cpu::Descend<T>& call);

}  // namespace dpkern::counted
