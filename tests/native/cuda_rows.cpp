// Clipping and explicit gradients against the kernels of the CPU: norms and float sums up to
// rounding, factors given equal squares and integer sums bit for bit, and no sum depends on which
// other samples are there.

#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <type_traits>

#include "cpu/clip.h"
#include "cpu/explicit.h"
#include "cpu/rows.h"
#include "cuda.h"

namespace dpkern::test {
namespace {

using Columns = std::vector<std::int64_t>;

// M, a little less than C / u = 5000: clipped samples exceed it at first and must be taken back.
constexpr std::int64_t kUnitBound = 4998;
constexpr double kUnits = 5000;

void store(double x, float& out) { out = static_cast<float>(x); }
void store(double x, double& out) { out = x; }
void store(double x, std::uint16_t& out) {
  const float narrow = static_cast<float>(x);
  std::uint32_t bits;
  std::memcpy(&bits, &narrow, sizeof(bits));
  out = static_cast<std::uint16_t>(bits >> 16);
}

// Rows of every kind: ordinary, zero, NaN, infinite, huge, denormal, equal entries, small.
double entry(std::int64_t row, std::int64_t column, std::mt19937& random) {
  const double ordinary = std::normal_distribution<double>(0, 1)(random);
  switch (row % 9) {
    case 1:
      return 0;
    case 2:
      return column == 0 ? std::numeric_limits<double>::quiet_NaN() : ordinary;
    case 3:
      return column == 0 ? -std::numeric_limits<double>::infinity() : ordinary;
    case 4:
      return ordinary * 1e37;
    case 5:
      return ordinary * 1e-40;
    case 6:
      return 0.1;
    case 7:
      return ordinary * 1e-3;
    default:
      return ordinary;
  }
}

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

  Problem without_first_rows(std::int64_t count) const {
    Problem rest(0, columns);
    rest.rows = rows - count;
    for (std::size_t i = 0; i < columns.size(); ++i) {
      rest.tensors[i].assign(tensors[i].begin() + count * columns[i], tensors[i].end());
    }
    return rest;
  }
};

// The gradients and sums of a call in memory of their own, and the tables that name them.
template <class G, class S>
struct Call {
  std::vector<Shifted<G>> gradients;
  std::vector<Shifted<S>> sums;
  std::vector<RowTask> tasks;
  cuda::RowTable table{};

  Call(const Problem<G>& problem, S start, std::size_t skip) {
    for (std::size_t i = 0; i < problem.columns.size(); ++i) {
      const std::int64_t columns = problem.columns[i];
      gradients.emplace_back(problem.tensors[i], skip * (i + 1));
      sums.emplace_back(std::vector<S>(static_cast<std::size_t>(columns), start), skip * (i + 1));
      tasks.push_back({gradients[i].data(), sums[i].data(), columns, table.chunks, table.columns});
      table.chunks += (columns + kChunk - 1) / kChunk;
      table.columns += columns;
    }
    table.tasks = tasks.data();
    table.count = static_cast<std::int64_t>(tasks.size());
  }

  std::vector<S> values() const {
    std::vector<S> all;
    for (const Shifted<S>& sum : sums) {
      for (const S x : sum.values()) all.push_back(x);
    }
    return all;
  }
};

// A workspace of exactly the size asked for, full of NaN.
std::vector<double> workspace_of(std::int64_t bytes) {
  check(bytes % 4 == 0, "workspace");
  return std::vector<double>(static_cast<std::size_t>((bytes + 7) / 8),
                             std::numeric_limits<double>::quiet_NaN());
}

double bound_of(Style style, std::size_t item) {
  return style == Style::kPerLayer ? 1.5 + static_cast<double>(item) : 1.5;
}

template <class S>
struct Result {
  std::vector<S> sums;
  std::vector<double> norms;
};

template <class S, class G>
Result<S> clip_on_cpu(const Problem<G>& problem, GradType type, ClipPlan plan, S start) {
  Call<G, S> call(problem, start, 0);
  std::vector<cpu::ClipItem> items;
  for (std::size_t i = 0; i < call.tasks.size(); ++i) {
    const double bound = bound_of(plan.style, i);
    items.push_back({call.tasks[i].rows, call.tasks[i].sum, call.tasks[i].columns, bound,
                     kUnits / bound, kUnitBound});
  }
  std::vector<double> norms(static_cast<std::size_t>(plan.rows) * items.size());
  cpu::clip_sum(plan, type, items, norms.data(), 1);
  return {call.values(), norms};
}

template <class S, class G>
Result<S> clip(const Problem<G>& problem, GradType type, ClipPlan plan, S start, std::size_t skip) {
  plan.rows = problem.rows;
  Call<G, S> call(problem, start, skip);
  std::vector<ClipBound> bounds;
  for (std::size_t i = 0; i < call.tasks.size(); ++i) {
    const double bound = bound_of(plan.style, i);
    bounds.push_back({bound, kUnits / bound, kUnitBound});
  }
  std::vector<double> norms(static_cast<std::size_t>(plan.rows) * bounds.size());
  auto workspace = workspace_of(cuda::clip_workspace(plan, type, call.table));
  check_launch(cuda::clip_sum(plan, type, call.table, bounds.data(), norms.data(), workspace.data(),
                              nullptr),
               "clip_sum");
  return {call.values(), norms};
}

template <class T>
bool near(T got, T want, double size) {
  if (std::isnan(static_cast<double>(want))) return std::isnan(static_cast<double>(got));
  if (got == want) return true;
  const double precision = sizeof(T) == 4 ? 1e-5 : 1e-11;
  return std::fabs(static_cast<double>(got) - static_cast<double>(want)) <= precision * size;
}

void check_norms(const std::vector<double>& got, const std::vector<double>& want,
                 const std::string& where) {
  for (std::size_t i = 0; i < want.size(); ++i) {
    check(near(got[i], want[i], std::fabs(want[i])), where + ": norms");
  }
}

template <class S>
void check_sums(const std::vector<S>& got, const std::vector<S>& want, const std::string& where) {
  if constexpr (std::is_integral_v<S>) {
    check_same(got, want, where);
  } else {
    for (std::size_t i = 0; i < want.size(); ++i) {
      check(near(got[i], want[i], 10 + std::fabs(static_cast<double>(want[i]))), where);
    }
  }
}

template <class S, class G>
std::int64_t compare_clip(const Problem<G>& problem, GradType type, const ClipPlan& plan) {
  const S start = plan.arithmetic == Arithmetic::kNormOnly ? S{0} : S{5};
  const Result<S> want = clip_on_cpu(problem, type, plan, start);
  std::int64_t cases = 0;
  in_both_orders([&](const std::string& order) {
    const std::string where = "clip, rows " + std::to_string(problem.rows) + ", arithmetic " +
                              std::to_string(static_cast<int>(plan.arithmetic)) + ", style " +
                              std::to_string(static_cast<int>(plan.style)) + order;
    const Result<S> got = clip(problem, type, plan, start, 0);
    check_norms(got.norms, want.norms, where);
    check_sums(got.sums, want.sums, where);
    const Result<S> shifted = clip(problem, type, plan, start, 1);
    check_same(shifted.norms, got.norms, where + ": norms where nothing is aligned");
    check_same(shifted.sums, got.sums, where + ": sums where nothing is aligned");
    // Without its first sample, a row lies elsewhere, and its norm and integers are the same.
    if (problem.rows > 1 && !problem.columns.empty()) {
      const Result<S> rest = clip(problem.without_first_rows(1), type, plan, start, 0);
      const auto skipped = static_cast<std::ptrdiff_t>(problem.columns.size());
      check_same(rest.norms, {got.norms.begin() + skipped, got.norms.end()},
                 where + ": norms without the first sample");
    }
    cases += 3;
  });
  return cases;
}

template <class G, class Float>
std::int64_t compare_clip_type(GradType type) {
  struct Case {
    std::int64_t rows;
    Columns columns;
  };
  const std::vector<Case> all = {{0, {7}},         {1, {}},           {1, {0, 1}},
                                 {10, {7, 1, 33}}, {9, {0, 4100, 2}}, {70, {40}}};
  std::int64_t cases = 0;
  for (const auto& [rows, columns] : all) {
    const Problem<G> problem(rows, columns);
    for (const int p : {1, 2}) {
      for (const Style style : {Style::kFlat, Style::kPerLayer, Style::kAutomatic}) {
        const auto plan = [&, n = rows](Arithmetic arithmetic) {
          return ClipPlan{n, p, style, arithmetic};
        };
        if (style == Style::kFlat) {
          cases += compare_clip<Float>(problem, type, plan(Arithmetic::kNormOnly));
        }
        cases += compare_clip<Float>(problem, type, plan(Arithmetic::kFloat));
        cases += compare_clip<std::int32_t>(problem, type, plan(Arithmetic::kExact32));
        cases += compare_clip<std::int64_t>(problem, type, plan(Arithmetic::kExact64));
      }
    }
  }
  return cases;
}

template <class F>
std::int64_t compare_explicit(std::int64_t rows, const Columns& columns) {
  const Problem<F> problem(rows, columns);
  const bool wide = sizeof(F) == 8;
  const auto batch = static_cast<std::size_t>(rows);
  Call<F, F> on_cpu(problem, F{2}, 0);
  std::vector<cpu::Explicit<F>> parts;
  for (const RowTask& task : on_cpu.tasks) {
    parts.push_back({static_cast<const F*>(task.rows), task.columns, static_cast<F*>(task.sum)});
  }
  std::vector<double> want_squares(batch);
  cpu::explicit_norm(parts, rows, want_squares.data(), 1);
  std::vector<F> factors(batch);
  for (std::size_t b = 0; b < batch; ++b) {
    // Rows 2, 3 and 4 of 9 are not finite or huge.
    factors[b] = b % 9 >= 2 && b % 9 <= 4 ? F{0} : static_cast<F>(0.25 + 0.01 * double(b % 7));
  }
  cpu::contract(parts, factors.data(), rows, 1);
  in_both_orders([&](const std::string& order) {
    for (const std::size_t skip : {0, 1}) {
      Call<F, F> call(problem, F{2}, skip);
      std::vector<double> squares(batch);
      auto room = workspace_of(cuda::explicit_norm_workspace(call.table, rows));
      check_launch(
          cuda::explicit_norm(call.table, wide, rows, squares.data(), room.data(), nullptr),
          "explicit_norm");
      check_norms(squares, want_squares, "explicit_norm" + order);
      room = workspace_of(cuda::contract_workspace(call.table, wide, rows));
      check_launch(cuda::contract(call.table, factors.data(), wide, rows, room.data(), nullptr),
                   "contract");
      check_sums(call.values(), on_cpu.values(), "contract" + order);
    }
  });
  return 4;
}

template <class F>
std::int64_t compare_factors() {
  const double infinity = std::numeric_limits<double>::infinity();
  std::mt19937 random(9);
  std::vector<std::vector<double>> squares(3, std::vector<double>(301));
  for (auto& part : squares) {
    for (double& x : part) x = std::exp(std::normal_distribution<double>(0, 20)(random));
  }
  squares[0][1] = infinity;
  squares[1][2] = std::numeric_limits<double>::quiet_NaN();
  for (auto& part : squares) part[3] = 0;
  std::vector<const double*> parts;
  for (const auto& part : squares) parts.push_back(part.data());
  std::int64_t cases = 0;
  for (const ClipRule& rule : {ClipRule{1.5, 1, false}, ClipRule{0x1p-96, 1, false},
                               ClipRule{1.5, 64, true}, ClipRule{infinity, 0.5, false}}) {
    std::vector<double> norms(301), want_norms(301);
    std::vector<F> factors(301), want(301);
    cpu::clip_factors(parts, 301, rule, want_norms.data(), want.data());
    check_launch(cuda::clip_factors(parts.data(), 3, 301, rule, sizeof(F) == 8, norms.data(),
                                    factors.data(), nullptr),
                 "clip_factors");
    check_same(norms, want_norms, "norms of clip_factors");
    check_same(factors, want, "clip_factors");
    ++cases;
  }
  return cases;
}

}  // namespace

std::int64_t test_cuda_rows() {
  std::int64_t cases = compare_clip_type<float, float>(GradType::kFloat) +
                       compare_clip_type<double, double>(GradType::kDouble) +
                       compare_clip_type<std::uint16_t, float>(GradType::kBfloat16);
  cases += compare_factors<float>() + compare_factors<double>();
  for (const std::int64_t rows : {0, 1, 11, 100}) {
    for (const Columns& columns : {Columns{0}, Columns{5, 0, 4099}, Columns{64, 3}}) {
      cases += compare_explicit<float>(rows, columns) + compare_explicit<double>(rows, columns);
    }
  }
  return cases;
}

}  // namespace dpkern::test
