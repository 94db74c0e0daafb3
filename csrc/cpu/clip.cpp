// Per-sample norms and clipped sums of explicit per-sample gradients, several tensors at a time,
// each row read from memory once: norm, factor and sum follow while the row is in the cache.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <type_traits>

#include "core/clip_factor.h"
#include "cpu/isa.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"

namespace dpkern::cpu {
namespace {

constexpr std::int64_t kGrain = 1 << 16;       // entries worth a thread
constexpr std::int64_t kGroupBytes = 1 << 20;  // bytes of the rows that all threads hold at a time
constexpr int kMaxRows = 4;                    // rows of a group, which shares a pass over the sums

// One thread's share of a call: groups of whole rows, so that norm, factor and sum of a row follow
// each other while it is in the cache and no thread waits for another before the end. G is the
// gradients' type, S the sums'.
template <class G, class S>
class ClipWorker {
 public:
  using Factor = typename RowOf<G>::Value;  // float, or double for double gradients

  ClipWorker(const ClipRows<G>& call, const std::vector<S*>& sums)
      : call_(call),
        p_(call.p == Power::k2 ? 2 : 1),
        sums_(sums),
        factors_(sums.size() * kMaxRows),
        power_(call.grads.size()) {}

  // Returns how many rows are not finite.
  std::int64_t run(Range rows, int parts) {
    std::int64_t row_bytes = 1;  // of one row on every thread
    for (const std::int64_t columns : call_.P) {
      row_bytes += columns * static_cast<std::int64_t>(sizeof(G)) * parts;
    }
    const std::int64_t group = std::clamp<std::int64_t>(kGroupBytes / row_bytes, 1, kMaxRows);
    std::int64_t nonfinite = 0;
    for (std::int64_t row = rows.begin; row < rows.end; row += group) {
      const int count = static_cast<int>(std::min(group, rows.end - row));
      for (int r = 0; r < count; ++r) nonfinite += measure(row + r, r) ? 0 : 1;
      if constexpr (std::is_integral_v<S>) {
        for (int r = 0; r < count; ++r) add_integers(row + r, r);
      } else {
        add_floats(row, count);
      }
    }
    return nonfinite;
  }

 private:
  const G* row_of(std::size_t item, std::int64_t row) const {
    return call_.grads[item] + row * call_.P[item];
  }
  Factor& factor(std::size_t item, int r) {
    return factors_[item * kMaxRows + static_cast<std::size_t>(r)];
  }
  double norm_of(double power) const { return p_ == 2 ? std::sqrt(power) : power; }

  // The norm of one row, and from it its clip factors; 0 for a row that is not finite. Returns
  // whether it is.
  bool measure(std::int64_t row, int r) {
    double total = 0;
    for (std::size_t i = 0; i < power_.size(); ++i) {
      power_[i] = power_sum(row_of(i, row), call_.P[i], p_);
      total += power_[i];
    }
    call_.norms[row] = norm_of(total);
    const bool finite = std::isfinite(total);
    for (std::size_t i = 0; i < sums_.size(); ++i) {
      const double norm = norm_of(call_.style == Style::kPerLayer ? power_[i] : total);
      const ClipBound& bound = call_.bounds[i];
      const double clip =
          finite ? clip_factor(norm, bound.max_norm, call_.style == Style::kAutomatic) : 0;
      factor(i, r) = round_down<Factor>(std::is_integral_v<S> ? clip * bound.per_unit : clip);
    }
    return finite;
  }

  void add_floats(std::int64_t row, int count) {
    for (std::size_t i = 0; i < sums_.size(); ++i) {
      const G* rows[kMaxRows];
      Factor weights[kMaxRows];
      int used = 0;
      for (int r = 0; r < count; ++r) {
        if (factor(i, r) == 0) continue;  // not finite: 0 * inf would not vanish
        rows[used] = row_of(i, row + r);
        weights[used++] = factor(i, r);
      }
      add_rows(rows, weights, used, call_.P[i], sums_[i]);
    }
  }

  // Add the sample first, then verify it: if its exact integer norm exceeds M, which only rounding
  // at the bound can cause, subtract it, scale it by 1 - 2^-16 and retry.
  void add_integers(std::int64_t row, int r) {
    for (;;) {
      if (within_bounds(row, r, 1)) return;
      within_bounds(row, r, -1);
      for (std::size_t i = 0; i < sums_.size(); ++i) factor(i, r) *= Factor(1 - 0x1p-16);
    }
  }

  // Adds sign * trunc(factor row) and tells whether the integers keep the bound of each clip group.
  bool within_bounds(std::int64_t row, int r, int sign) {
    bool kept = true;
    std::int64_t power = 0;
    for (std::size_t i = 0; i < sums_.size(); ++i) {
      const std::int64_t most = call_.bounds[i].unit_bound;
      if (call_.style == Style::kPerLayer) power = 0;
      if (factor(i, r) != 0) {
        power += add_integer_row(row_of(i, row), factor(i, r), sign, p_, call_.P[i], sums_[i]);
      }
      const bool group_ends = call_.style == Style::kPerLayer || i + 1 == sums_.size();
      if (group_ends && power > (p_ == 2 ? most * most : most)) kept = false;
    }
    return kept;
  }

  const ClipRows<G>& call_;
  const int p_;
  const std::vector<S*>& sums_;  // none: norms only
  std::vector<Factor> factors_;  // [item, row of the group]
  std::vector<double> power_;
};

// Memory for the sums of the threads after the first. The caller owns it, because a thread that a
// later, smaller team leaves out would free its own. Up to a megabyte stays for the next call: page
// faults cost more than zeroing.
template <class S>
S* room_for(std::int64_t entries, std::unique_ptr<S[]>& large) {
  constexpr std::int64_t kKept = (1 << 20) / sizeof(S);
  const auto size = static_cast<std::size_t>(entries);
  if (entries > kKept) {
    large.reset(new S[size]);
    return large.get();
  }
  static thread_local std::vector<S> kept;
  if (kept.size() < size) kept.resize(size);
  return kept.data();
}

// Thread 0 adds to the caller's sums, the others to sums of their own, added at the end in order:
// the result depends on the number of threads (floats: in the last bits; integers: not at all).
template <class S, class G>
std::int64_t run(const ClipRows<G>& call, int threads) {
  std::vector<S*> sums;
  for (void* const sum : call.sums) sums.push_back(static_cast<S*>(sum));
  std::int64_t columns = 0;
  for (std::size_t i = 0; i < call.P.size(); ++i) {
    columns += call.P[i];
    if (call.fresh && !sums.empty()) std::fill_n(sums[i], call.P[i], S{0});
  }
  if (call.B == 0) return 0;
  const std::int64_t row_entries = std::max<std::int64_t>(1, columns);
  const std::int64_t rows_worth = std::max<std::int64_t>(kMaxRows, kGrain / row_entries);
  const int team = useful_threads(call.B, rows_worth, threads);
  if (team <= 1) return ClipWorker<G, S>(call, sums).run({0, call.B}, 1);

  std::unique_ptr<S[]> large;
  S* const room = sums.empty() ? nullptr : room_for<S>(columns * (team - 1), large);
  std::vector<S*> own(static_cast<std::size_t>(team), nullptr);
  std::atomic<std::int64_t> nonfinite{0};
  const auto share = [&](int index, int parts) {
    const Range rows = part_of(call.B, index, parts);
    if (sums.empty() || index == 0) {
      nonfinite += ClipWorker<G, S>(call, sums).run(rows, parts);
      return;
    }
    S* next = room + columns * (index - 1);
    std::fill_n(next, columns, S{0});
    own[static_cast<std::size_t>(index)] = next;
    std::vector<S*> mine;
    for (const std::int64_t size : call.P) {
      mine.push_back(next);
      next += size;
    }
    nonfinite += ClipWorker<G, S>(call, mine).run(rows, parts);
  };
#if defined(_OPENMP)
#pragma omp parallel num_threads(team)
#endif
  share(thread_index(), team_size());
  std::int64_t before = 0;
  for (std::size_t i = 0; i < sums.size(); ++i) {
    parallel_for(call.P[i], kGrain, team, [&](std::int64_t begin, std::int64_t end) {
      for (const S* other : own) {
        if (other == nullptr) continue;
        add_to(other + before + begin, end - begin, sums[i] + begin);
      }
    });
    before += call.P[i];
  }
  return nonfinite;
}

}  // namespace

template <class G>
std::int64_t clip_rows(const ClipRows<G>& call, int threads) {
  if (call.sums_kind == Summed::kInt32) return run<std::int32_t>(call, threads);
  if (call.sums_kind == Summed::kInt64) return run<std::int64_t>(call, threads);
  return run<typename RowOf<G>::Value>(call, threads);
}

template std::int64_t clip_rows(const ClipRows<float>&, int);
template std::int64_t clip_rows(const ClipRows<double>&, int);
template std::int64_t clip_rows(const ClipRows<Bfloat16>&, int);

}  // namespace dpkern::cpu
