// Norms of block-circulant layers at one position, from the powers of their blocks' transforms.
//
// A gradient's block is the circular correlation of an input block with an output gradient's, so
// that by Parseval's theorem || G ||^2 = 1/d sum_k w_k P_g(k) P_x(k) with P(k) the sum over an
// operand's blocks of | z^(k) |^2: no gradient. All of it is float64. Samples are the lanes; blocks
// that fill a vector of lanes, some at a time, are not transformed at all: P is the transform of
// the sum of their circular autocorrelations, which turn lanes around.

#include <algorithm>
#include <cmath>

#include "cpu/circulant_lines.h"
#include "cpu/ghost_tiles.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"

namespace dpkern::cpu {
namespace {

using circulant::Lines;
using ghost::load;
using ghost::scratch;

// A power of two that brings the largest value near 1, so that no square leaves the range; 1 where
// squares of the type cannot.
template <class T>
double scale_of(const T* from, std::int64_t count) {
  if constexpr (sizeof(T) < sizeof(double)) {
    return 1;
  } else {
    double most = 0;
    for (std::int64_t i = 0; i < count; ++i) most = std::max(most, std::abs(from[i]));
    return most > 0 && std::isfinite(most) ? std::ldexp(1.0, -std::ilogb(most)) : 1;
  }
}

template <int kBytes>
struct Powers : circulant::Blocks<double, kBytes> {
  using Base = circulant::Blocks<double, kBytes>;
  using Base::kVectors, Base::kWide, Base::transform, Base::turn_in;
  using V = typename Base::V;

  static std::int64_t room_of(std::int64_t values, const Lines<double>& lines) {
    return (2 * values + 2 * lines.K) * kWide + Base::room(lines);
  }
  // powers [K + 1, kWide]: those of each frequency, then the sum of all squares, of samples that
  // are multiplied by their scale.
  template <class T>
  static DPK_INLINE void of(const T* from, std::int64_t used, std::int64_t blocks,
                            const Lines<double>& lines, double* room, double* powers,
                            double* scales) {
    const std::int64_t values = blocks * lines.d;
    double *const rows = room, *const flat = rows + values * kWide;
    double *const spectra = flat + values * kWide, *const folded = spectra + 2 * lines.K * kWide;
    for (std::int64_t i = 0; i < used; ++i) {
      scales[i] = scale_of(from + i * values, values);
      for (std::int64_t n = 0; n < values; ++n) {
        rows[i * values + n] = static_cast<double>(from[i * values + n]) * scales[i];
      }
    }
    turn_in(rows, values, used, values, flat);
    V* const sums = reinterpret_cast<V*>(powers);
    std::fill(powers, powers + (lines.K + 1) * kWide, 0.0);
    for (std::int64_t j = 0; j < blocks; ++j) {
      transform(lines, flat + j * lines.d * kWide, folded, spectra, 2 * kWide);
      const V* at = reinterpret_cast<const V*>(spectra);
      for (std::int64_t k = 0; k < lines.K; ++k, at += 2 * kVectors) {
        for (int v = 0; v < kVectors; ++v) {
          V power = at[v] * at[v];
          if (!lines.real(k)) power += at[kVectors + v] * at[kVectors + v];
          sums[k * kVectors + v] += power;
        }
      }
    }
    const V* const all = reinterpret_cast<const V*>(flat);
    for (std::int64_t n = 0; n < values; ++n) {
      for (int v = 0; v < kVectors; ++v) {
        const V value = all[n * kVectors + v];
        sums[lines.K * kVectors + v] += value * value;
      }
    }
  }
};

// The same powers where the lanes of a vector are whole blocks.
template <int kBytes>
struct Correlations {
  static constexpr int kLanes = kBytes / static_cast<int>(sizeof(double));
  using V = Vector<double, kLanes>;
  using Mask = Vector<std::int64_t, kLanes>;

  template <class T>
  static DPK_INLINE V widened(const T* from, double scale) {
    return scale * __builtin_convertvector(load<Vector<T, kLanes>>(from), V);
  }
  // powers [d / 2 + 2]: those of each frequency, then the sum of all squares.
  template <int kBlock, class T>
  static DPK_INLINE void of(const T* from, std::int64_t values, double scale, double* powers) {
    constexpr int kLags = kBlock / 2 + 1, kChains = 2;
    Mask turned[kLags];
#pragma GCC unroll 8
    for (int u = 0; u < kLags; ++u) {
#pragma GCC unroll 8
      for (int i = 0; i < kLanes; ++i) turned[u][i] = i / kBlock * kBlock + (i + u) % kBlock;
    }
    V sums[kChains][kLags] = {};
    const auto add = [&](V x, V* to) DPK_INLINE {
      to[0] += x * x;
#pragma GCC unroll 8
      for (int u = 1; u < kLags; ++u) to[u] += x * __builtin_shuffle(x, turned[u]);
    };
    std::int64_t n = 0;
    for (; n + kChains * kLanes <= values; n += kChains * kLanes) {
#pragma GCC unroll 2
      for (int i = 0; i < kChains; ++i) add(widened(from + n + i * kLanes, scale), sums[i]);
    }
    for (; n < values; n += kLanes) {
      T last[kLanes] = {};
      std::copy(from + n, from + std::min(values, n + kLanes), last);
      add(widened(last, scale), sums[0]);
    }
    double lags[kLags];
    for (int u = 0; u < kLags; ++u) {
      lags[u] = ghost::sum_lanes<V, kLanes>(sums[0][u] + sums[1][u]);
    }
    for (int k = 0; k < kLags; ++k) {
      powers[k] = lags[0];
      for (int u = 1; u < kLags; ++u) {
        constexpr double kTurns[] = {1, 0.7071067811865476, 0, -0.7071067811865476, -1};
        const int turn = u * k % kBlock * (8 / kBlock);  // of eight
        powers[k] += (2 * u == kBlock ? 1 : 2) * kTurns[turn > 4 ? 8 - turn : turn] * lags[u];
      }
    }
    powers[kLags] = lags[0];
  }
  static bool reach(std::int64_t block) {
    return (block == 2 || block == 4 || block == 8) && block <= kLanes;
  }
  template <class T>
  static DPK_INLINE void of_any(const T* from, std::int64_t values, std::int64_t block,
                                double scale, double* powers) {
    if (block == 2) return of<2>(from, values, scale, powers);
    if constexpr (kLanes >= 4) {
      if (block == 4) return of<4>(from, values, scale, powers);
    }
    if constexpr (kLanes >= 8) of<8>(from, values, scale, powers);
  }
};

// From the powers of both operands, `apart` from frequency to frequency, to the square from above.
template <class T>
double from_above(const CirculantSquares<T>& call, const double* x_powers, const double* g_powers,
                  std::int64_t apart, double x_scale, double g_scale) {
  const std::int64_t K = call.d / 2 + 1;
  double total = 0;
  for (std::int64_t k = 0; k < K; ++k) {
    total += call.weights[k] * (x_powers[k * apart] * g_powers[k * apart]);
  }
  const double above = total + call.error * (x_powers[K * apart] * g_powers[K * apart]);
  const double back = 1 / (x_scale * g_scale);
  return above * back * back * (1 + 0x1p-42);
}

}  // namespace

// squares [B] = sum_k weights(k) P_x(k) P_g(k), raised by `error` times both operands' squares.
template <class T>
void circulant_squares(const CirculantSquares<T>& call, int threads) {
  const Lines<double>& lines = circulant::lines_of<double>(call.d);
  std::int64_t wide = 0;
  bool by_lags = false;
  versioned_by_width([&](auto width) DPK_INLINE {
    wide = Powers<width>::kWide;
    by_lags = Correlations<width>::reach(call.d);
  });
  if (by_lags) {
    parallel_for(call.B, 1, threads, [&](std::int64_t begin, std::int64_t end) {
      const std::int64_t x_size = call.q * call.d, g_size = call.p * call.d;
      for (std::int64_t b = begin; b < end; ++b) {
        const T *const x = call.x + b * x_size, *const g = call.g + b * g_size;
        const double x_scale = scale_of(x, x_size), g_scale = scale_of(g, g_size);
        double x_powers[6], g_powers[6];
        versioned_by_width([&](auto width) DPK_INLINE {
          Correlations<width>::of_any(x, x_size, call.d, x_scale, x_powers);
          Correlations<width>::of_any(g, g_size, call.d, g_scale, g_powers);
        });
        call.squares[b] = from_above(call, x_powers, g_powers, 1, x_scale, g_scale);
      }
    });
    return;
  }
  parallel_for((call.B + wide - 1) / wide, 1, threads, [&](std::int64_t begin, std::int64_t end) {
    versioned_by_width([&](auto width) DPK_INLINE {
      using Of = Powers<width>;
      const std::int64_t most = std::max(call.q, call.p) * call.d, size = (lines.K + 1) * Of::kWide;
      double* const x_powers = scratch<double, 0>(2 * size + Of::room_of(most, lines));
      double *const g_powers = x_powers + size, *const room = g_powers + size;
      double x_scales[Of::kWide], g_scales[Of::kWide];
      for (std::int64_t tile = begin; tile < end; ++tile) {
        const std::int64_t first = tile * Of::kWide;
        const std::int64_t used = std::min<std::int64_t>(Of::kWide, call.B - first);
        Of::of(call.x + first * call.q * call.d, used, call.q, lines, room, x_powers, x_scales);
        Of::of(call.g + first * call.p * call.d, used, call.p, lines, room, g_powers, g_scales);
        for (std::int64_t i = 0; i < used; ++i) {
          call.squares[first + i] =
              from_above(call, x_powers + i, g_powers + i, Of::kWide, x_scales[i], g_scales[i]);
        }
      }
    });
  });
}

template void circulant_squares<float>(const CirculantSquares<float>&, int);
template void circulant_squares<double>(const CirculantSquares<double>&, int);

}  // namespace dpkern::cpu
