// Clipping: equal bits for every setting (float sums: for every number of threads), sums near a
// plain double computation, integer sums within their bound and additive over samples.

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <type_traits>

#include "check.h"
#include "cpu/ops.h"
#include "cpu/rows.h"

namespace dpkern::test {
namespace {

using Columns = std::vector<std::int64_t>;

// M, a little less than C / u = 5000: clipped samples exceed it at first and must be taken back.
constexpr std::int64_t kUnitBound = 4998;
constexpr double kUnits = 5000;

std::uint16_t bfloat16(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return static_cast<std::uint16_t>(bits >> 16);
}
double value(float x) { return static_cast<double>(x); }
double value(double x) { return x; }
double value(std::uint16_t x) {
  const std::uint32_t bits = static_cast<std::uint32_t>(x) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof(wide));
  return static_cast<double>(wide);
}
void store(float x, float& out) { out = x; }
void store(float x, double& out) { out = static_cast<double>(x); }
void store(float x, std::uint16_t& out) { out = bfloat16(x); }

// Rows of every kind: ordinary, zero, NaN, infinite, huge, denormal, equal entries, at the bound.
float entry(std::int64_t row, std::int64_t column, std::mt19937& random) {
  const float ordinary = std::normal_distribution<float>(0, 1)(random);
  switch (row % 9) {
    case 1:
      return 0;
    case 2:
      return column == 0 ? std::numeric_limits<float>::quiet_NaN() : ordinary;
    case 3:
      return column == 0 ? -std::numeric_limits<float>::infinity() : ordinary;
    case 4:
      return ordinary * 1e37f;
    case 5:
      return ordinary * 1e-40f;
    case 6:
      return 0.1f;
    case 7:
      return column == 0 ? 1.5f : 0;
    default:
      return ordinary;
  }
}

// Gradients [rows, columns] of several tensors, stored as G.
template <class G>
struct Problem {
  std::int64_t rows;
  Columns columns;
  std::vector<std::vector<G>> tensors;

  Problem(std::int64_t n, const Columns& sizes) : rows(n), columns(sizes) {
    std::mt19937 random(3);
    for (const std::int64_t size : sizes) {
      std::vector<G> tensor(static_cast<std::size_t>(n * size));
      for (std::int64_t i = 0; i < n * size; ++i) {
        store(entry(i / size, i % size, random), tensor[static_cast<std::size_t>(i)]);
      }
      tensors.push_back(tensor);
    }
  }

  Problem only_row(std::int64_t row) const {
    Problem one(0, columns);
    one.rows = 1;
    for (std::size_t i = 0; i < columns.size(); ++i) {
      const G* begin = tensors[i].data() + row * columns[i];
      one.tensors[i].assign(begin, begin + columns[i]);
    }
    return one;
  }
};

// What a call asks for; `sums`: whether there are any.
struct Plan {
  int p;
  Style style;
  bool sums;
};

// The place of a type of sums.
template <class Sum>
constexpr cpu::Summed summed = std::is_same_v<Sum, std::int32_t>   ? cpu::Summed::kInt32
                               : std::is_same_v<Sum, std::int64_t> ? cpu::Summed::kInt64
                               : std::is_same_v<Sum, float>        ? cpu::Summed::kFloat32
                                                                   : cpu::Summed::kFloat64;

// Gradients as the kernel knows them.
template <class G>
using Row = std::conditional_t<std::is_same_v<G, std::uint16_t>, cpu::Bfloat16, G>;

// C of tensor i: one for all, or its own.
double bound_of(Style style, std::size_t item) {
  return style == Style::kPerLayer ? 1.5 + static_cast<double>(item) : 1.5;
}

template <class Sum>
struct Result {
  std::vector<std::vector<Sum>> sums;
  std::vector<double> norms;
  std::int64_t nonfinite;
};

template <class Sum, class G>
Result<Sum> run(const Problem<G>& problem, const Plan& plan, Sum start, bool fresh, int threads) {
  const std::size_t tensors = problem.columns.size();
  std::vector<Shifted<G>> gradients;
  std::vector<Shifted<Sum>> sums;
  for (std::size_t i = 0; i < tensors; ++i) {
    const auto size = static_cast<std::size_t>(problem.columns[i]);
    gradients.emplace_back(problem.tensors[i], i + 1);
    sums.emplace_back(std::vector<Sum>(size, start), i + 1);
  }
  Shifted<double> norms(std::vector<double>(static_cast<std::size_t>(problem.rows)), 1);
  cpu::ClipRows<Row<G>> call{};
  for (std::size_t i = 0; i < tensors; ++i) {
    const double bound = bound_of(plan.style, i);
    call.grads.push_back(reinterpret_cast<const Row<G>*>(gradients[i].data()));
    if (plan.sums) call.sums.push_back(sums[i].data());
    call.bounds.push_back({bound, kUnits / bound, kUnitBound});
  }
  call.sums_kind = summed<Sum>;
  call.norms = norms.data();
  call.p = plan.p == 2 ? cpu::Power::k2 : cpu::Power::k1;
  call.style = plan.style;
  call.fresh = fresh;
  call.B = problem.rows;
  call.P = problem.columns;
  Result<Sum> result;
  result.nonfinite = cpu::clip_rows(call, threads);
  for (const auto& sum : sums) result.sums.push_back(sum.values());
  result.norms = norms.values();
  return result;
}

// power[row][tensor] = sum |g|^p
template <class G>
std::vector<std::vector<double>> powers(const Problem<G>& problem, int p) {
  std::vector<std::vector<double>> power;
  for (std::int64_t row = 0; row < problem.rows; ++row) {
    std::vector<double> totals;
    for (std::size_t i = 0; i < problem.columns.size(); ++i) {
      double total = 0;
      for (std::int64_t c = 0; c < problem.columns[i]; ++c) {
        const double x =
            value(problem.tensors[i][static_cast<std::size_t>(row * problem.columns[i] + c)]);
        total += p == 2 ? x * x : std::fabs(x);
      }
      totals.push_back(total);
    }
    power.push_back(totals);
  }
  return power;
}

double root(double power, int p) { return p == 2 ? std::sqrt(power) : power; }

// factor[row][tensor] by the definition, without the kernels' slack of 2^-21.
std::vector<std::vector<double>> factors(const std::vector<std::vector<double>>& power,
                                         const Plan& plan) {
  std::vector<std::vector<double>> all;
  for (const auto& row : power) {
    double total = 0;
    for (const double x : row) total += x;
    std::vector<double> factor;
    for (std::size_t i = 0; i < row.size(); ++i) {
      const double norm = root(plan.style == Style::kPerLayer ? row[i] : total, plan.p);
      const double bound = bound_of(plan.style, i);
      const double clipped = plan.style == Style::kAutomatic ? bound / (norm + 0.01)
                             : norm <= bound                 ? 1.0
                                                             : bound / norm;
      factor.push_back(std::isfinite(total) ? clipped : 0.0);
    }
    all.push_back(factor);
  }
  return all;
}

template <class Sum>
void check_norms(const Result<Sum>& result, const std::vector<std::vector<double>>& power, int p,
                 const std::string& where) {
  std::int64_t nonfinite = 0;
  for (std::size_t row = 0; row < power.size(); ++row) {
    double total = 0;
    for (const double x : power[row]) total += x;
    const double want = root(total, p), got = result.norms[row];
    check(std::isfinite(want) ? std::fabs(got - want) <= 1e-9 * want : !std::isfinite(got),
          where + ": norm of row " + std::to_string(row));
    nonfinite += std::isfinite(want) ? 0 : 1;
  }
  check(result.nonfinite == nonfinite, where + ": rows that are not finite");
}

template <class Sum, class G>
void check_float_sums(const Result<Sum>& result, const Problem<G>& problem, Sum start,
                      const std::vector<std::vector<double>>& factor, const std::string& where) {
  for (std::size_t i = 0; i < problem.columns.size(); ++i) {
    for (std::int64_t c = 0; c < problem.columns[i]; ++c) {
      double want = static_cast<double>(start), size = std::fabs(want);
      for (std::size_t row = 0; row < factor.size(); ++row) {
        if (factor[row][i] == 0) continue;
        const std::size_t at = row * static_cast<std::size_t>(problem.columns[i]);
        const double term =
            factor[row][i] * value(problem.tensors[i][at + static_cast<std::size_t>(c)]);
        want += term, size += std::fabs(term);
      }
      const double got = static_cast<double>(result.sums[i][static_cast<std::size_t>(c)]);
      check(std::fabs(got - want) <= 3e-6 * size, where + ": float sum");
    }
  }
}

// A sample alone stays within M in every clip group, and the batch is the sum of its samples.
template <class Sum, class G>
void check_integer_sums(const Result<Sum>& result, const Problem<G>& problem, const Plan& plan,
                        Sum start, const std::string& where) {
  std::vector<std::vector<Sum>> total = result.sums;
  for (std::int64_t row = 0; row < problem.rows; ++row) {
    const auto one = run<Sum>(problem.only_row(row), plan, Sum{0}, false, 1);
    const std::int64_t most = plan.p == 2 ? kUnitBound * kUnitBound : kUnitBound;
    std::int64_t power = 0;
    for (std::size_t i = 0; i < one.sums.size(); ++i) {
      if (plan.style == Style::kPerLayer) power = 0;
      for (std::size_t c = 0; c < one.sums[i].size(); ++c) {
        const std::int64_t q = one.sums[i][c];
        power += plan.p == 2 ? q * q : std::abs(q);
        total[i][c] -= static_cast<Sum>(q);
      }
      check(power <= most, where + ": a sample exceeds its bound");
    }
  }
  for (const auto& tensor : total) {
    for (const Sum x : tensor) check(x == start, where + ": not the sum of its samples");
  }
}

template <class Sum, class G>
std::int64_t compare(const Problem<G>& problem, const Plan& plan) {
  const Sum start = plan.sums ? Sum{5} : Sum{0};
  // Float sums may differ in the last bits between numbers of threads, nothing else may.
  const bool by_threads = plan.sums && std::is_floating_point_v<Sum>;
  std::map<int, Result<Sum>> first;
  std::int64_t cases = 0;
  for_every_setting([&](int threads, const std::string& setting) {
    const std::string where = "clip, rows " + std::to_string(problem.rows) + ", tensors " +
                              std::to_string(problem.columns.size()) + ", p " +
                              std::to_string(plan.p) + ", style " +
                              std::to_string(static_cast<int>(plan.style)) + ", sums " +
                              std::to_string(static_cast<int>(summed<Sum>)) + setting;
    const auto result = run<Sum>(problem, plan, start, false, threads);
    ++cases;
    const auto seen = first.find(by_threads ? threads : 0);
    if (seen != first.end()) {
      check_same(result.norms, seen->second.norms, where + ": norms");
      for (std::size_t i = 0; i < result.sums.size(); ++i) {
        check_same(result.sums[i], seen->second.sums[i], where + ": sums");
      }
      return;
    }
    const auto power = powers(problem, plan.p);
    check_norms(result, power, plan.p, where);
    if (!plan.sums) {
      for (const auto& sum : result.sums) {
        for (const Sum x : sum) check(x == start, where + ": sums without being asked");
      }
    } else if constexpr (std::is_integral_v<Sum>) {
      check_integer_sums(result, problem, plan, start, where);
    } else {
      check_float_sums(result, problem, start, factors(power, plan), where);
    }
    const auto from_zero = run<Sum>(problem, plan, Sum{0}, false, threads);
    const auto fresh = run<Sum>(problem, plan, start, plan.sums, threads);
    for (std::size_t i = 0; i < fresh.sums.size(); ++i) {
      check_same(fresh.sums[i], from_zero.sums[i], where + ": fresh sums");
    }
    first.emplace(by_threads ? threads : 0, result);
  });
  return cases;
}

template <class G, class Float>
std::int64_t compare_type() {
  const std::vector<Columns> shapes = {{},        {0},           {1}, {7, 1, 33}, {0, 31, 4096},
                                       {4097, 2}, {30001, 0, 17}};
  std::int64_t cases = 0;
  for (const Columns& columns : shapes) {
    for (const std::int64_t rows : {0, 1, 3, 10}) {
      const Problem<G> problem(rows, columns);
      for (const int p : {1, 2}) {
        for (const Style style : {Style::kFlat, Style::kPerLayer, Style::kAutomatic}) {
          cases += compare<Float>(problem, {p, style, false});
          cases += compare<Float>(problem, {p, style, true});
          cases += compare<std::int32_t>(problem, {p, style, true});
          cases += compare<std::int64_t>(problem, {p, style, true});
        }
      }
    }
  }
  return cases;
}

}  // namespace

std::int64_t test_clip() {
  return compare_type<float, float>() + compare_type<double, double>() +
         compare_type<std::uint16_t, float>();
}

}  // namespace dpkern::test
