// Projections against their definition, one entry at a time.

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "check.h"
#include "cpu/ops.h"

namespace dpkern::test {
namespace {

// The threshold of a simplex from sorted entries.
double threshold_of(std::vector<double> x, double total) {
  std::sort(x.begin(), x.end(), [](double a, double b) { return a > b; });
  double sum = 0, threshold = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    sum += x[i];
    const double t = (sum - total) / static_cast<double>(i + 1);
    if (x[i] > t) threshold = t;
  }
  return threshold;
}

template <class F>
void check_near(const std::vector<F>& got, const std::vector<double>& want, double scale,
                const std::string& what) {
  const double tolerance = 4 * scale * static_cast<double>(std::numeric_limits<F>::epsilon());
  for (std::size_t i = 0; i < got.size(); ++i) {
    check(std::fabs(static_cast<double>(got[i]) - want[i]) <= tolerance, what);
  }
}

template <class F>
std::int64_t sweep(std::int64_t n, double spread) {
  std::mt19937 random(static_cast<unsigned>(n));
  std::normal_distribution<double> normal(0, spread);
  std::vector<F> values;
  for (std::int64_t i = 0; i < n; ++i) values.push_back(static_cast<F>(normal(random)));
  std::vector<double> x(values.begin(), values.end());
  double square = 0, most = 1;
  for (const double v : x) square += v * v, most = std::max(most, std::fabs(v));
  const std::size_t cut = static_cast<std::size_t>(n / 3);
  const auto halves = [&](const std::vector<F>& from) {
    return std::pair(std::vector<F>(from.begin(), from.begin() + static_cast<std::ptrdiff_t>(cut)),
                     std::vector<F>(from.begin() + static_cast<std::ptrdiff_t>(cut), from.end()));
  };
  const auto [front, back] = halves(values);
  std::int64_t cases = 0;
  using Values = std::vector<F*>;
  using Sizes = std::vector<std::int64_t>;
  for_every_setting([&](int threads, const std::string& setting) {
    const auto run = [&](auto project, const std::vector<double>& want, const std::string& what) {
      Shifted<F> a(front, 1), b(back, 3);
      project({a.data(), b.data()},
              {static_cast<std::int64_t>(front.size()), static_cast<std::int64_t>(back.size())},
              threads);
      std::vector<F> got = a.values();
      const std::vector<F> rest = b.values();
      got.insert(got.end(), rest.begin(), rest.end());
      check_near(got, want, most, what + ", " + std::to_string(n) + setting);
      ++cases;
    };
    for (const double radius : {std::sqrt(square) / 2, std::sqrt(square) * 2 + 1}) {
      std::vector<double> want = x;
      if (square > radius * radius) {
        for (double& v : want) v *= radius / std::sqrt(square);
      }
      const auto project = [=](const Values& params, const Sizes& sizes, int team) {
        cpu::project_ball<F>({params, radius, sizes}, team);
      };
      run(project, want, "ball");
    }
    for (const double total : {1.0, static_cast<double>(n) * spread}) {
      const double t = threshold_of(x, total);
      std::vector<double> want;
      for (const double v : x) want.push_back(std::max(0.0, v - t));
      const auto project = [=](const Values& params, const Sizes& sizes, int team) {
        cpu::project_simplex<F>({params, total, sizes}, team);
      };
      run(project, want, "simplex");
    }
  });
  return cases;
}

}  // namespace

std::int64_t test_project() {
  std::int64_t cases = 0;
  for (const std::int64_t n : {0, 1, 2, 37, 5000, 150000}) {
    cases += sweep<float>(n, 1.0) + sweep<double>(n, 0.01);
  }
  return cases;
}

}  // namespace dpkern::test
