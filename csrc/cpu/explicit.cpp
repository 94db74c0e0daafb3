// Norms, clip factors and weighted sums of per-sample gradients that are materialized.

#include "cpu/explicit.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "core/clip_factor.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"

namespace dpkern::cpu {
namespace {

constexpr std::int64_t kGrain = 1 << 15;    // entries worth a thread
constexpr std::int64_t kColumns = 1 << 12;  // columns of the sums that stay in the L1 cache
constexpr std::int64_t kSamples = 256;      // whose factors are made together
constexpr int kMaxRows = 4;

// Pieces of `per_piece` entries that are worth a thread.
std::int64_t grain_of(std::int64_t per_piece) {
  return std::max<std::int64_t>(1, kGrain / std::max<std::int64_t>(1, per_piece));
}

// out [outputs] = the sum of the rows of g [positions, outputs].
template <class F>
DPK_INLINE inline void add_positions(const F* g, std::int64_t positions, std::int64_t outputs,
                                     F* out) {
  constexpr std::int64_t kWide = 64;   // outputs at a time
  constexpr std::int64_t kChain = 16;  // positions that are added one after the other
  for (std::int64_t first = 0; first < outputs; first += kWide) {
    const std::int64_t count = std::min(kWide, outputs - first);
    F sums[kWide] = {};
    for (std::int64_t t = 0; t < positions; t += kChain) {
      F chain[kWide] = {};
      const F* from = g + t * outputs + first;
      for (std::int64_t k = t; k < std::min(t + kChain, positions); ++k, from += outputs) {
        if (count == kWide) {
          for (std::int64_t c = 0; c < kWide; ++c) chain[c] += from[c];
        } else {
          for (std::int64_t c = 0; c < count; ++c) chain[c] += from[c];
        }
      }
      for (std::int64_t c = 0; c < kWide; ++c) sums[c] += chain[c];
    }
    std::copy_n(sums, count, out + first);
  }
}

template <class F, class S>
void contract_columns(const Explicit<F, S>& part, const F* factors, std::int64_t batch,
                      Range range) {
  for (std::int64_t first = range.begin; first < range.end; first += kColumns) {
    const std::int64_t count = std::min(kColumns, range.end - first);
    const F* used_rows[kMaxRows];
    F weights[kMaxRows];
    int used = 0;
    for (std::int64_t b = 0; b < batch; ++b) {
      if (factors[b] == 0) continue;  // 0 * inf would not vanish
      used_rows[used] = part.rows + b * part.columns + first;
      weights[used++] = factors[b];
      if (used < kMaxRows) continue;
      add_rows(used_rows, weights, used, count, part.out + first);
      used = 0;
    }
    add_rows(used_rows, weights, used, count, part.out + first);
  }
}

// outs[i] += sum_b of factors[b] grads[i][b], a whole number each where S is an integer; a factor
// of 0 drops its row.
template <class S, class Call>
void contract_all(const Call& call, int threads) {
  using F = std::decay_t<decltype(*call.factors)>;
  for (std::size_t i = 0; i < call.grads.size(); ++i) {
    const Explicit<F, S> part{call.grads[i], call.P[i], call.outs[i]};
    const std::int64_t grain = std::max<std::int64_t>(64, grain_of(call.B));
    parallel_for(part.columns, grain, threads, [&](std::int64_t begin, std::int64_t end) {
      contract_columns(part, call.factors, call.B, {begin, end});
    });
  }
}

}  // namespace

// squares[b] = sum over all parameters of || grads[i][b] ||^2.
template <class F>
void explicit_norm(const ExplicitNorm<F>& call, int threads) {
  std::int64_t entries = 0;
  for (const std::int64_t columns : call.P) entries += columns;
  parallel_for(call.B, grain_of(entries), threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t b = begin; b < end; ++b) {
      double total = 0;
      for (std::size_t i = 0; i < call.grads.size(); ++i) {
        total += power_sum(call.grads[i] + b * call.P[i], call.P[i], 2);
      }
      call.squares[b] = total;
    }
  });
}

template <class F>
void contract(const Contract<F>& call, int threads) {
  contract_all<F>(call, threads);
}

template <class F>
void explicit_integer_sum(const ExplicitIntegerSum<F>& call, int threads) {
  contract_all<std::int32_t>(call, threads);
}

// norms[b] = scale sqrt(sum_k squares[k][b]) and the factor that clips the captured gradient,
// `scale` included, never rounded up; 0 where the norm is not finite.
template <class F>
void clip_factors(const ClipFactors<F>& call, int) {
  for (std::int64_t first = 0; first < call.B; first += kSamples) {
    const std::int64_t count = std::min(kSamples, call.B - first);
    versioned([&]() DPK_INLINE {
      const double scale = call.scale, bound = call.max_grad_norm;
      const bool automatic = call.automatic;
      const std::int64_t n = count;
      double norms[kSamples] = {};
      F factors[kSamples];
      for (const double* part : call.squares) {
        const double* const from = part + first;
        for (std::int64_t b = 0; b < n; ++b) norms[b] += from[b];
      }
      for (std::int64_t b = 0; b < n; ++b) {
        const double norm = std::sqrt(norms[b]) * scale;
        const double factor = clip_factor(norm, bound, automatic);
        norms[b] = norm;
        factors[b] = round_down<F>((std::isfinite(norm) ? factor : 0.0) * scale);
      }
      std::copy_n(norms, n, call.norms + first);
      std::copy_n(factors, n, call.factors + first);
    });
  }
}

template void explicit_norm<float>(const ExplicitNorm<float>&, int);
template void explicit_norm<double>(const ExplicitNorm<double>&, int);
template void contract<float>(const Contract<float>&, int);
template void contract<double>(const Contract<double>&, int);
template void explicit_integer_sum<float>(const ExplicitIntegerSum<float>&, int);
template void explicit_integer_sum<double>(const ExplicitIntegerSum<double>&, int);
template void clip_factors<float>(const ClipFactors<float>&, int);
template void clip_factors<double>(const ClipFactors<double>&, int);

template <class F>
void sum_positions(const F* g, std::int64_t batch, std::int64_t positions, std::int64_t outputs,
                   F* out, int threads) {
  const std::int64_t grain = grain_of(positions * outputs);
  parallel_for(batch, grain, threads, [&](std::int64_t begin, std::int64_t end) {
    versioned([&]() DPK_INLINE {
      for (std::int64_t b = begin; b < end; ++b) {
        add_positions(g + b * positions * outputs, positions, outputs, out + b * outputs);
      }
    });
  });
}

template void sum_positions<float>(const float*, std::int64_t, std::int64_t, std::int64_t, float*,
                                   int);
template void sum_positions<double>(const double*, std::int64_t, std::int64_t, std::int64_t,
                                    double*, int);

}  // namespace dpkern::cpu
