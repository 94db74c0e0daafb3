#include <memory>

#include "counted/factor.h"
#include "counted/kernels.h"
#include "cpu/rows.h"

namespace dpkern::counted {
namespace {

using cpu::Bfloat16;
using cpu::ClipItem;

template <class G>
Counted<typename cpu::RowOf<G>::Value> value_at(const Operand<const G>& x, std::int64_t i) {
  if constexpr (std::is_same_v<G, Bfloat16>) {
    const float value = cpu::value_of(x.raw(i));
    count(kCvt);
    return value;
  } else {
    return x[i];
  }
}

// A number's distance from 0; an integer's takes as much as a float's.
Counted<std::int64_t> magnitude(Counted<std::int64_t> q) {
  count(kAnd);
  return q.value < 0 ? -q.value : q.value;
}

// The norm of a whole sample from those of its tensors.
Counted<double> combined(const std::vector<Counted<double>>& powers, int p) {
  Total<double> total;
  for (const Counted<double>& power : powers) {
    const Counted<double> norm = p == 2 ? sqrt(power) : power;
    total.add(p == 2 ? norm * norm : norm);
  }
  return p == 2 ? sqrt(total.total()) : total.total();
}

template <class G, class S>
class Clip {
 public:
  using Factor = typename cpu::RowOf<G>::Value;

  Clip(const ClipPlan& plan, const std::vector<ClipItem>& items, bool fresh)
      : plan_(plan), items_(items), factors_(items.size()) {
    for (const ClipItem& item : items) {
      rows_.emplace_back(static_cast<const G*>(item.gradients), plan.rows * item.columns);
      sums_.emplace_back(static_cast<S*>(item.sum), item.columns);
      for (std::int64_t i = 0; fresh && i < item.columns; ++i) sums_.back().store(i, S{0});
    }
  }

  Counted<double> run(std::int64_t row) {
    const Counted<double> norm = measure(row);
    if constexpr (std::is_integral_v<S>) {
      add_integers(row);
    } else {
      add_floats(row);
    }
    return norm;
  }

 private:
  Counted<Factor> entry(std::size_t item, std::int64_t row, std::int64_t i) const {
    return value_at(rows_[item], row * items_[item].columns + i);
  }

  // Norm of one row, and its clip factors; 0 if it is not finite.
  Counted<double> measure(std::int64_t row) {
    std::vector<Counted<double>> powers;
    Total<double> sum;
    for (std::size_t i = 0; i < items_.size(); ++i) {
      powers.push_back(power_sum([&](std::int64_t j) { return wide(entry(i, row, j)); },
                                 items_[i].columns, plan_.p));
      sum.add(powers.back());
    }
    const bool finite = isfinite(sum.total());
    for (std::size_t i = 0; i < items_.size(); ++i) {
      const Counted<double> used = plan_.style == Style::kPerLayer ? powers[i] : sum.total();
      const Counted<double> norm = plan_.p == 2 ? sqrt(used) : used;
      const Counted<double> max_norm = items_[i].max_norm;
      Counted<double> factor{};
      if (finite) factor = clip_factor(norm, max_norm, plan_.style == Style::kAutomatic);
      if (std::is_integral_v<S>) factor *= items_[i].per_unit;
      factors_[i] = round_down<Factor>(factor);
    }
    return combined(powers, plan_.p);
  }

  void add_floats(std::int64_t row) {
    for (std::size_t i = 0; i < items_.size(); ++i) {
      if (factors_[i] == Factor{0}) continue;
      for (std::int64_t j = 0; j < items_[i].columns; ++j) {
        sums_[i].store(j, Counted<S>(sums_[i][j]) + Counted<S>(factors_[i] * entry(i, row, j)));
      }
    }
  }

  // The second time on, a sample whose integers exceeded the bound by the last bits.
  void add_integers(std::int64_t row) {
    if (within_bounds(row, true)) return;
    const Counting chance(current == nullptr ? nullptr : by_chance);
    for (bool kept = false; !kept; kept = within_bounds(row, true)) {
      within_bounds(row, false);
      for (Counted<Factor>& factor : factors_) factor *= static_cast<Factor>(1 - 0x1p-16);
    }
  }

  // Adds trunc(factor row), or takes it back, and tells whether it keeps the bounds.
  bool within_bounds(std::int64_t row, bool add) {
    bool kept = true;
    Total<std::int64_t> power;
    for (std::size_t i = 0; i < items_.size(); ++i) {
      const ClipItem& item = items_[i];
      if (plan_.style == Style::kPerLayer) power = {};
      if (factors_[i] != Factor{0}) {
        for (std::int64_t j = 0; j < item.columns; ++j) {
          const Counted<std::int32_t> q(factors_[i] * entry(i, row, j));
          const Counted<S> before = sums_[i][j];
          sums_[i].store(j, add ? before + Counted<S>(q) : before - Counted<S>(q));
          const Counted<std::int64_t> whole(q);
          power.add(plan_.p == 2 ? whole * whole : magnitude(whole));
        }
      }
      const bool group_ends = plan_.style == Style::kPerLayer || i + 1 == items_.size();
      const std::int64_t bound = plan_.p == 2 ? item.unit_bound * item.unit_bound : item.unit_bound;
      if (group_ends && power.total() > bound) kept = false;
    }
    return kept;
  }

  const ClipPlan& plan_;
  const std::vector<ClipItem>& items_;
  std::vector<Operand<const G>> rows_;
  std::vector<Operand<S>> sums_;
  std::vector<Counted<Factor>> factors_;
};

template <class G, class S>
std::int64_t run(const ClipPlan& plan, bool fresh, const std::vector<ClipItem>& items,
                 double* out) {
  Clip<G, S> clip(plan, items, fresh);
  Operand<double> norms(out, plan.rows);
  Counted<std::int64_t> nonfinite{};
  for (std::int64_t row = 0; row < plan.rows; ++row) {
    const Counted<double> norm = clip.run(row);
    nonfinite += isfinite(norm) ? 0 : 1;
    norms.store(row, norm);
  }
  return nonfinite.value;
}

template <class G>
std::int64_t run_with_sums(const ClipPlan& plan, bool fresh, const std::vector<ClipItem>& items,
                           double* norms) {
  switch (plan.arithmetic) {
    case Arithmetic::kExact32:
      return run<G, std::int32_t>(plan, fresh, items, norms);
    case Arithmetic::kExact64:
      return run<G, std::int64_t>(plan, fresh, items, norms);
    default:
      return run<G, typename cpu::RowOf<G>::Value>(plan, fresh, items, norms);
  }
}

std::vector<Counted<double>> numbers_of(const Numbers& numbers, std::int64_t size) {
  std::vector<Counted<double>> found;
  if (numbers.data == nullptr) return found;
  const auto all = [&](const auto& operand) {
    for (std::int64_t i = 0; i < size; ++i) found.push_back(wide(operand[i]));
  };
  if (numbers.wide) {
    all(Operand<const double>(static_cast<const double*>(numbers.data), size));
  } else {
    all(Operand<const float>(static_cast<const float*>(numbers.data), size));
  }
  return found;
}

template <class G>
void norms_of(std::int64_t rows, int p, const std::vector<ClipItem>& items,
              const std::vector<Whitening>& whitenings, double* out) {
  std::vector<std::vector<Counted<double>>> powers(static_cast<std::size_t>(rows));
  for (std::size_t i = 0; i < items.size(); ++i) {
    const std::int64_t columns = items[i].columns;
    const Operand<const G> entries(static_cast<const G*>(items[i].gradients), rows * columns);
    const std::vector<Counted<double>> center = numbers_of(whitenings[i].center, columns);
    const std::vector<Counted<double>> scale = numbers_of(whitenings[i].scale, columns);
    for (std::int64_t row = 0; row < rows; ++row) {
      const auto whitened = [&](std::int64_t j) {
        const auto at = static_cast<std::size_t>(j);
        Counted<double> x = wide(value_at(entries, row * columns + j));
        if (!center.empty()) x -= center[at];
        if (!scale.empty()) x = x / scale[at];
        return x;
      };
      powers[static_cast<std::size_t>(row)].push_back(power_sum(whitened, columns, p));
    }
  }
  Operand<double> norms(out, rows);
  for (std::int64_t row = 0; row < rows; ++row) {
    norms.store(row, combined(powers[static_cast<std::size_t>(row)], p));
  }
}

}  // namespace

void sample_norm(GradType type, std::int64_t rows, int p, const std::vector<ClipItem>& items,
                 const std::vector<Whitening>& whitenings, double* norms) {
  switch (type) {
    case GradType::kFloat32:
      return norms_of<float>(rows, p, items, whitenings, norms);
    case GradType::kFloat64:
      return norms_of<double>(rows, p, items, whitenings, norms);
    case GradType::kBfloat16:
      return norms_of<Bfloat16>(rows, p, items, whitenings, norms);
  }
}

std::int64_t clip_sum(const ClipPlan& plan, GradType type, bool fresh,
                      const std::vector<ClipItem>& items, double* norms) {
  switch (type) {
    case GradType::kFloat32:
      return run_with_sums<float>(plan, fresh, items, norms);
    case GradType::kFloat64:
      return run_with_sums<double>(plan, fresh, items, norms);
    case GradType::kBfloat16:
      return run_with_sums<Bfloat16>(plan, fresh, items, norms);
  }
  return 0;
}

}  // namespace dpkern::counted
