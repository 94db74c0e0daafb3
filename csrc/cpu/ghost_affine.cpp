// Backward of normalisation layers: input gradient and per-sample gradients of scale and shift in
// one pass over g and x. A null weight stands for ones.

#include <algorithm>

#include "cpu/ghost_tiles.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"

namespace dpkern::cpu {
namespace {

using namespace ghost;

// g, x, dx [batch, rows, columns]; mean, rstd [batch, rows]; dweight, dbias [batch, columns].
// Root-mean-square normalisation has neither mean nor dbias.
template <class F>
struct LayerNorm {
  const F *g, *x, *mean, *rstd, *weight;
  F *dx, *dweight, *dbias;
  std::int64_t batch, rows, columns;
};

// g, x, dx [batch, groups * channels, places]; mean, rstd [batch, groups]; dweight, dbias
// [batch, groups * channels].
template <class F>
struct GroupNorm {
  const F *g, *x, *mean, *rstd, *weight;
  F *dx, *dweight, *dbias;
  std::int64_t batch, groups, channels, places;
};

constexpr std::int64_t kGrain = 1 << 14;  // entries worth a thread

template <class V, int kLanes>
DPK_INLINE inline double lane_sum(V x) {
  return static_cast<double>(sum_lanes<V, kLanes>(x));
}

// The two means of a row, h = g weight: mean(h) and mean(h xhat).
template <class F>
struct Means {
  F h;
  F hx;
};

// dweight += g xhat, dbias += g, and the sums of h and h xhat, in one pass over a row.
template <bool kCentred, class V, int kLanes, class F>
DPK_INLINE inline Means<F> row_sums(const F* g, const F* x, const F* weight, F mean, F rstd,
                                    std::int64_t n, F* dweight, F* dbias) {
  V h_sum{}, hx_sum{};
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const V grad = load<V>(g + i), scale = load<V>(weight + i);
    const V xhat = (load<V>(x + i) - mean) * rstd, h = grad * scale;
    hx_sum += h * xhat;
    const V dw = load<V>(dweight + i) + grad * xhat;
    __builtin_memcpy(dweight + i, &dw, sizeof(V));
    if constexpr (kCentred) {
      h_sum += h;
      const V db = load<V>(dbias + i) + grad;
      __builtin_memcpy(dbias + i, &db, sizeof(V));
    }
  }
  double h_total = lane_sum<V, kLanes>(h_sum), hx_total = lane_sum<V, kLanes>(hx_sum);
  for (; i < n; ++i) {
    const F xhat = (x[i] - mean) * rstd, h = g[i] * weight[i];
    hx_total += static_cast<double>(h * xhat);
    dweight[i] += g[i] * xhat;
    if constexpr (kCentred) {
      h_total += static_cast<double>(h);
      dbias[i] += g[i];
    }
  }
  const double count = static_cast<double>(n);
  return {static_cast<F>(h_total / count), static_cast<F>(hx_total / count)};
}

// dx = rstd (g weight - mean(h) - xhat mean(h xhat)).
template <class V, int kLanes, class F>
DPK_INLINE inline void row_gradient(const F* g, const F* x, const F* weight, F mean, F rstd,
                                    Means<F> means, std::int64_t n, F* dx) {
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const V xhat = (load<V>(x + i) - mean) * rstd;
    const V value = (load<V>(g + i) * load<V>(weight + i) - means.h - xhat * means.hx) * rstd;
    __builtin_memcpy(dx + i, &value, sizeof(V));
  }
  for (; i < n; ++i) {
    const F xhat = (x[i] - mean) * rstd;
    dx[i] = (g[i] * weight[i] - means.h - xhat * means.hx) * rstd;
  }
}

template <bool kCentred, class F>
void sample_layer_norm(const LayerNorm<F>& norm, const F* weight, std::int64_t b) {
  versioned_by_width([&](auto width) DPK_INLINE {
    constexpr int kLanes = decltype(width)::value / static_cast<int>(sizeof(F));
    using V = Vector<F, kLanes>;
    const std::int64_t n = norm.columns;
    F* const dweight = norm.dweight + b * n;
    F* const dbias = kCentred ? norm.dbias + b * n : nullptr;
    std::fill_n(dweight, n, F{0});
    if constexpr (kCentred) std::fill_n(dbias, n, F{0});
    for (std::int64_t row = b * norm.rows; row < (b + 1) * norm.rows; ++row) {
      const F *g = norm.g + row * n, *x = norm.x + row * n;
      const F mean = kCentred ? norm.mean[row] : F{0}, rstd = norm.rstd[row];
      const Means<F> means =
          row_sums<kCentred, V, kLanes>(g, x, weight, mean, rstd, n, dweight, dbias);
      row_gradient<V, kLanes>(g, x, weight, mean, rstd, means, n, norm.dx + row * n);
    }
  });
}

// Sums of a channel over its places: g and g xhat; chains of float are widened every block.
template <class V, int kLanes, class F>
DPK_INLINE inline void channel_sums(const F* g, const F* x, F mean, F rstd, std::int64_t n,
                                    double* g_total, double* gx_total) {
  constexpr std::int64_t kUnroll = 2 * kLanes, kBlock = 64 * kUnroll;
  double g_sum = 0, gx_sum = 0;
  std::int64_t i = 0;
  while (i + kUnroll <= n) {
    V g0{}, g1{}, gx0{}, gx1{};
    const std::int64_t end = std::min(n - kUnroll, i + kBlock - kUnroll);
    for (; i <= end; i += kUnroll) {
      const V a = load<V>(g + i), b = load<V>(g + i + kLanes);
      g0 += a, g1 += b;
      gx0 += a * ((load<V>(x + i) - mean) * rstd);
      gx1 += b * ((load<V>(x + i + kLanes) - mean) * rstd);
    }
    g_sum += lane_sum<V, kLanes>(g0 + g1);
    gx_sum += lane_sum<V, kLanes>(gx0 + gx1);
  }
  for (; i < n; ++i) {
    g_sum += static_cast<double>(g[i]);
    gx_sum += static_cast<double>(g[i] * ((x[i] - mean) * rstd));
  }
  *g_total = g_sum, *gx_total = gx_sum;
}

template <class F>
void one_group(const GroupNorm<F>& norm, const F* weights, std::int64_t index) {
  versioned_by_width([&](auto width) DPK_INLINE {
    constexpr int kLanes = decltype(width)::value / static_cast<int>(sizeof(F));
    using V = Vector<F, kLanes>;
    const std::int64_t n = norm.places, first = index * norm.channels;
    const F* const weight = weights + index % norm.groups * norm.channels;
    const F mean = norm.mean[index], rstd = norm.rstd[index];
    double h_total = 0, hx_total = 0;
    for (std::int64_t c = 0; c < norm.channels; ++c) {
      double g_sum, gx_sum;
      channel_sums<V, kLanes>(norm.g + (first + c) * n, norm.x + (first + c) * n, mean, rstd, n,
                              &g_sum, &gx_sum);
      norm.dbias[first + c] = static_cast<F>(g_sum);
      norm.dweight[first + c] = static_cast<F>(gx_sum);
      h_total += g_sum * static_cast<double>(weight[c]);
      hx_total += gx_sum * static_cast<double>(weight[c]);
    }
    const double count = static_cast<double>(std::max<std::int64_t>(1, norm.channels * n));
    const F h_mean = static_cast<F>(h_total / count), hx_mean = static_cast<F>(hx_total / count);
    for (std::int64_t c = 0; c < norm.channels; ++c) {
      const F *g = norm.g + (first + c) * n, *x = norm.x + (first + c) * n;
      F* const dx = norm.dx + (first + c) * n;
      const F scale = weight[c];
      std::int64_t i = 0;
      for (; i + kLanes <= n; i += kLanes) {
        const V xhat = (load<V>(x + i) - mean) * rstd;
        const V value = (load<V>(g + i) * scale - h_mean - xhat * hx_mean) * rstd;
        __builtin_memcpy(dx + i, &value, sizeof(V));
      }
      for (; i < n; ++i) {
        dx[i] = (g[i] * scale - h_mean - (x[i] - mean) * rstd * hx_mean) * rstd;
      }
    }
  });
}

// `weight`, or ones.
template <class F>
const F* scales(const F* weight, std::int64_t count) {
  if (weight != nullptr) return weight;
  F* const ones = scratch<F, 6>(count);
  std::fill_n(ones, count, F{1});
  return ones;
}

std::int64_t grain_of(std::int64_t entries) {
  return std::max<std::int64_t>(1, kGrain / std::max<std::int64_t>(1, entries));
}

template <bool kCentred, class F>
void each_sample(const LayerNorm<F>& norm, int threads) {
  const F* const weight = scales(norm.weight, norm.columns);
  parallel_for(norm.batch, grain_of(norm.rows * norm.columns), threads,
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t b = begin; b < end; ++b) {
                   sample_layer_norm<kCentred>(norm, weight, b);
                 }
               });
}

}  // namespace

template <class F>
void layer_norm_backward(const LayerNormBackward<F>& call, int threads) {
  each_sample<true>(LayerNorm<F>{call.g, call.x, call.mean, call.rstd, call.weight, call.dx,
                                 call.dweight, call.dbias, call.B, call.T, call.D},
                    threads);
}

template <class F>
void rms_norm_backward(const RmsNormBackward<F>& call, int threads) {
  each_sample<false>(LayerNorm<F>{call.g, call.x, nullptr, call.rstd, call.weight, call.dx,
                                  call.dweight, nullptr, call.B, call.T, call.D},
                     threads);
}

template <class F>
void group_norm_backward(const GroupNormBackward<F>& call, int threads) {
  const GroupNorm<F> norm{call.g,
                          call.x,
                          call.mean,
                          call.rstd,
                          call.weight,
                          call.dx,
                          call.dweight,
                          call.dbias,
                          call.B,
                          call.groups,
                          call.C / std::max<std::int64_t>(1, call.groups),
                          call.S};
  const F* const weight = scales(norm.weight, norm.groups * norm.channels);
  parallel_for(norm.batch * norm.groups, grain_of(norm.channels * norm.places), threads,
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t i = begin; i < end; ++i) one_group(norm, weight, i);
               });
}

template void layer_norm_backward<float>(const LayerNormBackward<float>&, int);
template void layer_norm_backward<double>(const LayerNormBackward<double>&, int);
template void rms_norm_backward<float>(const RmsNormBackward<float>&, int);
template void rms_norm_backward<double>(const RmsNormBackward<double>&, int);
template void group_norm_backward<float>(const GroupNormBackward<float>&, int);
template void group_norm_backward<double>(const GroupNormBackward<double>&, int);

}  // namespace dpkern::cpu
