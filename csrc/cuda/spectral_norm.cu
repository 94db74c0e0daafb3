// Norms of correlation maps, from the powers of both operands. docs/spectral.md proves the bound.

#include "cuda/spectral_maps.cuh"

namespace dpkern::cuda {

// The sum of a place's splits: M and N, or a power and 0.
template <class T>
__device__ __forceinline__ void powers_at(const T* powers, std::int64_t parts, std::int64_t splits,
                                          std::int64_t places, std::int64_t place, double* m,
                                          double* n) {
  *m = *n = 0;
  for (std::int64_t split = 0; split < splits; ++split) {
    const T* const at = powers + parts * (split * places + place);
    *m += static_cast<double>(at[0]);
    if (parts == 2) *n += static_cast<double>(at[1]);
  }
}

// squares[b]: the sum over groups and places of the weighted product of both operands' powers,
// raised by what rounding can hide.
template <class T>
__global__ void __launch_bounds__(kSpectralThreads, 4)
    spectral_product_kernel(SpectralProduct call, const T* x_powers, const T* g_powers,
                            const double* x_sizes, const double* g_sizes, double* squares) {
  typedef BlockTotals<kSpectralThreads> Totals;
  __shared__ double room[Totals::kCount];
  const std::int64_t sample = blockIdx.x;
  double product = 0, all = 0, x_norm = 0, g_norm = 0, x_most = 0, g_most = 0;
  for (std::int64_t group = 0; group < call.groups; ++group) {
    const std::int64_t set = sample * call.groups + group;
    const T* const xs = x_powers + call.parts * set * call.x_splits * call.x_places;
    const T* const gs = g_powers + call.parts * set * call.g_splits * call.g_places;
    for (std::int64_t k = threadIdx.x; k < call.x_places; k += kSpectralThreads) {
      double mx, nx, md, nd;
      powers_at(xs, call.parts, call.x_splits, call.x_places, k, &mx, &nx);
      x_norm = ::fma(call.x_weights[k], mx, x_norm);
      const double* const w = call.weights + (call.parts == 2 ? 3 * k : k);
      if (w[0] == 0) continue;
      powers_at(gs, call.parts, call.g_splits, call.g_places, call.index[k], &md, &nd);
      const double both = w[0] * mx * md;
      all += both;
      product += both;
      if (call.parts == 2) {
        product = ::fma(w[1] * nx, nd, product);
        product = ::fma(w[2], w[1] > 0 ? mx * nd + nx * md : nx * md - mx * nd, product);
      }
      x_most = larger(x_most, mx + 2 * std::fabs(nx));
      g_most = larger(g_most, md + 2 * std::fabs(nd));
    }
    for (std::int64_t k = threadIdx.x; k < call.g_places; k += kSpectralThreads) {
      double md, nd;
      powers_at(gs, call.parts, call.g_splits, call.g_places, k, &md, &nd);
      g_norm = ::fma(call.g_weights[k], md, g_norm);
    }
  }
  product = Totals::sum(product, room);
  all = Totals::sum(all, room);
  x_norm = Totals::sum(x_norm, room);
  g_norm = Totals::sum(g_norm, room);
  x_most = Totals::most(x_most, room);
  g_most = Totals::most(g_most, room);
  if (threadIdx.x != 0) return;
  const double *const x_size = x_sizes + 2 * sample, *const g_size = g_sizes + 2 * sample;
  const double bad = x_size[1] * 0 + g_size[1] * 0;  // 0 if both are finite
  if (bad != 0 || x_size[0] == 0 || g_size[0] == 0) {
    squares[sample] = bad == 0 ? 0 : bad;
    return;
  }
  const double kNorms = 1 + 0x1p-10;  // the operands' norms come from computed spectra
  x_norm = kNorms * std::sqrt(x_norm);
  g_norm = kNorms * std::sqrt(g_norm);
  const double lost = call.lost * (x_norm * x_norm + g_norm * g_norm + 1);
  const double square = larger(0, product) + call.sums_error * all + lost;
  const double slack =
      call.g_error * g_norm * kNorms * std::sqrt(x_most) +
      call.x_error * x_norm * (kNorms * std::sqrt(g_most) + call.share * call.g_error * g_norm);
  const double norm = std::sqrt(square) + slack;
  const double back = norm * power_of_two<double>(exponent_of<T>(x_size[0])) *
                      power_of_two<double>(exponent_of<T>(g_size[0]));
  squares[sample] = back * back * (1 + 0x1p-42);
}

}  // namespace dpkern::cuda
