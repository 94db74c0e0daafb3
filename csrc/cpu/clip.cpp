#include "cpu/clip.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <type_traits>

#include "core/clip_factor.h"
#include "cpu/isa.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"

namespace dpkern::cpu {
namespace {

constexpr std::int64_t kGrain = 1 << 16;       // entries worth a thread
constexpr std::int64_t kGroupBytes = 1 << 20;  // of the rows that all threads hold at a time
constexpr int kMostRows = 4;                   // of a group, which shares one pass over the sums

// One thread's share of a call: groups of whole rows, so that norm, factor and sum of a row follow
// each other while it is in the cache and no thread waits for another before the end. G is the
// gradients' type, S the sums'.
template <class G, class S>
class Share {
 public:
  using Factor = typename RowOf<G>::Value;  // float, or double for double gradients

  Share(const ClipPlan& plan, const std::vector<ClipItem>& items, const std::vector<S*>& sums,
        double* norms)
      : plan_(plan),
        items_(items),
        sums_(sums),
        norms_(norms),
        factors_(items.size() * kMostRows),
        power_(items.size()) {}

  void run(Range rows, int parts) {
    std::int64_t row_bytes = 1;  // of one row on every thread
    for (const ClipItem& item : items_) {
      row_bytes += item.columns * static_cast<std::int64_t>(sizeof(G)) * parts;
    }
    const std::int64_t group = std::clamp<std::int64_t>(kGroupBytes / row_bytes, 1, kMostRows);
    for (std::int64_t row = rows.begin; row < rows.end; row += group) {
      const int count = static_cast<int>(std::min(group, rows.end - row));
      for (int r = 0; r < count; ++r) measure(row + r, r);
      if constexpr (std::is_integral_v<S>) {
        for (int r = 0; r < count; ++r) add_integers(row + r, r);
      } else if (plan_.arithmetic == Arithmetic::kFloat) {
        add_floats(row, count);
      }
    }
  }

 private:
  const G* row_of(std::size_t item, std::int64_t row) const {
    return static_cast<const G*>(items_[item].gradients) + row * items_[item].columns;
  }
  Factor& factor(std::size_t item, int r) {
    return factors_[item * kMostRows + static_cast<std::size_t>(r)];
  }

  // Norms of one row, and from them its clip factors; 0 for a row that is not finite.
  void measure(std::int64_t row, int r) {
    const std::size_t n = items_.size();
    double total = 0;
    for (std::size_t i = 0; i < n; ++i) {
      power_[i] = power_sum(row_of(i, row), items_[i].columns, plan_.p);
      total += power_[i];
      norms_[static_cast<std::size_t>(row) * n + i] =
          plan_.p == 2 ? std::sqrt(power_[i]) : power_[i];
    }
    const bool finite = std::isfinite(total);
    for (std::size_t i = 0; i < n; ++i) {
      const double used = plan_.style == Style::kPerLayer ? power_[i] : total;
      const double norm = plan_.p == 2 ? std::sqrt(used) : used;
      const double clip =
          finite ? clip_factor(norm, items_[i].max_norm, plan_.style == Style::kAutomatic) : 0;
      const bool exact = plan_.arithmetic != Arithmetic::kFloat;
      factor(i, r) = round_down<Factor>(exact ? clip * items_[i].per_unit : clip);
    }
  }

  void add_floats(std::int64_t row, int count) {
    for (std::size_t i = 0; i < items_.size(); ++i) {
      const G* rows[kMostRows];
      Factor weights[kMostRows];
      int used = 0;
      for (int r = 0; r < count; ++r) {
        if (factor(i, r) == 0) continue;  // not finite: 0 * inf would not vanish
        rows[used] = row_of(i, row + r);
        weights[used++] = factor(i, r);
      }
      add_rows(rows, weights, used, items_[i].columns, sums_[i]);
    }
  }

  // Integers are added at once and proved afterwards: a sample whose exact norm exceeds M (rounding
  // at the very edge) is taken back and added again a little smaller.
  void add_integers(std::int64_t row, int r) {
    for (;;) {
      if (within_bounds(row, r, 1)) return;
      within_bounds(row, r, -1);
      for (std::size_t i = 0; i < items_.size(); ++i) factor(i, r) *= Factor(1 - 0x1p-16);
    }
  }

  // Adds sign * trunc(factor row) and tells whether the integers keep the bound of each clip group.
  bool within_bounds(std::int64_t row, int r, int sign) {
    bool kept = true;
    std::int64_t power = 0;
    for (std::size_t i = 0; i < items_.size(); ++i) {
      const ClipItem& item = items_[i];
      if (plan_.style == Style::kPerLayer) power = 0;
      if (factor(i, r) != 0) {
        power +=
            add_integer_row(row_of(i, row), factor(i, r), sign, plan_.p, item.columns, sums_[i]);
      }
      const bool group_ends = plan_.style == Style::kPerLayer || i + 1 == items_.size();
      const std::int64_t bound = plan_.p == 2 ? item.unit_bound * item.unit_bound : item.unit_bound;
      if (group_ends && power > bound) kept = false;
    }
    return kept;
  }

  const ClipPlan& plan_;
  const std::vector<ClipItem>& items_;
  const std::vector<S*>& sums_;
  double* norms_;
  std::vector<Factor> factors_;  // [item, row of the group]
  std::vector<double> power_;
};

// Room for the sums of the threads after the first. The caller's, because a thread that a later,
// smaller team does without takes its own memory along. Up to a megabyte stays for the next call:
// fresh pages cost more than zeroing.
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
template <class G, class S>
void run(const ClipPlan& plan, const std::vector<ClipItem>& items, double* norms, int threads) {
  const bool has_sums = plan.arithmetic != Arithmetic::kNormOnly;
  std::int64_t columns = 0;
  for (const ClipItem& item : items) columns += item.columns;
  const std::int64_t row_entries = std::max<std::int64_t>(1, columns);
  const std::int64_t rows_worth = std::max<std::int64_t>(kMostRows, kGrain / row_entries);
  const int team = useful_threads(plan.rows, rows_worth, threads);

  std::unique_ptr<S[]> large;
  S* const room = has_sums && team > 1 ? room_for<S>(columns * (team - 1), large) : nullptr;
  std::vector<S*> own(static_cast<std::size_t>(team), nullptr);
  const auto share = [&](int index, int parts) {
    std::vector<S*> sums;
    S* next = nullptr;
    if (has_sums && index > 0) {
      next = room + columns * (index - 1);
      std::fill_n(next, columns, S{0});
      own[static_cast<std::size_t>(index)] = next;
    }
    for (const ClipItem& item : items) {
      sums.push_back(index == 0 ? static_cast<S*>(item.sum) : next);
      if (next != nullptr) next += item.columns;
    }
    Share<G, S>(plan, items, sums, norms).run(part_of(plan.rows, index, parts), parts);
  };
  if (team <= 1) return share(0, 1);
#if defined(_OPENMP)
#pragma omp parallel num_threads(team)
#endif
  share(thread_index(), team_size());
  if (!has_sums) return;
  std::int64_t before = 0;
  for (const ClipItem& item : items) {
    parallel_for(item.columns, kGrain, team, [&](std::int64_t begin, std::int64_t end) {
      for (const S* other : own) {
        if (other == nullptr) continue;
        add_to(other + before + begin, end - begin, static_cast<S*>(item.sum) + begin);
      }
    });
    before += item.columns;
  }
}

template <class G>
void run_with_sums(const ClipPlan& plan, const std::vector<ClipItem>& items, double* norms,
                   int threads) {
  switch (plan.arithmetic) {
    case Arithmetic::kExact32:
      return run<G, std::int32_t>(plan, items, norms, threads);
    case Arithmetic::kExact64:
      return run<G, std::int64_t>(plan, items, norms, threads);
    default:
      return run<G, typename RowOf<G>::Value>(plan, items, norms, threads);
  }
}

}  // namespace

void clip_sum(const ClipPlan& plan, GradType type, const std::vector<ClipItem>& items,
              double* norms, int threads) {
  if (plan.rows == 0 || items.empty()) return;
  switch (type) {
    case GradType::kFloat32:
      return run_with_sums<float>(plan, items, norms, threads);
    case GradType::kFloat64:
      return run_with_sums<double>(plan, items, norms, threads);
    case GradType::kBfloat16:
      return run_with_sums<Bfloat16>(plan, items, norms, threads);
  }
}

}  // namespace dpkern::cpu
