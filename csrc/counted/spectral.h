#pragma once
// Counted executions of the spectral ops' own parts. Transforms are the library's: their results
// come in and go out here as plain arrays, and only the op's operands count as read and written.
// Complex numbers are pairs of real ones.

#include <cstdint>

#include "core/counted.h"

namespace dpkern::counted {

// Maps [count, height, width] of an operand that are put on grids [count, grid_height, grid_width],
// from (top, left) on in steps; only the first rows and columns are used.
struct Placement {
  std::int64_t count, height, width;
  std::int64_t rows, columns;
  std::int64_t grid_height, grid_width;
  std::int64_t top, left, row_step, column_step;
};

template <class F>
void spectral_place(const F* from, const Placement& placement, F* grids);
// to [count, rows, columns] = the first rows and columns of grids.
template <class F>
void spectral_take(const F* grids, const Placement& placement, F* to);
// spectra [count, bins] times gains [bins].
template <class F>
void spectral_gain(F* spectra, std::int64_t count, std::int64_t bins, const F* gains);

// powers [batch, groups, bins]: sums over channels; `real` spectra have no imaginary part.
template <class F>
void spectral_powers(const F* spectra, std::int64_t batch, std::int64_t groups,
                     std::int64_t channels, std::int64_t bins, bool real, double* powers);

struct SpectralBins {
  std::int64_t batch, groups;
  std::int64_t x_bins, g_bins;  // g_powers has one bin per group that stands for all if `constant`
  bool constant;
  const std::int64_t* index;  // [x_bins] or null
  const double* factors;      // [x_bins]
  const double* x_weights;
  const double* g_weights;
  double error;
  double share;
};
void spectral_squares(const SpectralBins& bins, const double* x_powers, const double* g_powers,
                      double* squares);

// out [kept, batch, 2, channels] from spectra [batch, channels, bins]; `turned` [kept] are
// conjugated.
template <class F>
void spectral_gather(const F* spectra, std::int64_t batch, std::int64_t channels, std::int64_t bins,
                     bool real, std::int64_t kept, const std::int64_t* at,
                     const unsigned char* turned, F* out);

struct BinsSum {
  std::int64_t kept, batch, groups, inputs, outputs, taps;  // channels of a group
};
// out [outputs of all groups, inputs, taps] += what the bins of the used samples make at the taps.
template <class F>
void spectral_bins_sum(const F* x_bins, const F* g_bins, const F* factors, const BinsSum& sizes,
                       const F* cosines, const F* sines, F* out);

// to [maps, used rows, used columns] = down x across^T, of the first rows and columns of x.
struct Separable {
  std::int64_t maps, height, width;
  std::int64_t rows, columns;            // taken
  std::int64_t used_rows, used_columns;  // made
};
template <class F>
void spectral_separable(const F* x, const Separable& sizes, const F* down, const F* across, F* to);

// gradients [batch, pairs, taps], matrix [rank, taps].
template <class F>
void spectral_whitened_norm(const F* gradients, std::int64_t batch, std::int64_t pairs,
                            std::int64_t taps, const double* matrix, std::int64_t rank,
                            double* squares);

enum class CirculantRoute : int { kRankOne, kPositions, kSpectrum };
struct Circulant {
  std::int64_t batch, positions, inputs, outputs, block;
};
// A block layer's operand [batch, per_sample] in double, with the squared norm of each sample.
template <class F>
void circulant_wide(const F* x, std::int64_t batch, std::int64_t per_sample, double* to,
                    double* squares);
// The samples whose factor is not 0, or all without factors; with `scale` the factors count as read
// and multiply.
template <class F>
void circulant_used(const F* x, const F* factors, bool scale, std::int64_t batch,
                    std::int64_t per_sample, F* to);
// spectra x [batch, positions, inputs, bins], g [batch, positions, outputs, bins].
void circulant_squares(const double* x, const double* g, const Circulant& sizes,
                       CirculantRoute route, const double* weights, const double* x_squares,
                       const double* g_squares, double rounding, double transforming,
                       double* squares);
// out [batch, outputs, inputs, bins] = sum over positions of conj(g) x, times gains if given.
template <class F>
void circulant_products(const F* x, const F* g, const Circulant& sizes, const F* gains, F* out);
// grads are kept as they come, with their squares; or added to what is there.
template <class F>
void circulant_keep(const F* made, std::int64_t batch, std::int64_t entries, F* grads,
                    double* squares);
template <class F>
void circulant_add(const F* made, std::int64_t entries, F* out);

}  // namespace dpkern::counted
