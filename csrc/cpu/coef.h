#pragma once
// Coefficients of polynomial losses, written with their noise or evaluated with it in registers.

#include <cstdint>

#include "core/coef.h"
#include "core/layouts.h"
#include "cpu/noise.h"

namespace dpkern::cpu {

// Laplace noise of rows of coefficients: linear ones from `linear` on, quadratic ones from
// `quadratic` on, a multiple of 512.
struct CoefNoise {
  bool on;
  Stream stream;
  Stream rounding;
  Ahead ahead;
  std::uint64_t linear;
  std::uint64_t quadratic;
  double scale;        // of all rows
  const void* scales;  // of each row; null: `scale`
  bool wide_scales;    // double, else float

  double scale_of(std::int64_t row) const {
    if (scales == nullptr) return scale;
    return wide_scales ? static_cast<const double*>(scales)[row]
                       : static_cast<double>(static_cast<const float*>(scales)[row]);
  }
};

// Coefficients of `rows` x `columns` targets. T = float or double. Returns whether there is noise
// and a target outside [0, 1]: then nothing that was written may be released.
template <class T>
bool perturb(CoefForm form, const CoefNoise& noise, std::int64_t rows, std::int64_t columns,
             const T* targets, T* linear, T* quadratic, int threads);

// loss[row] = sum of w (a1 + a2 w), dz = a1 + 2 a2 w, with w = z + shift[row]; shift null: z.
// Returns what `perturb` does.
template <class T>
bool quadratic_loss(CoefForm form, const CoefNoise& noise, std::int64_t rows, std::int64_t columns,
                    const T* z, const T* targets, const T* shift, double* loss, T* dz, int threads);

// The loss of M classes whose coefficients hold the hidden layer: (1/2 - y_l) h and h h^T / 8 of
// each record and class l. hidden [records, width], targets [records, classes], weights and
// dweights [classes, width], dhidden as hidden.
template <class T>
void expanded_loss(const CoefNoise& noise, std::int64_t records, std::int64_t classes,
                   std::int64_t width, const T* hidden, const T* targets, const T* weights,
                   double* loss, T* dweights, T* dhidden, int threads);

}  // namespace dpkern::cpu
