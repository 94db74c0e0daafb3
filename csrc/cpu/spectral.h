#pragma once
// Spectra of a layer's operands: their powers, the norm that is a product over frequencies, the
// bins that a mechanism keeps, and norms in whitened coordinates.

#include <cstdint>

namespace dpkern::cpu {

// powers [batch, groups, bins] = sum over a group's channels of | spectra |^2; spectra are complex,
// [batch, groups, channels, bins]. T is float or double.
template <class T>
void spectral_powers(const T* spectra, std::int64_t batch, std::int64_t groups,
                     std::int64_t channels, std::int64_t bins, double* powers, int threads);

// The half spectra of a layer's inputs (x) and output gradients (g). Where g is transformed on a
// smaller grid, `index` says which of its bins belongs to a bin of x; null: the same.
struct SpectralGrid {
  std::int64_t x_bins;
  std::int64_t g_bins;
  const std::int64_t* index;  // [x_bins]
  const double* factors;      // [x_bins]: gains^2 times the bins that one stands for, over PQ
  const double* x_weights;    // [x_bins]: Parseval, from powers to the squared norm of the operand
  const double* g_weights;    // [g_bins]
  double error;               // of the transforms, relative to the norm of one map
  double share;               // sqrt(P' Q') of g's grid
};

// squares [batch]: sum over groups and bins of factors x_powers g_powers, raised by what the error
// of the transforms can hide. Powers are [batch, groups, bins].
void spectral_squares(const SpectralGrid& grid, const double* x_powers, const double* g_powers,
                      std::int64_t batch, std::int64_t groups, double* squares, int threads);

// out [count, rows, 2, channels] at rows `row`.. = real and imaginary parts of the `count` kept
// bins of complex spectra [batch, channels, bins].
template <class T>
void spectral_gather(const T* spectra, std::int64_t batch, std::int64_t channels, std::int64_t bins,
                     const std::int64_t* kept, std::int64_t count, std::int64_t rows,
                     std::int64_t row, T* out, int threads);

// squares [batch] of matrix [rows, taps] times every channel pair's taps, from above; gradients are
// [batch, outer, taps, inner].
template <class T>
void whitened_norm(const T* gradients, std::int64_t batch, std::int64_t outer, std::int64_t taps,
                   std::int64_t inner, const double* matrix, std::int64_t rows, double* squares,
                   int threads);

}  // namespace dpkern::cpu
