// Powers, norms and gathered bins of spectra, and whitened norms, against plain loops in double.

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "cpu/ops.h"

namespace dpkern::test {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

template <class T>
std::vector<T> normals(std::int64_t count, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<double> normal;
  std::vector<T> values(at(count));
  for (T& value : values) value = static_cast<T>(normal(engine));
  return values;
}

void check_close(double got, double want, double relative, const std::string& what) {
  check(std::fabs(got - want) <= relative * std::fabs(want),
        what + " is " + std::to_string(got) + ", expected " + std::to_string(want));
}

template <class T>
std::int64_t test_powers(int threads, const std::string& setting) {
  std::int64_t cases = 0;
  for (const std::int64_t bins : {1, 7, 256, 300}) {
    for (const std::int64_t channels : {1, 5}) {
      const std::int64_t batch = 3, groups = 2, sets = batch * groups;
      const auto values = normals<T>(2 * sets * channels * bins, 1);
      Shifted<T> spectra(values, 1);
      std::vector<double> got(at(sets * bins), -1);
      const std::int64_t width = groups * channels;
      cpu::spectral_powers<T>({spectra.data(), got.data(), batch, width, bins, groups}, threads);
      for (std::int64_t set = 0; set < sets; ++set) {
        for (std::int64_t k = 0; k < bins; ++k) {
          double want = 0;
          for (std::int64_t c = 0; c < channels; ++c) {
            const std::int64_t i = 2 * ((set * channels + c) * bins + k);
            want += std::pow(static_cast<double>(values[at(i)]), 2) +
                    std::pow(static_cast<double>(values[at(i + 1)]), 2);
          }
          check_close(got[at(set * bins + k)], want, 1e-14, "a power" + setting);
        }
      }
      // Gathered: every second bin, behind a row of another sample.
      std::vector<std::int64_t> kept;
      for (std::int64_t k = bins - 1; k >= 0; k -= 2) kept.push_back(k);
      const auto count = static_cast<std::int64_t>(kept.size());
      const std::int64_t rows = batch + 2;
      std::vector<T> out(at(count * rows * 2 * width), T{-9});
      cpu::spectral_gather<T>(
          {spectra.data(), kept.data(), 1, out.data(), batch, width, bins, count, rows}, threads);
      for (std::int64_t k = 0; k < count; ++k) {
        for (std::int64_t row = 0; row < rows; ++row) {
          for (std::int64_t c = 0; c < 2 * width; ++c) {
            const bool inside = row >= 1 && row <= batch;
            const std::int64_t from =
                2 * (((row - 1) * width + c % width) * bins + kept[at(k)]) + c / width;
            const T want = inside ? values[at(from)] : T{-9};
            check(out[at((k * rows + row) * 2 * width + c)] == want, "a gathered bin" + setting);
          }
        }
      }
      ++cases;
    }
  }
  return cases;
}

std::int64_t test_squares(int threads, const std::string& setting) {
  std::int64_t cases = 0;
  for (const bool folded : {false, true}) {
    for (const std::int64_t bins : {1, 9, 40}) {
      const std::int64_t batch = 5, groups = 3, small = folded ? (bins + 1) / 2 : bins;
      auto x = normals<double>(batch * groups * bins, 2);
      auto g = normals<double>(batch * groups * small, 3);
      auto factors = normals<double>(bins, 4);
      for (auto* part : {&x, &g, &factors}) {
        for (double& value : *part) value = value * value;
      }
      std::vector<std::int64_t> index(at(bins));
      for (std::int64_t k = 0; k < bins; ++k) index[at(k)] = folded ? k % small : k;
      g.back() = std::numeric_limits<double>::quiet_NaN();
      const std::vector<double> weights(at(bins), 1.0);
      for (const double error : {0.0, 0.01}) {
        std::vector<double> got(at(batch));
        cpu::spectral_squares(
            {x.data(), g.data(), folded ? index.data() : nullptr, factors.data(), weights.data(),
             weights.data(), error, 2.0, got.data(), batch, groups, bins, small},
            threads);
        check(std::isnan(got.back()), "a sample that is not finite" + setting);
        for (std::int64_t b = 0; b + 1 < batch; ++b) {
          double product = 0, x_norm = 0, g_norm = 0, g_most = 0, x_most = 0;
          for (std::int64_t set = b * groups; set < (b + 1) * groups; ++set) {
            std::vector<double> sums(at(small), 0.0);
            for (std::int64_t k = 0; k < bins; ++k) {
              sums[at(index[at(k)])] += factors[at(k)] * x[at(set * bins + k)];
              x_norm += x[at(set * bins + k)];
            }
            for (std::int64_t k = 0; k < small; ++k) {
              const double power = g[at(set * small + k)];
              product += sums[at(k)] * power;
              g_norm += power;
              g_most = std::max(g_most, power);
              x_most = std::max(x_most, sums[at(k)]);
            }
          }
          const double slack =
              error * (std::sqrt(g_most * x_norm) + 2 * std::sqrt(g_norm * x_most) +
                       2 * error * std::sqrt(g_norm * x_norm));
          const double least = std::pow(std::sqrt(product) + slack, 2);
          check(got[at(b)] >= least * (1 - 1e-15), "a norm from above" + setting);
          check_close(got[at(b)], least, 3e-3, "a norm" + setting);
          if (error == 0) check_close(got[at(b)], product, 1e-12, "a product" + setting);
        }
        ++cases;
      }
    }
  }
  return cases;
}

template <class T>
std::int64_t test_whitened(int threads, const std::string& setting) {
  std::int64_t cases = 0;
  for (const std::int64_t outer : {1, 3}) {
    for (const std::int64_t inner : {1, 2, 8, 19}) {
      for (const std::int64_t taps : {1, 9, 25}) {
        const std::int64_t batch = 3, rows = std::max<std::int64_t>(1, taps - 2);
        const auto values = normals<T>(batch * outer * taps * inner, 5);
        const auto matrix = normals<double>(rows * taps, 6);
        Shifted<T> gradients(values, 1);
        Shifted<double> shifted(matrix, 1);
        std::vector<double> got(at(batch));
        cpu::whitened_norm<T>(
            {gradients.data(), shifted.data(), got.data(), batch, outer, taps, inner, rows},
            threads);
        for (std::int64_t b = 0; b < batch; ++b) {
          double want = 0;
          for (std::int64_t o = 0; o < outer; ++o) {
            for (std::int64_t i = 0; i < inner; ++i) {
              for (std::int64_t r = 0; r < rows; ++r) {
                double sum = 0;
                for (std::int64_t t = 0; t < taps; ++t) {
                  sum += matrix[at(r * taps + t)] *
                         static_cast<double>(values[at(((b * outer + o) * taps + t) * inner + i)]);
                }
                want += sum * sum;
              }
            }
          }
          check_close(got[at(b)], want, 1e-12, "a whitened norm" + setting);
          check(got[at(b)] >= want * (1 - 1e-15), "a whitened norm from above" + setting);
        }
        ++cases;
      }
    }
  }
  return cases;
}

}  // namespace

std::int64_t test_spectral() {
  std::int64_t cases = 0;
  for_every_setting([&](int threads, const std::string& setting) {
    cases += test_powers<float>(threads, setting) + test_powers<double>(threads, setting);
    cases += test_squares(threads, setting);
    cases += test_whitened<float>(threads, setting) + test_whitened<double>(threads, setting);
  });
  return cases;
}

}  // namespace dpkern::test
