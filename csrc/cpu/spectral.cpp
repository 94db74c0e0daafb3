// Spectra of a layer's operands: their powers, the norm that is a product over frequencies, the
// bins that a mechanism keeps, and norms in whitened coordinates.

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/ghost_tiles.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"

namespace dpkern::cpu {
namespace {

using namespace ghost;

constexpr std::int64_t kGrain = 1 << 14;  // numbers worth a thread
constexpr std::int64_t kBlock = 256;      // bins of a block, with sums that stay in the L1 cache
constexpr int kLanes = 8;
constexpr int kTogether = 4;  // rows of the matrix that share the loads of a tile
using Doubles = Vector<double, kLanes>;

std::int64_t grain_of(std::int64_t per_piece) {
  return std::max<std::int64_t>(1, kGrain / std::max<std::int64_t>(1, per_piece));
}

// sums [count] = sum over `channels` rows of the powers of complex numbers, rows `stride` apart.
template <class T>
DPK_INLINE inline void add_powers(const T* from, std::int64_t channels, std::int64_t stride,
                                  std::int64_t count, double* __restrict sums) {
  std::fill(sums, sums + count, 0.0);
  for (std::int64_t c = 0; c < channels; ++c) {
    const T* const row = from + 2 * c * stride;
    for (std::int64_t k = 0; k < count; ++k) {
      const double re = static_cast<double>(row[2 * k]);
      const double im = static_cast<double>(row[2 * k + 1]);
      sums[k] += re * re + im * im;
    }
  }
}

DPK_INLINE inline double dot(const double* x, const double* y, std::int64_t count) {
  Doubles sums{};
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) sums += load<Doubles>(x + i) * load<Doubles>(y + i);
  double total = sum_lanes<Doubles, kLanes>(sums);
  for (; i < count; ++i) total += x[i] * y[i];
  return total;
}

DPK_INLINE inline double most(const double* x, std::int64_t count) {
  double largest = 0;
  for (std::int64_t i = 0; i < count; ++i) largest = x[i] > largest ? x[i] : largest;
  return largest;
}

struct Sums {
  double product = 0;
  double x_norm = 0;  // squared
  double g_norm = 0;
  double x_most = 0;
  double g_most = 0;
};

// One group of one sample; `folded` has room for the bins of g.
DPK_INLINE inline void add_group(const SpectralSquares& call, const double* x, const double* g,
                                 double* __restrict folded, Sums& sums) {
  if (call.index == nullptr) {
    for (std::int64_t k = 0; k < call.K; ++k) folded[k] = call.factors[k] * x[k];
  } else {
    std::fill(folded, folded + call.L, 0.0);
    for (std::int64_t k = 0; k < call.K; ++k) folded[call.index[k]] += call.factors[k] * x[k];
  }
  sums.product += dot(folded, g, call.L);
  sums.x_norm += dot(call.x_weights, x, call.K);
  sums.g_norm += dot(call.g_weights, g, call.L);
  sums.x_most = std::max(sums.x_most, most(folded, call.L));
  sums.g_most = std::max(sums.g_most, most(g, call.L));
}

// || (A + e)(B + f) || <= || A B || + max A || f || + max B || e || + || e || || f ||.
double from_above(double error, double share, const Sums& sums) {
  constexpr double kNorms = 1 + 0x1p-10;  // the operands' norms come from computed spectra
  const double x_norm = kNorms * std::sqrt(sums.x_norm);
  const double g_norm = kNorms * std::sqrt(sums.g_norm);
  const double slack = error * (std::sqrt(sums.g_most) * x_norm +
                                share * g_norm * (std::sqrt(sums.x_most) + error * x_norm));
  const double norm = std::sqrt(sums.product) + slack;
  return norm * norm * (1 + 0x1p-42);
}

// kLanes channel pairs' taps, widened; pairs from `pair` on of [outer, taps, inner].
template <class T>
DPK_INLINE inline void load_tile(const T* from, std::int64_t pair, std::int64_t pairs,
                                 std::int64_t taps, std::int64_t inner, Doubles* tile) {
  const std::int64_t block = pair / inner, column = pair % inner;
  if (column + kLanes <= inner) {
    const T* const start = from + block * taps * inner + column;
    for (std::int64_t t = 0; t < taps; ++t) {
      tile[t] = __builtin_convertvector((load<Vector<T, kLanes>>(start + t * inner)), Doubles);
    }
    return;
  }
  for (std::int64_t t = 0; t < taps; ++t) tile[t] = Doubles{};
  const std::int64_t count = std::min<std::int64_t>(kLanes, pairs - pair);
  for (std::int64_t l = 0; l < count; ++l) {
    const std::int64_t p = pair + l;
    const T* const start = from + p / inner * taps * inner + p % inner;
    for (std::int64_t t = 0; t < taps; ++t) tile[t][l] = static_cast<double>(start[t * inner]);
  }
}

// sum of squares of matrix times tile; rows of the matrix are a multiple of kTogether.
DPK_INLINE inline Doubles tile_squares(const Doubles* tile, const double* matrix, std::int64_t rows,
                                       std::int64_t taps) {
  Doubles total{};
  for (std::int64_t r = 0; r < rows; r += kTogether) {
    Doubles sums[kTogether] = {};
    const double* const row = matrix + r * taps;
    for (std::int64_t t = 0; t < taps; ++t) {
#pragma GCC unroll 16
      for (int i = 0; i < kTogether; ++i) sums[i] += row[i * taps + t] * tile[t];
    }
#pragma GCC unroll 16
    for (int i = 0; i < kTogether; ++i) total += sums[i] * sums[i];
  }
  return total;
}

}  // namespace

// powers [B, G, K] = sum over a group's channels of | spectra |^2; spectra are complex [B, C, K].
template <class T>
void spectral_powers(const SpectralPowers<T>& call, int threads) {
  const std::int64_t bins = call.K, channels = call.C / call.G;
  const std::int64_t blocks = (bins + kBlock - 1) / kBlock;
  const std::int64_t pieces = call.B * call.G * blocks;
  const std::int64_t grain = grain_of(2 * channels * std::min(bins, kBlock));
  parallel_for(pieces, grain, threads, [&](std::int64_t begin, std::int64_t end) {
    versioned([&]() DPK_INLINE {
      for (std::int64_t piece = begin; piece < end; ++piece) {
        const std::int64_t set = piece / blocks, first = piece % blocks * kBlock;
        add_powers(call.spectra + 2 * (set * channels * bins + first), channels, bins,
                   std::min(kBlock, bins - first), call.powers + set * bins + first);
      }
    });
  });
}

// squares [B]: sum over groups and bins of factors x_powers g_powers, raised by what the error of
// the transforms can hide.
void spectral_squares(const SpectralSquares& call, int threads) {
  const std::int64_t grain = grain_of(call.G * (call.K + call.L));
  parallel_for(call.B, grain, threads, [&](std::int64_t begin, std::int64_t end) {
    double* const folded = scratch<double, 0>(call.L);
    for (std::int64_t b = begin; b < end; ++b) {
      Sums sums;
      versioned([&]() DPK_INLINE {
        for (std::int64_t set = b * call.G; set < (b + 1) * call.G; ++set) {
          add_group(call, call.x_powers + set * call.K, call.g_powers + set * call.L, folded, sums);
        }
      });
      call.squares[b] = from_above(call.error, call.share, sums);
    }
  });
}

// out [N, R, 2, C] at rows `first`.. = real and imaginary parts of the kept bins of complex spectra
// [B, C, K].
template <class T>
void spectral_gather(const SpectralGather<T>& call, int threads) {
  constexpr std::int64_t kBins = 16;  // bins with lines written while the channels are read
  parallel_for(call.B, grain_of(call.C * call.N), threads,
               [&](std::int64_t begin, std::int64_t end) {
                 const std::int64_t channels = call.C;
                 for (std::int64_t b = begin; b < end; ++b) {
                   const T* const from = call.spectra + 2 * b * channels * call.K;
                   T* const to = call.out + (call.first + b) * 2 * channels;
                   for (std::int64_t first = 0; first < call.N; first += kBins) {
                     const std::int64_t last = std::min(call.N, first + kBins);
                     for (std::int64_t c = 0; c < channels; ++c) {
                       for (std::int64_t k = first; k < last; ++k) {
                         const T* const bin = from + 2 * (c * call.K + call.kept[k]);
                         T* const at = to + k * call.R * 2 * channels + c;
                         at[0] = bin[0];
                         at[channels] = bin[1];
                       }
                     }
                   }
                 }
               });
}

// squares [B] of matrix [r, taps] times every channel pair's taps, from above; grads are
// [B, outer, taps, inner].
template <class T>
void whitened_norm(const WhitenedNorm<T>& call, int threads) {
  const std::int64_t pairs = call.outer * call.inner, taps = call.taps;
  const std::int64_t used = round_up(call.r, kTogether);
  std::vector<double> padded(static_cast<std::size_t>(used * taps), 0.0);
  std::copy(call.matrix, call.matrix + call.r * taps, padded.begin());
  const double size = std::sqrt(square_of(call.matrix, call.r * taps));
  // Cauchy-Schwarz over the taps: || error || <= gamma_taps || matrix || || gradient ||.
  const double error = static_cast<double>(taps + 8) * 0x1p-53 * size;
  parallel_for(call.B, grain_of(pairs * taps), threads, [&](std::int64_t begin, std::int64_t end) {
    Doubles* const tile = reinterpret_cast<Doubles*>(scratch<double, 1>(taps * kLanes));
    for (std::int64_t b = begin; b < end; ++b) {
      const T* const from = call.grads + b * pairs * taps;
      double total = 0, plain = 0;
      versioned([&]() DPK_INLINE {
        Doubles sums{}, squares_of_taps{};
        for (std::int64_t pair = 0; pair < pairs; pair += kLanes) {
          load_tile(from, pair, pairs, taps, call.inner, tile);
          for (std::int64_t t = 0; t < taps; ++t) squares_of_taps += tile[t] * tile[t];
          sums += tile_squares(tile, padded.data(), used, taps);
        }
        total = sum_lanes<Doubles, kLanes>(sums);
        plain = sum_lanes<Doubles, kLanes>(squares_of_taps);
      });
      const double norm = std::sqrt(total) + error * std::sqrt(plain);
      call.squares[b] = norm * norm * (1 + 0x1p-42);
    }
  });
}

template void spectral_powers<float>(const SpectralPowers<float>&, int);
template void spectral_powers<double>(const SpectralPowers<double>&, int);
template void spectral_gather<float>(const SpectralGather<float>&, int);
template void spectral_gather<double>(const SpectralGather<double>&, int);
template void whitened_norm<float>(const WhitenedNorm<float>&, int);
template void whitened_norm<double>(const WhitenedNorm<double>&, int);

}  // namespace dpkern::cpu
