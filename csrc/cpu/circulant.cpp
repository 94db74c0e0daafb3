// Norms of block-circulant layers at one position, from circular autocorrelations.
//
// A gradient's block is the circular correlation of an input block with an output gradient's, so
// that by Parseval's theorem || G ||^2 = sum_u A_g(u) A_x(u) with A(u) the sum over an operand's
// blocks and places a of z(a) z(a + u mod d): no transform, and no gradient. A is even, so half of
// the lags suffice. A filter joins lags: sum_uv A_x(u) M(u, v) A_g(v).

#include <algorithm>
#include <cmath>

#include "cpu/ghost_tiles.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"

namespace dpkern::cpu {
namespace {

using ghost::load;
using ghost::round_up;
using ghost::scratch;
using ghost::sum_lanes;

constexpr std::int64_t kGrain = 1 << 14;  // products worth a thread
constexpr int kLanes = 8;
constexpr int kTogether = 8;  // lags that share the loads of a block
using Doubles = Vector<double, kLanes>;

// Where a block of d values lies: once with zeros behind it, then twice in a row.
struct Layout {
  std::int64_t d, once, stride;
  explicit Layout(std::int64_t block)
      : d(block), once(round_up(block, kLanes)), stride(once + 2 * once + kLanes + kTogether) {}
};

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

// sums [lags] = A(u) of `count` blocks at `from`, times scale^2.
template <class T>
DPK_INLINE inline void add_lags(const T* from, std::int64_t count, const Layout& of,
                                std::int64_t lags, double scale, double* room, double* sums) {
  for (std::int64_t j = 0; j < count; ++j) {
    double* const once = room + j * of.stride;
    double* const twice = once + of.once;
    const T* const block = from + j * of.d;
    for (std::int64_t a = 0; a < of.d; ++a) {
      once[a] = twice[a] = twice[of.d + a] = static_cast<double>(block[a]) * scale;
    }
    std::fill(once + of.d, twice, 0.0);
    std::fill(twice + 2 * of.d, once + of.stride, 0.0);
  }
  for (std::int64_t u = 0; u < lags; u += kTogether) {
    Doubles acc[kTogether] = {};
    for (std::int64_t j = 0; j < count; ++j) {
      const double* const once = room + j * of.stride;
      const double* const moved = once + of.once + u;
      for (std::int64_t a = 0; a < of.once; a += kLanes) {
        const Doubles here = load<Doubles>(once + a);
#pragma GCC unroll 8
        for (int i = 0; i < kTogether; ++i) acc[i] += here * load<Doubles>(moved + a + i);
      }
    }
    for (std::int64_t i = 0; i < std::min<std::int64_t>(kTogether, lags - u); ++i) {
      sums[u + i] = sum_lanes<Doubles, kLanes>(acc[i]);
    }
  }
}

}  // namespace

// squares [B] = sum_uv A_x(u) between(u, v) A_g(v), raised by `error` times both operands' squares.
template <class T>
void circulant_squares(const CirculantSquares<T>& call, int threads) {
  const Layout of(call.d);
  const std::int64_t lags = call.L, most = std::max(call.q, call.p);
  const std::int64_t work = (call.q + call.p) * of.once * lags + lags * lags;
  const std::int64_t grain = std::max<std::int64_t>(1, kGrain / std::max<std::int64_t>(1, work));
  parallel_for(call.B, grain, threads, [&](std::int64_t begin, std::int64_t end) {
    double* const room = scratch<double, 0>(most * of.stride);
    double* const x_sums = scratch<double, 1>(2 * lags);
    double* const g_sums = x_sums + lags;
    for (std::int64_t b = begin; b < end; ++b) {
      const T* const x = call.x + b * call.q * call.d;
      const T* const g = call.g + b * call.p * call.d;
      const double x_scale = scale_of(x, call.q * call.d);
      const double g_scale = scale_of(g, call.p * call.d);
      double total = 0;
      versioned([&]() DPK_INLINE {
        add_lags(x, call.q, of, lags, x_scale, room, x_sums);
        add_lags(g, call.p, of, lags, g_scale, room, g_sums);
        for (std::int64_t u = 0; u < lags; ++u) {
          const double* const row = call.between + u * lags;
          double joined = 0;
          for (std::int64_t v = 0; v < lags; ++v) joined += row[v] * g_sums[v];
          total += x_sums[u] * joined;
        }
      });
      const double above = (total < 0 ? 0 : total) + call.error * (x_sums[0] * g_sums[0]);
      const double back = 1 / (x_scale * g_scale);
      call.squares[b] = above * back * back * (1 + 0x1p-42);
    }
  });
}

template void circulant_squares<float>(const CirculantSquares<float>&, int);
template void circulant_squares<double>(const CirculantSquares<double>&, int);

}  // namespace dpkern::cpu
