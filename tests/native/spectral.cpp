// Powers, norms and gathered bins of spectra, and whitened norms, against plain loops in double.

#include <algorithm>
#include <array>
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

// Cosines and sines of 2 pi m / n for every line.
std::vector<double> turns_of(const std::vector<std::int64_t>& lines) {
  std::vector<double> turns;
  for (std::size_t i = 0; i < lines.size(); i += 3) {
    const double step = 2 * std::acos(-1.0) / static_cast<double>(lines[i]);
    for (const bool sine : {false, true}) {
      for (std::int64_t m = 0; m < lines[i]; ++m) {
        const double angle = step * static_cast<double>(m);
        turns.push_back(sine ? std::sin(angle) : std::cos(angle));
      }
    }
  }
  return turns;
}

enum class Lines { one_level, two_levels, volume };

// The norm on a 6 x 8 grid, or on four of them, against circular autocorrelations, which need no
// transform: || R ||^2 = sum_u A_x(u) A_g(u). One bin is kept: that of frequency 0, the sum of a
// map. Two levels take the lines as 2 x 3 and 4 x 2 values, a volume's depth as 2 x 2.
template <class T>
std::int64_t test_norm(Lines kind, int threads, const std::string& setting) {
  constexpr std::int64_t kP = 6, kQ = 8;
  const bool two_levels = kind != Lines::one_level, deep = kind == Lines::volume;
  const std::int64_t S = deep ? 4 : 1, D = deep ? 3 : 1, Z = deep ? 2 : 1;
  const std::int64_t slots = (kQ / 2 + 1) * (two_levels ? kP * S : 4);
  const std::int64_t down = two_levels ? 2 : 1, across = two_levels ? 4 : 1;
  typedef std::array<std::int64_t, 3> Place;
  const auto place = [&](std::int64_t at) { return Place{at / (kP * kQ), at / kQ % kP, at % kQ}; };
  std::int64_t cases = 0;
  for (const std::int64_t batch : {1, 5, 19}) {
    const std::int64_t ins = batch == 5 ? 17 : 3, outs = 2, H = 5, W = 7, Y = 4, X = 3;
    const auto x = normals<T>(batch * ins * D * H * W, 7);
    const auto g = normals<T>(batch * outs * Z * Y * X, 8);
    std::vector<std::int64_t> lines{kP, H, down, kQ, W, across, kP, Y, down, kQ, X, across};
    const std::int64_t of_x[] = {S, D, 2}, of_g[] = {S, Z, 2};
    if (deep) {
      lines.insert(lines.begin() + 6, of_g, of_g + 3);
      lines.insert(lines.begin(), of_x, of_x + 3);
    }
    const auto turns = turns_of(lines);
    std::vector<std::int64_t> index(at(slots)), bins(at(2 * slots), -1), from{0};
    std::vector<double> weights(at(3 * slots)), parseval(at(slots)), turn{1, 0, 0, -1};
    bins[0] = 0;  // the place of frequency 0
    for (std::int64_t k = 0; k < slots; ++k) {
      index[at(k)] = k;
      if (two_levels) {  // columns are 0, 4, 1, 5, 2, with all of their frequencies
        parseval[at(k)] = weights[at(k)] =
            (k < 2 * kP * S ? 1.0 : 2.0) / static_cast<double>(kP * kQ * S);
        continue;
      }
      const std::int64_t kx = k / 4, low = k % 4 / 2, ky = k % 2 == 0 ? low : kP / 2 - low;
      const double of_kx = kx % (kQ / 2) == 0 ? 1 : 2, of_ky = ky % (kP / 2) == 0 ? 1 : 2;
      parseval[at(k)] = of_kx * of_ky / (kP * kQ);
      weights[at(3 * k)] = parseval[at(k)];
      weights[at(3 * k + 1)] = 4 * parseval[at(k)];
    }
    const std::vector<double> errors(4, 1e-6);
    for (const bool wide : {false, true}) {
      Shifted<T> inputs(x, 1), gradients(g, 1);
      std::vector<T> x_bins(at(batch * 2 * ins)), g_bins(at(batch * 2 * outs));
      std::vector<double> got(at(batch));
      cpu::SpectralNorm<T> call{};
      call.x = inputs.data(), call.g = gradients.data(), call.lines = lines.data();
      call.turns = turns.data(), call.index = index.data(), call.weights = weights.data();
      call.x_weights = call.g_weights = parseval.data(), call.errors = errors.data();
      call.share = std::sqrt(kP * kQ * S), call.narrow_sums = 1e-6, call.wide_sums = 1e-12;
      call.groups = 1, call.wide = wide, call.retained = call.x_count = call.g_count = 1;
      call.x_bin = call.g_bin = bins.data(), call.x_from = call.g_from = from.data();
      call.x_turn = call.g_turn = turn.data(), call.x_bins = x_bins.data();
      call.g_bins = g_bins.data(), call.squares = got.data(), call.B = batch, call.C = ins;
      call.D = D, call.H = H, call.W = W, call.O = outs, call.Z = Z, call.Y = Y, call.X = X;
      call.K = call.L = slots, call.N = static_cast<std::int64_t>(lines.size());
      call.J = two_levels ? 1 : 3;
      cpu::spectral_norm<T>(call, threads);
      std::vector<T> alone(x_bins.size());
      std::vector<double> squares(at(batch));
      cpu::SpectralBins<T> only{};
      only.x = inputs.data(), only.lines = lines.data(), only.turns = turns.data();
      only.bin = bins.data(), only.source = from.data(), only.turn = turn.data();
      only.count = 1, only.wide = wide, only.bins = alone.data(), only.B = batch, only.C = ins;
      only.D = D, only.H = H, only.W = W, only.R = 1, only.squares = squares.data();
      only.N = call.N / 2;
      only.S = two_levels ? 1 : 2;
      cpu::spectral_bins<T>(only, threads);
      check(alone == x_bins, "bins without powers" + setting);
      for (std::int64_t b = 0; b < batch; ++b) {
        double square = 0;
        for (std::int64_t i = b * ins * D * H * W; i < (b + 1) * ins * D * H * W; ++i) {
          square += static_cast<double>(x[at(i)]) * static_cast<double>(x[at(i)]);
        }
        check_close(squares[at(b)], square, 1e-6, "a square of maps" + setting);
        const auto entry = [](const std::vector<T>& maps, std::int64_t map, const Place& size,
                              const Place& p) {
          const bool inside = p[0] < size[0] && p[1] < size[1] && p[2] < size[2];
          const std::int64_t row = (map * size[0] + p[0]) * size[1] + p[1];
          return inside ? static_cast<double>(maps[at(row * size[2] + p[2])]) : 0;
        };
        const Place x_size{D, H, W}, g_size{Z, Y, X};
        double want = 0;
        for (std::int64_t lag = 0; lag < S * kP * kQ; ++lag) {
          const Place by = place(lag);
          double x_sum = 0, g_sum = 0;
          for (std::int64_t p = 0; p < S * kP * kQ; ++p) {
            const Place here = place(p), there{(here[0] + by[0]) % S, (here[1] + by[1]) % kP,
                                               (here[2] + by[2]) % kQ};
            for (std::int64_t c = b * ins; c < (b + 1) * ins; ++c) {
              x_sum += entry(x, c, x_size, here) * entry(x, c, x_size, there);
            }
            for (std::int64_t o = b * outs; o < (b + 1) * outs; ++o) {
              g_sum += entry(g, o, g_size, here) * entry(g, o, g_size, there);
            }
          }
          want += x_sum * g_sum;
        }
        check(got[at(b)] >= want * (1 - 1e-14), "a fused norm from above" + setting);
        check_close(got[at(b)], want, 1e-4, "a fused norm" + setting);
        for (std::int64_t c = 0; c < ins; ++c) {
          double sum = 0, size = 0;
          for (std::int64_t i = 0; i < D * H * W; ++i) {
            const double value = static_cast<double>(x[at((b * ins + c) * D * H * W + i)]);
            sum += value, size += std::fabs(value);
          }
          const double found = static_cast<double>(x_bins[at(b * 2 * ins + c)]);
          check(std::fabs(found - sum) <= 1e-6 * size, "a retained bin" + setting);
        }
      }
      ++cases;
    }
  }
  return cases;
}

template <class T>
std::int64_t test_bins_sum(int threads, const std::string& setting) {
  std::int64_t cases = 0;
  for (const std::int64_t ins : {1, 3, 20}) {
    for (const std::int64_t outs : {2, 5, 17}) {
      for (const std::int64_t groups : {1, 2}) {
        const std::int64_t K = 3, B = 4, taps = 2, C = ins * groups, O = outs * groups;
        const auto x = normals<T>(K * B * 2 * C, 9), g = normals<T>(K * B * 2 * O, 10);
        const auto cosines = normals<double>(taps * K, 11), sines = normals<double>(taps * K, 12);
        const std::vector<T> factors{T{0.5}, T{0}, T{-2}, T{1}};
        Shifted<T> inputs(x, 1), gradients(g, 1);
        std::vector<T> out(at(O * ins * taps), T{1});
        cpu::SpectralBinsSum<T> call{};
        call.x_bins = inputs.data(), call.g_bins = gradients.data();
        call.factors = factors.data(), call.cosines = cosines.data(), call.sines = sines.data();
        call.groups = groups, call.out = out.data();
        call.K = K, call.B = B, call.C = C, call.O = O, call.T = taps;
        cpu::spectral_bins_sum<T>(call, threads);
        for (std::int64_t i = 0; i < O * ins * taps; ++i) {
          const std::int64_t o = i / taps / ins, c = o / outs * ins + i / taps % ins, t = i % taps;
          double want = 1, size = 1;
          for (std::int64_t k = 0; k < K; ++k) {
            for (std::int64_t b = 0; b < B; ++b) {
              const T *const xs = &x[at((k * B + b) * 2 * C)], *const gs =
                                                                   &g[at((k * B + b) * 2 * O)];
              const double xr = static_cast<double>(xs[c]), xi = static_cast<double>(xs[C + c]);
              const double gr = static_cast<double>(gs[o]), gi = static_cast<double>(gs[O + o]);
              const double f = static_cast<double>(factors[at(b)]);
              const double term = f * (cosines[at(t * K + k)] * (gr * xr + gi * xi) +
                                       sines[at(t * K + k)] * (gr * xi - gi * xr));
              want += term, size += std::fabs(term);
            }
          }
          check(std::fabs(static_cast<double>(out[at(i)]) - want) <= 1e-5 * size,
                "a tap of a sum over bins" + setting);
        }
        ++cases;
      }
    }
  }
  return cases;
}

// Norms of coordinates of bins, from above: even rows take the real part of a turned product, odd
// ones the imaginary one, apart or together.
template <class T>
std::int64_t test_whitened_bins(int threads, const std::string& setting) {
  std::int64_t cases = 0;
  for (const std::int64_t ins : {1, 3, 20}) {
    for (const std::int64_t outs : {2, 5, 17}) {
      for (const std::int64_t groups : {1, 2}) {
        const std::int64_t K = 19, B = 5, evens = 6, odds = 3, C = ins * groups, O = outs * groups;
        const std::int64_t odd_from = groups == 1 ? evens : 0;
        const auto x = normals<T>(K * B * 2 * C, 13), g = normals<T>(K * B * 2 * O, 14);
        const auto maps = normals<T>(B * std::max(C, O) * 6, 15);
        const auto even = normals<double>(evens * K, 16), odd = normals<double>(odds * K, 17);
        std::vector<double> turns, weights(at(K), 0.5), got(at(B)), norms(at(B), 1);
        for (std::int64_t k = 0; k < K; ++k) {
          turns.push_back(std::cos(static_cast<double>(k)));
          turns.push_back(std::sin(static_cast<double>(k)));
        }
        Shifted<T> inputs(x, 1), gradients(g, 1);
        cpu::SpectralWhitened<T> call{};
        call.x = call.g = maps.data(), call.x_bins = inputs.data();
        call.x_squares = call.g_squares = norms.data();
        call.g_bins = gradients.data(), call.even = even.data(), call.odd = odd.data();
        call.odd_from = odd_from, call.turns = turns.data(), call.weights = weights.data();
        call.stretch = 1, call.product_error = 1e-6, call.share = 1, call.groups = groups;
        call.rows = 2, call.columns = 1, call.squares = got.data(), call.K = K, call.B = B;
        call.C = C, call.O = O, call.H = call.Y = 2, call.W = call.X = 3, call.E = evens;
        call.N = odds;
        cpu::spectral_whitened<T>(call, threads);
        for (std::int64_t b = 0; b < B; ++b) {
          double want = 0;
          for (std::int64_t o = 0; o < O; ++o) {
            for (std::int64_t c = o / outs * ins; c < (o / outs + 1) * ins; ++c) {
              std::vector<double> y(at(evens + odds));
              for (std::int64_t k = 0; k < K; ++k) {
                const T *const xs = &x[at((k * B + b) * 2 * C)], *const gs =
                                                                     &g[at((k * B + b) * 2 * O)];
                const double xr = static_cast<double>(xs[c]), xi = static_cast<double>(xs[C + c]);
                const double gr = static_cast<double>(gs[o]), gi = static_cast<double>(gs[O + o]);
                const double re = gr * xr + gi * xi, im = gr * xi - gi * xr;
                const double cosine = turns[at(2 * k)], sine = turns[at(2 * k + 1)];
                for (std::int64_t r = 0; r < evens; ++r)
                  y[at(r)] += even[at(r * K + k)] * (cosine * re - sine * im);
                for (std::int64_t r = 0; r < odds; ++r)
                  y[at(odd_from + r)] += odd[at(r * K + k)] * (cosine * im + sine * re);
              }
              for (const double value : y) want += value * value;
            }
          }
          check(got[at(b)] >= want, "whitened bins from above" + setting);
          check_close(got[at(b)], want, 1e-3, "whitened bins" + setting);
        }
        ++cases;
      }
    }
  }
  return cases;
}

// Circulant blocks of many sizes: norms against the gradient's own sum of squares, products and
// weighted sums against plain loops.
template <class T>
std::int64_t test_circulant(int threads, const std::string& setting) {
  constexpr std::int64_t B = 19, q = 3, p = 5;
  std::int64_t cases = 0;
  for (const std::int64_t d : {1, 2, 3, 4, 7, 8, 9, 16, 17}) {
    const std::int64_t bins = d / 2 + 1;
    std::vector<T> values(at(B * p * d));
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<T>((i * 7 + 3) % 11);
    Shifted<T> g(values, 1);
    values.resize(at(B * q * d));
    Shifted<T> x(values, 1);
    std::vector<double> weights(at(bins)), got(at(B));
    for (std::int64_t k = 0; k < bins; ++k) {
      weights[at(k)] = (k == 0 || 2 * k == d ? 1.0 : 2.0) / static_cast<double>(d);
    }
    cpu::CirculantSquares<T> call{};
    call.x = x.data(), call.g = g.data(), call.weights = weights.data(), call.error = 1e-13;
    call.squares = got.data(), call.B = B, call.q = q, call.p = p, call.d = d, call.K = bins;
    cpu::circulant_squares<T>(call, threads);
    std::vector<T> factors(at(B)), y(at(B * p * d)), out(at(p * q * d), T{1});
    for (std::int64_t b = 0; b < B; ++b) factors[at(b)] = static_cast<T>(b % 3);
    cpu::CirculantAdd<T> add{};
    add.x = x.data(), add.g = g.data(), add.factors = factors.data(), add.out = out.data();
    add.B = B, add.T = 1, add.q = q, add.p = p, add.d = d;
    cpu::circulant_add<T>(add, threads);
    cpu::CirculantMultiply<T> product{};  // with the first blocks of g as weights [p, q, d]
    product.x = x.data(), product.weight = g.data(), product.sign = 1, product.y = y.data();
    product.B = B, product.q = q, product.p = p, product.d = d;
    cpu::circulant_multiply<T>(product, threads);
    std::vector<double> sums(at(p * q * d), 1);
    for (std::int64_t b = 0; b < B; ++b) {
      double want = 0;
      for (std::int64_t i = 0; i < p * q; ++i) {
        for (std::int64_t u = 0; u < d; ++u) {
          double entry = 0;
          for (std::int64_t a = 0; a < d; ++a) {
            entry += static_cast<double>(g.data()[(b * p + i / q) * d + a]) *
                     static_cast<double>(x.data()[(b * q + i % q) * d + (a + u) % d]);
          }
          want += entry * entry;
          sums[at(i * d + u)] += static_cast<double>(factors[at(b)]) * entry;
        }
      }
      check(got[at(b)] >= want, "circulant norm from above" + setting);
      check_close(got[at(b)], want, 1e-9, "circulant norm" + setting);
      for (std::int64_t i = 0; i < p * d; ++i) {
        double entry = 0;
        for (std::int64_t j = 0; j < q * d; ++j) {
          const std::int64_t lag = (j % d - i % d + d) % d;
          entry += static_cast<double>(g.data()[(i / d * q + j / d) * d + lag]) *
                   static_cast<double>(x.data()[b * q * d + j]);
        }
        check_close(static_cast<double>(y[at(b * p * d + i)]), entry, 1e-5, "a product" + setting);
      }
    }
    for (std::size_t i = 0; i < sums.size(); ++i) {
      check_close(static_cast<double>(out[i]), sums[i], 1e-5, "a circulant sum" + setting);
    }
    ++cases;
  }
  return cases;
}

}  // namespace

std::int64_t test_spectral() {
  std::int64_t cases = 0;
  for_every_setting([&](int threads, const std::string& setting) {
    cases += test_powers<float>(threads, setting) + test_powers<double>(threads, setting);
    cases += test_squares(threads, setting);
    for (const Lines kind : {Lines::one_level, Lines::two_levels, Lines::volume}) {
      cases += test_norm<float>(kind, threads, setting);
      cases += test_norm<double>(kind, threads, setting);
    }
    cases += test_bins_sum<float>(threads, setting) + test_bins_sum<double>(threads, setting);
    cases += test_whitened_bins<float>(threads, setting);
    cases += test_whitened_bins<double>(threads, setting);
    cases += test_circulant<float>(threads, setting) + test_circulant<double>(threads, setting);
    cases += test_whitened<float>(threads, setting) + test_whitened<double>(threads, setting);
  });
  return cases;
}

}  // namespace dpkern::test
