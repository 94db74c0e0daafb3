#pragma once
// Coefficients of polynomial losses, counted.

#include "counted/kernels.h"
#include "cpu/coef.h"

namespace dpkern::counted {

// As csrc/cpu/coef.h; draws made ahead are `ahead`, not the noise's own.
template <class T>
void perturb(CoefForm form, const cpu::CoefNoise& noise, const Draws& ahead, std::int64_t rows,
             std::int64_t columns, const T* targets, T* linear, T* quadratic);
template <class T>
void quadratic_loss(CoefForm form, const cpu::CoefNoise& noise, const Draws& ahead,
                    std::int64_t rows, std::int64_t columns, const T* z, const T* targets,
                    const T* shift, double* loss, T* dz);

}  // namespace dpkern::counted
