// Norms of block-circulant layers at one position, from the powers of their blocks' transforms.
//
// A gradient's block is the circular correlation of an input block with an output gradient's, so
// that by Parseval's theorem || G ||^2 = 1/d sum_k w_k P_g(k) P_x(k) with P(k) the sum over an
// operand's blocks of | z^(k) |^2: no gradient. All of it is float64, samples are the lanes.

#include <algorithm>
#include <cmath>

#include "cpu/circulant_lines.h"
#include "cpu/ghost_tiles.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"

namespace dpkern::cpu {
namespace {

using circulant::Lines;
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
          sums[k * kVectors + v] += at[v] * at[v] + at[kVectors + v] * at[kVectors + v];
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

}  // namespace

// squares [B] = sum_k weights(k) P_x(k) P_g(k), raised by `error` times both operands' squares.
template <class T>
void circulant_squares(const CirculantSquares<T>& call, int threads) {
  const Lines<double>& lines = circulant::lines_of<double>(call.d);
  std::int64_t wide = 0;
  versioned_by_width([&](auto width) DPK_INLINE { wide = Powers<width>::kWide; });
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
          double total = 0;
          for (std::int64_t k = 0; k < lines.K; ++k) {
            total += call.weights[k] * (x_powers[k * Of::kWide + i] * g_powers[k * Of::kWide + i]);
          }
          const std::int64_t sums = lines.K * Of::kWide + i;
          const double above = total + call.error * (x_powers[sums] * g_powers[sums]);
          const double back = 1 / (x_scales[i] * g_scales[i]);
          call.squares[first + i] = above * back * back * (1 + 0x1p-42);
        }
      }
    });
  });
}

template void circulant_squares<float>(const CirculantSquares<float>&, int);
template void circulant_squares<double>(const CirculantSquares<double>&, int);

}  // namespace dpkern::cpu
