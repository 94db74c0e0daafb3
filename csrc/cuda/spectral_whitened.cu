// Norms of whitened coordinates, from the retained bins of both operands.

#include "cuda/block.cuh"

namespace dpkern::cuda {

// sums[b, group, piece] = squares of the whitened coordinates of a piece's channel pairs. A thread
// has kSpectralPairs output channels of one input channel, and kSpectralRows coordinates at a time.
template <class T>
__global__ void __launch_bounds__(kPairThreads)
    spectral_pairs_kernel(SpectralPairs call, const T* x_bins, const T* g_bins, double* sums) {
  typedef BlockTotals<kPairThreads> Totals;
  __shared__ double room[Totals::kCount];
  const std::int64_t piece = blockIdx.x % call.pieces, set = blockIdx.x / call.pieces;
  const std::int64_t group = set % call.groups, sample = set / call.groups;
  const std::int64_t ins = call.ins / call.groups, outs = call.outs / call.groups;
  const std::int64_t quads = (outs + kSpectralPairs - 1) / kSpectralPairs;
  const std::int64_t own = piece * kPairThreads + static_cast<int>(threadIdx.x);
  const bool any = own < quads * ins;
  const std::int64_t in = any ? own % ins : 0, out = any ? own / ins * kSpectralPairs : 0;
  const std::int64_t x_step = 2 * call.batch * call.ins, g_step = 2 * call.batch * call.outs;
  const T* const x = x_bins + 2 * sample * call.ins + group * ins + in;
  const T* const g = g_bins + 2 * sample * call.outs + group * outs + out;
  const T* const turns = static_cast<const T*>(call.turns);
  double square = 0;
  for (std::int64_t tile = 0; tile < call.tiles; ++tile) {
    T y[kSpectralRows][kSpectralPairs] = {};
    for (int part = 0; part < 2; ++part) {  // Re Z, Im Z
      const bool within = part == 0 ? tile < call.even_tiles : tile >= call.odd_from;
      if (!within) continue;
      const T* const table = static_cast<const T*>(part == 0 ? call.even : call.odd) +
                             (part == 0 ? tile : tile - call.odd_from) * call.bins * kSpectralRows;
      for (std::int64_t first = 0; first < call.bins; first += kSpectralChunk) {
        const std::int64_t end =
            first + kSpectralChunk < call.bins ? first + kSpectralChunk : call.bins;
        T of_chunk[kSpectralRows][kSpectralPairs] = {};
        for (std::int64_t k = first; k < end; ++k) {
          const T xr = x[k * x_step], xi = x[k * x_step + call.ins];
          const T c = turns[2 * k], s = turns[2 * k + 1];
          const T re = fused(c, xr, -s * xi), im = fused(c, xi, s * xr);
          const T one = part == 0 ? re : im, other = part == 0 ? im : -re;
          T z[kSpectralPairs];
          DPK_UNROLL
          for (int p = 0; p < kSpectralPairs; ++p) {
            const bool is = out + p < outs;
            const T gr = is ? g[k * g_step + p] : T{0};
            const T gi = is ? g[k * g_step + call.outs + p] : T{0};
            z[p] = fused(gr, one, gi * other);
          }
          DPK_UNROLL
          for (int r = 0; r < kSpectralRows; ++r) {
            const T weight = table[k * kSpectralRows + r];
            DPK_UNROLL
            for (int p = 0; p < kSpectralPairs; ++p) {
              of_chunk[r][p] = fused(weight, z[p], of_chunk[r][p]);
            }
          }
        }
        DPK_UNROLL
        for (int r = 0; r < kSpectralRows; ++r) {
          DPK_UNROLL
          for (int p = 0; p < kSpectralPairs; ++p) y[r][p] += of_chunk[r][p];
        }
      }
    }
    DPK_UNROLL
    for (int r = 0; r < kSpectralRows; ++r) {
      DPK_UNROLL
      for (int p = 0; p < kSpectralPairs; ++p) {
        const double wide = static_cast<double>(y[r][p]);
        square = ::fma(wide, wide, square);
      }
    }
  }
  square = Totals::sum(any ? square : 0, room);
  if (threadIdx.x == 0) sums[blockIdx.x] = square;
}

// The sum over a group's channels of one bin's powers.
template <class T>
__device__ __forceinline__ double power_of_bin(const T* bin, std::int64_t channels,
                                               std::int64_t used) {
  double sum = 0;
  for (std::int64_t c = 0; c < used; ++c) {
    const double re = static_cast<double>(bin[c]), im = static_cast<double>(bin[channels + c]);
    sum = ::fma(re, re, ::fma(im, im, sum));
  }
  return sum;
}

// squares[b] from the pieces' sums, raised by what rounding of bins and coordinates can hide.
template <class T>
__global__ void __launch_bounds__(kPairThreads)
    spectral_whitened_kernel(SpectralPairs call, SpectralBound bound, const T* x_bins,
                             const T* g_bins, const double* sums, const double* x_sizes,
                             const double* g_sizes, double* squares) {
  typedef BlockTotals<kPairThreads> Totals;
  __shared__ double room[Totals::kCount];
  const std::int64_t sample = blockIdx.x;
  const std::int64_t ins = call.ins / call.groups, outs = call.outs / call.groups;
  double square = 0, kept = 0, x_most = 0, g_most = 0;
  const std::int64_t pieces = call.groups * call.pieces;
  for (std::int64_t i = threadIdx.x; i < pieces; i += kPairThreads) {
    square += sums[sample * pieces + i];
  }
  for (std::int64_t i = threadIdx.x; i < call.groups * call.bins; i += kPairThreads) {
    const std::int64_t k = i / call.groups, group = i % call.groups;
    const T* const x = x_bins + 2 * (k * call.batch + sample) * call.ins + group * ins;
    const T* const g = g_bins + 2 * (k * call.batch + sample) * call.outs + group * outs;
    const double of_x = power_of_bin(x, call.ins, ins), of_g = power_of_bin(g, call.outs, outs);
    kept = ::fma(bound.weights[k], of_x * of_g, kept);
    x_most = larger(x_most, of_x);
    g_most = larger(g_most, of_g);
  }
  square = Totals::sum(square, room);
  kept = Totals::sum(kept, room);
  x_most = Totals::most(x_most, room);
  g_most = Totals::most(g_most, room);
  if (threadIdx.x != 0) return;
  const double x_square = x_sizes[2 * sample + 1], g_square = g_sizes[2 * sample + 1];
  const double kSums = 1 + 0x1p-10;
  const double x_norm = std::sqrt(x_square), g_norm = std::sqrt(g_square);
  const bool in_range = x_square >= bound.least && g_square >= bound.least &&
                        x_square <= bound.most && g_square <= bound.most && square - square == 0;
  double norm =
      kSums * bound.stretch * bound.share * x_norm * g_norm;  // || y || <= stretch || R ||
  if (in_range) {
    const double bins = kSums * (bound.g_error * g_norm * std::sqrt(x_most) +
                                 bound.x_error * x_norm *
                                     (std::sqrt(g_most) + bound.share * bound.g_error * g_norm));
    norm = std::sqrt(square) + bound.stretch * bins +
           bound.product_error * kSums * std::sqrt(kept) + bound.lost;
  }
  squares[sample] = norm * norm * (1 + bound.terms * 0x1p-52);
}

}  // namespace dpkern::cuda
