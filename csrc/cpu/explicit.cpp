#include "cpu/explicit.h"

#include <algorithm>
#include <cmath>

#include "core/clip_factor.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"

namespace dpkern::cpu {
namespace {

constexpr std::int64_t kGrain = 1 << 15;    // entries worth a thread
constexpr std::int64_t kColumns = 1 << 12;  // of the sums that stay in the first cache
constexpr int kMostRows = 4;

// Pieces of `per_piece` entries that are worth a thread.
std::int64_t grain_of(std::int64_t per_piece) {
  return std::max<std::int64_t>(1, kGrain / std::max<std::int64_t>(1, per_piece));
}

template <class F>
void contract_columns(const Explicit<F>& part, const F* factors, std::int64_t batch, Range range) {
  for (std::int64_t first = range.begin; first < range.end; first += kColumns) {
    const std::int64_t count = std::min(kColumns, range.end - first);
    const F* used_rows[kMostRows];
    F weights[kMostRows];
    int used = 0;
    for (std::int64_t b = 0; b < batch; ++b) {
      if (factors[b] == 0) continue;  // 0 * inf would not vanish
      used_rows[used] = part.rows + b * part.columns + first;
      weights[used++] = factors[b];
      if (used < kMostRows) continue;
      add_rows(used_rows, weights, used, count, part.out + first);
      used = 0;
    }
    add_rows(used_rows, weights, used, count, part.out + first);
  }
}

}  // namespace

template <class F>
void explicit_norm(const std::vector<Explicit<F>>& parts, std::int64_t batch, double* squares,
                   int threads) {
  std::int64_t entries = 0;
  for (const Explicit<F>& part : parts) entries += part.columns;
  parallel_for(batch, grain_of(entries), threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t b = begin; b < end; ++b) {
      double total = 0;
      for (const Explicit<F>& part : parts) {
        total += power_sum(part.rows + b * part.columns, part.columns, 2);
      }
      squares[b] = total;
    }
  });
}

template <class F>
void contract(const std::vector<Explicit<F>>& parts, const F* factors, std::int64_t batch,
              int threads) {
  for (const Explicit<F>& part : parts) {
    const std::int64_t grain = std::max<std::int64_t>(64, grain_of(batch));
    parallel_for(part.columns, grain, threads, [&](std::int64_t begin, std::int64_t end) {
      contract_columns(part, factors, batch, {begin, end});
    });
  }
}

template <class F>
void clip_factors(const std::vector<const double*>& squares, std::int64_t batch,
                  const ClipRule& rule, double* norms, F* factors) {
  for (std::int64_t b = 0; b < batch; ++b) {
    double square = 0;
    for (const double* part : squares) square += part[b];
    const double norm = std::sqrt(square) * rule.scale;
    const double factor =
        std::isfinite(norm) ? clip_factor(norm, rule.max_norm, rule.automatic) : 0.0;
    norms[b] = norm;
    factors[b] = round_down<F>(factor * rule.scale);
  }
}

template void explicit_norm<float>(const std::vector<Explicit<float>>&, std::int64_t, double*, int);
template void explicit_norm<double>(const std::vector<Explicit<double>>&, std::int64_t, double*,
                                    int);
template void contract<float>(const std::vector<Explicit<float>>&, const float*, std::int64_t, int);
template void contract<double>(const std::vector<Explicit<double>>&, const double*, std::int64_t,
                               int);
template void clip_factors<float>(const std::vector<const double*>&, std::int64_t, const ClipRule&,
                                  double*, float*);
template void clip_factors<double>(const std::vector<const double*>&, std::int64_t, const ClipRule&,
                                   double*, double*);

}  // namespace dpkern::cpu
