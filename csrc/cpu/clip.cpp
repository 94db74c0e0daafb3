#include "cpu/clip.h"

#include <algorithm>
#include <cmath>

#include "core/clip_factor.h"
#include "cpu/isa.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"

namespace dpkern::cpu {
namespace {

constexpr std::int64_t kBlock = 4096;          // columns that one thread treats at a time
constexpr std::int64_t kGrain = 1 << 14;       // entries of a row group worth a thread
constexpr std::int64_t kGroupBytes = 1 << 20;  // what a group of rows may take of a thread's cache
constexpr int kMostRows = 4;

struct Block {
  int item;
  std::int64_t column;
  std::int64_t count;
};

std::vector<Block> blocks_of(const std::vector<ClipItem>& items) {
  std::vector<Block> blocks;
  for (std::size_t item = 0; item < items.size(); ++item) {
    for (std::int64_t column = 0; column < items[item].columns; column += kBlock) {
      blocks.push_back(
          {static_cast<int>(item), column, std::min(kBlock, items[item].columns - column)});
    }
  }
  return blocks;
}

void team_barrier() {
#if defined(_OPENMP)
#pragma omp barrier
#endif
}

// Everything about one call; each thread owns a contiguous range of the blocks, for all rows.
template <class G>
class ClipRun {
 public:
  ClipRun(const ClipPlan& plan, const std::vector<ClipItem>& items, double* norms)
      : plan_(plan), items_(items), norms_(norms), blocks_(blocks_of(items)) {
    partial_.resize(blocks_.size() * kMostRows);
    integer_partial_.resize(blocks_.size() * kMostRows);
  }

  void run(int threads) {
    std::int64_t columns = 0;
    for (const ClipItem& item : items_) columns += item.columns;
    const int team = useful_threads(columns * kMostRows, kGrain, threads);
    const std::int64_t row_bytes = columns * static_cast<std::int64_t>(sizeof(G)) / team;
    const std::int64_t fitting = kGroupBytes / std::max<std::int64_t>(1, row_bytes);
    group_ = static_cast<int>(std::clamp<std::int64_t>(fitting, 2, kMostRows));
    if (team <= 1) return thread_body(0, 1);
#if defined(_OPENMP)
#pragma omp parallel num_threads(team)
#endif
    thread_body(thread_index(), team_size());
  }

 private:
  using Factor = typename RowOf<G>::Value;  // float, or double for double gradients

  void thread_body(int index, int parts) {
    const Range mine = part_of(static_cast<std::int64_t>(blocks_.size()), index, parts);
    std::vector<Factor> factors(items_.size() * kMostRows);
    for (std::int64_t row = 0; row < plan_.rows; row += group_) {
      const int count = static_cast<int>(std::min<std::int64_t>(group_, plan_.rows - row));
      norms_of(mine, row, count);
      team_barrier();
      factors_of(row, count, factors.data(), index == 0);
      if (plan_.arithmetic == Arithmetic::kFloat) {
        add_floats(mine, row, count, factors.data());
      } else if (plan_.arithmetic != Arithmetic::kNormOnly) {
        add_integers(mine, row, count, factors.data());
      }
      team_barrier();  // the partial sums are reused by the next group
    }
  }

  const G* row_of(const Block& block, std::int64_t row) const {
    const ClipItem& item = items_[static_cast<std::size_t>(block.item)];
    return static_cast<const G*>(item.gradients) + row * item.columns + block.column;
  }

  void norms_of(Range mine, std::int64_t row, int count) {
    for (std::int64_t b = mine.begin; b < mine.end; ++b) {
      const Block& block = blocks_[static_cast<std::size_t>(b)];
      for (int r = 0; r < count; ++r) {
        partial_[static_cast<std::size_t>(b) * kMostRows + static_cast<std::size_t>(r)] =
            power_sum(row_of(block, row + r), block.count, plan_.p);
      }
    }
  }

  // Every thread reduces the same partial sums in the same order, so all agree on the factors.
  void factors_of(std::int64_t row, int count, Factor* factors, bool writes_norms) {
    const std::size_t n = items_.size();
    std::vector<double> power(n);
    for (int r = 0; r < count; ++r) {
      std::fill(power.begin(), power.end(), 0.0);
      for (std::size_t b = 0; b < blocks_.size(); ++b) {
        power[static_cast<std::size_t>(blocks_[b].item)] +=
            partial_[b * kMostRows + static_cast<std::size_t>(r)];
      }
      double total = 0;
      for (const double x : power) total += x;
      const bool finite = std::isfinite(total);
      for (std::size_t i = 0; i < n; ++i) {
        const double used = plan_.style == Style::kPerLayer ? power[i] : total;
        const double norm = plan_.p == 2 ? std::sqrt(used) : used;
        const double factor =
            finite ? clip_factor(norm, items_[i].max_norm, plan_.style == Style::kAutomatic) : 0;
        const bool exact = plan_.arithmetic >= Arithmetic::kExact32;
        factors[i * kMostRows + static_cast<std::size_t>(r)] =
            round_down<Factor>(exact ? factor * items_[i].per_unit : factor);
        if (writes_norms) {
          norms_[static_cast<std::size_t>(row + r) * n + i] =
              plan_.p == 2 ? std::sqrt(power[i]) : power[i];
        }
      }
    }
  }

  void add_floats(Range mine, std::int64_t row, int count, const Factor* factors) {
    for (std::int64_t b = mine.begin; b < mine.end; ++b) {
      const Block& block = blocks_[static_cast<std::size_t>(b)];
      const Factor* factor = factors + static_cast<std::size_t>(block.item) * kMostRows;
      const G* rows[kMostRows];
      Factor weight[kMostRows];
      int used = 0;
      for (int r = 0; r < count; ++r) {
        if (factor[r] == 0) continue;  // non-finite: 0 * inf would not vanish
        rows[used] = row_of(block, row + r);
        weight[used++] = factor[r];
      }
      Factor* sum = static_cast<Factor*>(items_[static_cast<std::size_t>(block.item)].sum);
      add_rows(rows, weight, used, block.count, sum + block.column);
    }
  }

  // Integers are added at once and proved afterwards: a sample whose exact norm exceeds M (rounding
  // at the very edge) is taken back and added again a little smaller.
  void add_integers(Range mine, std::int64_t row, int count, Factor* factors) {
    add_integer_rows(mine, row, count, factors, 1, ~0u);
    for (;;) {
      team_barrier();
      const unsigned over = rows_over_bound(count);
      if (over == 0) return;
      team_barrier();
      add_integer_rows(mine, row, count, factors, -1, over);
      for (std::size_t i = 0; i < items_.size(); ++i) {
        for (int r = 0; r < count; ++r) {
          if ((over >> r & 1u) != 0) {
            factors[i * kMostRows + static_cast<std::size_t>(r)] *= Factor(1 - 0x1p-16);
          }
        }
      }
      add_integer_rows(mine, row, count, factors, 1, over);
    }
  }

  void add_integer_rows(Range mine, std::int64_t row, int count, const Factor* factors, int sign,
                        unsigned which) {
    for (std::int64_t b = mine.begin; b < mine.end; ++b) {
      const Block& block = blocks_[static_cast<std::size_t>(b)];
      const ClipItem& item = items_[static_cast<std::size_t>(block.item)];
      const Factor* factor = factors + static_cast<std::size_t>(block.item) * kMostRows;
      for (int r = 0; r < count; ++r) {
        if ((which >> r & 1u) == 0) continue;
        std::int64_t& power =
            integer_partial_[static_cast<std::size_t>(b) * kMostRows + static_cast<std::size_t>(r)];
        power = 0;
        if (factor[r] == 0) continue;
        const G* gradients = row_of(block, row + r);
        power = plan_.arithmetic == Arithmetic::kExact32
                    ? add_integer_row(gradients, factor[r], sign, plan_.p, block.count,
                                      static_cast<std::int32_t*>(item.sum) + block.column)
                    : add_integer_row(gradients, factor[r], sign, plan_.p, block.count,
                                      static_cast<std::int64_t*>(item.sum) + block.column);
      }
    }
  }

  // Bit r is set if row r's integers break the bound of a clip group.
  unsigned rows_over_bound(int count) const {
    unsigned over = 0;
    std::vector<std::int64_t> power(items_.size());
    for (int r = 0; r < count; ++r) {
      std::fill(power.begin(), power.end(), std::int64_t{0});
      for (std::size_t b = 0; b < blocks_.size(); ++b) {
        power[static_cast<std::size_t>(blocks_[b].item)] +=
            integer_partial_[b * kMostRows + static_cast<std::size_t>(r)];
      }
      std::int64_t total = 0;
      for (std::size_t i = 0; i < items_.size(); ++i) {
        const std::int64_t m = items_[i].unit_bound;
        const std::int64_t most = plan_.p == 2 ? m * m : m;
        total = plan_.style == Style::kPerLayer ? power[i] : total + power[i];
        const bool group_ends = plan_.style == Style::kPerLayer || i + 1 == items_.size();
        if (group_ends && total > most) over |= 1u << r;
      }
    }
    return over;
  }

  const ClipPlan plan_;
  const std::vector<ClipItem>& items_;
  double* norms_;
  std::vector<Block> blocks_;
  std::vector<double> partial_;                // [block, row of the group]
  std::vector<std::int64_t> integer_partial_;  // the same, of the integers
  int group_ = kMostRows;
};

}  // namespace

void clip_sum(const ClipPlan& plan, GradType type, const std::vector<ClipItem>& items,
              double* norms, int threads) {
  if (plan.rows == 0 || items.empty()) return;
  if (type == GradType::kFloat) {
    ClipRun<float>(plan, items, norms).run(threads);
  } else if (type == GradType::kDouble) {
    ClipRun<double>(plan, items, norms).run(threads);
  } else {
    ClipRun<Bfloat16>(plan, items, norms).run(threads);
  }
}

}  // namespace dpkern::cpu
