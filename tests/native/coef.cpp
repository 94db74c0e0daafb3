// Coefficients and losses against noise added to plain coefficients, row by row.

#include <cstddef>
#include <utility>

#include "check.h"
#include "cpu/coef_noise.h"
#include "cpu/ops.h"
#include "cpu/tiles.h"

namespace dpkern::test {
namespace {

template <class T>
struct Case {
  CoefForm form;
  CoefNoise noise;
  std::int64_t rows;
  std::int64_t columns;
  std::vector<T> z, targets, shift;

  std::size_t size() const { return targets.size(); }
};

// Both coefficients, each noised by the op for tensors.
template <class T>
std::vector<std::vector<T>> coefficients_of(const Case<T>& c) {
  std::vector<T> linear, quadratic;
  for (const T x : c.targets) {
    linear.push_back(static_cast<T>(0.5) - x);
    const T printed = static_cast<T>(0.5) * x - static_cast<T>(0.25);
    quadratic.push_back(c.form == CoefForm::kPrinted ? printed : static_cast<T>(0.125));
  }
  if (!c.noise.on) return {linear, quadratic};
  const Draws none{};
  for (std::int64_t row = 0; row < c.rows; ++row) {
    const std::int64_t at = row * c.columns;
    const auto add = [&](std::vector<T>& values, std::uint64_t first) {
      cpu::add_noise_float(c.noise.stream, c.noise.rounding, Distribution::kLaplace, none,
                           first + static_cast<std::uint64_t>(at), c.columns,
                           cpu::scale_of(c.noise, row), values.data() + at, 1);
    };
    add(linear, c.noise.linear);
    add(quadratic, cpu::quadratic_position(c.noise, c.rows * c.columns));
  }
  return {linear, quadratic};
}

// Slopes, and losses whose terms meet in sixteen lanes.
template <class T>
std::pair<std::vector<double>, std::vector<T>> losses_of(const Case<T>& c,
                                                         const std::vector<std::vector<T>>& made) {
  std::vector<double> losses;
  std::vector<T> slopes;
  for (std::int64_t row = 0; row < c.rows; ++row) {
    std::vector<double> lanes(16, 0.0);
    for (std::int64_t column = 0; column < c.columns; ++column) {
      const auto i = static_cast<std::size_t>(row * c.columns + column);
      const T shifted = c.z[i] + (c.shift.empty() ? T{0} : c.shift[static_cast<std::size_t>(row)]);
      const T w = c.shift.empty() ? c.z[i] : shifted;
      const T a1 = made[0][i], a2 = made[1][i];
      slopes.push_back((a2 + a2) * w + a1);
      const double wide = w;
      lanes[static_cast<std::size_t>(column % 16)] +=
          wide * (static_cast<double>(a1) + static_cast<double>(a2) * wide);
    }
    for (std::size_t half = 8; half > 0; half /= 2) {
      for (std::size_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    }
    losses.push_back(lanes[0]);
  }
  return {losses, slopes};
}

template <class T>
std::int64_t run(const Case<T>& c, const std::string& what) {
  const auto made = coefficients_of(c);
  const auto [losses, slopes] = losses_of(c, made);
  std::int64_t cases = 0;
  for_every_setting([&](int threads, const std::string& setting) {
    Shifted<T> x(c.targets, 1), z(c.z, 3), shift(c.shift, 1);
    Shifted<T> a1(std::vector<T>(c.size()), 3), a2(std::vector<T>(c.size()), 1);
    cpu::perturb(
        cpu::Perturb<T>{x.data(), c.form, c.noise, a1.data(), a2.data(), c.rows, c.columns},
        threads);
    check_same(a1.values(), made[0], what + " linear" + setting);
    check_same(a2.values(), made[1], what + " quadratic" + setting);
    Shifted<double> loss(std::vector<double>(losses.size()), 1);
    Shifted<T> dz(std::vector<T>(c.size()), 1);
    cpu::quadratic(cpu::Quadratic<T>{z.data(), x.data(), c.form, c.noise,
                                     c.shift.empty() ? nullptr : shift.data(), loss.data(),
                                     dz.data(), c.rows, c.columns},
                   threads);
    check_same(loss.values(), losses, what + " loss" + setting);
    check_same(dz.values(), slopes, what + " slopes" + setting);
    ++cases;
  });
  return cases;
}

template <class T>
std::int64_t sweep(std::int64_t rows, std::int64_t columns, std::uint64_t first) {
  const auto n = static_cast<std::size_t>(rows * columns);
  Case<T> c{};
  c.rows = rows;
  c.columns = columns;
  for (std::size_t i = 0; i < n; ++i) {
    c.targets.push_back(static_cast<T>(i * 37 % 129) / 128);
    c.z.push_back(static_cast<T>(i * 91 % 257) / 32 - 4);
  }
  std::vector<float> scales;
  std::vector<T> shift;
  for (std::int64_t row = 0; row < rows; ++row) {
    scales.push_back(0.1f + static_cast<float>(row % 7));
    shift.push_back(static_cast<T>(row % 5) - T{2});
  }
  const std::string size = std::to_string(rows) + " x " + std::to_string(columns);
  std::int64_t cases = 0;
  for (const CoefForm form : {CoefForm::kPrinted, CoefForm::kTaylor}) {
    c.form = form;
    c.noise = {};
    c.noise.scale = 1;
    c.shift = {};
    cases += run(c, "plain " + size);
    c.noise.on = true;
    c.noise.stream = counting_key(0x04000000, 3, 8);
    c.noise.rounding = counting_key(0x01000000, 3, 8);
    c.noise.linear = first;
    c.noise.scale = 0.75;
    c.shift = shift;
    cases += run(c, "noised " + size);
    c.noise.scales = scales.data();
    cases += run(c, "scaled " + size);
    // Made before, from a little before the first position on.
    const std::uint64_t begin = first - 3;
    const std::uint64_t count = cpu::quadratic_position(c.noise, rows * columns) + n - begin;
    std::vector<std::int32_t> values(count);
    std::vector<std::int16_t> bits(count);
    const auto made = static_cast<std::int64_t>(count);
    lattice_draws(c.noise.stream, Distribution::kLaplace, begin, made, values.data(), 1);
    rounding_draws(c.noise.rounding, begin, made, bits.data(), 1);
    c.noise.draws.source = DrawSource::kValues;
    c.noise.draws.first = begin;
    c.noise.draws.count = made;
    c.noise.draws.values = values.data();
    cases += run(c, "draws ahead " + size);
    c.noise.draws.rounding = bits.data();
    cases += run(c, "all ahead " + size);
  }
  return cases;
}

// The loss of features, its coefficients noised by the op for tensors, its sums in their order.
template <class T>
std::int64_t sweep_features(std::int64_t records, std::int64_t classes, std::int64_t width,
                            bool noised) {
  const auto at = [](std::int64_t i) { return static_cast<std::size_t>(i); };
  const std::int64_t pairs = records * classes, linear = pairs * width;
  std::vector<T> h, y, w;
  for (std::int64_t i = 0; i < records * width; ++i)
    h.push_back(static_cast<T>(i * 37 % 129) / 128);
  for (std::int64_t i = 0; i < pairs; ++i) y.push_back(static_cast<T>(i * 5 % 4) / 3);
  for (std::int64_t i = 0; i < classes * width; ++i) {
    w.push_back(static_cast<T>(i * 91 % 257 - 128) / 70);
  }
  CoefNoise noise{};
  noise.scale = 0.75;
  noise.on = noised;
  noise.stream = counting_key(0x04000000, 3, 8);
  noise.rounding = counting_key(0x01000000, 3, 8);
  noise.linear = 700;
  std::vector<T> a1, a2;
  for (std::int64_t pair = 0; pair < pairs; ++pair) {
    const T* own = h.data() + pair / classes * width;
    for (std::int64_t e = 0; e < width; ++e) {
      a1.push_back((static_cast<T>(0.5) - y[at(pair)]) * own[e]);
      for (std::int64_t g = 0; g < width; ++g) a2.push_back(own[e] * (own[g] * T{0.125}));
    }
  }
  if (noised) {
    const auto add = [&](std::vector<T>& values, std::uint64_t first) {
      cpu::add_noise_float(noise.stream, noise.rounding, Distribution::kLaplace, Draws{}, first,
                           static_cast<std::int64_t>(values.size()), noise.scale, values.data(), 1);
    };
    add(a1, noise.linear);
    add(a2, cpu::quadratic_position(noise, linear));
  }
  const auto sum = [](std::int64_t n, const auto& term) {
    double lanes[16] = {};
    for (std::int64_t i = 0; i < n; ++i) lanes[i % 16] += term(i);
    for (int half = 8; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    }
    return lanes[0];
  };
  const auto wide = [](T x) { return static_cast<double>(x); };
  std::vector<double> losses, total(at(classes * width)), of_run(at(classes * width));
  std::vector<T> by_hidden, by_weights;
  for (std::int64_t i = 0; i < records; ++i) {
    std::vector<double> slopes(at(width));
    double loss = 0;
    for (std::int64_t label = 0; label < classes; ++label) {
      const std::int64_t pair = i * classes + label;
      const T *own = w.data() + label * width, *quadratic = a2.data() + pair * width * width;
      std::vector<double> sums;
      for (std::int64_t e = 0; e < width; ++e) {
        sums.push_back(wide(a1[at(pair * width + e)]) + sum(width, [&](std::int64_t g) {
                         return wide(quadratic[e * width + g]) * wide(own[g]);
                       }));
      }
      loss += sum(width, [&](std::int64_t e) { return wide(own[e]) * sums[at(e)]; });
      const double score =
          sum(width, [&](std::int64_t e) { return wide(h[at(i * width + e)]) * wide(own[e]); });
      for (std::int64_t g = 0; g < width; ++g) {
        double column = 0;
        for (std::int64_t e = 0; e < width; ++e) {
          column += wide(quadratic[e * width + g]) * wide(own[e]);
        }
        of_run[at(label * width + g)] += sums[at(g)] + column;
        slopes[at(g)] += wide(own[g]) * (wide(static_cast<T>(0.5) - y[at(pair)]) + 0.25 * score);
      }
    }
    losses.push_back(loss);
    for (const double slope : slopes) by_hidden.push_back(static_cast<T>(slope));
    if (i % 16 != 15 && i + 1 < records) continue;
    for (std::size_t e = 0; e < total.size(); ++e) total[e] += of_run[e];
    of_run.assign(of_run.size(), 0.0);
  }
  for (const double slope : total) by_weights.push_back(static_cast<T>(slope));
  std::int64_t cases = 0;
  for_every_setting([&](int threads, const std::string& setting) {
    Shifted<T> hidden(h, 1), targets(y, 3), weights(w, 1);
    Shifted<double> loss(std::vector<double>(losses.size()), 1);
    Shifted<T> dweights(std::vector<T>(w.size()), 3), dhidden(std::vector<T>(h.size()), 1);
    cpu::expanded(
        cpu::Expanded<T>{hidden.data(), targets.data(), weights.data(), noise, loss.data(),
                         dweights.data(), dhidden.data(), records, width, classes},
        threads);
    check_same(loss.values(), losses, "expanded loss" + setting);
    check_same(dweights.values(), by_weights, "by weights" + setting);
    check_same(dhidden.values(), by_hidden, "by hidden" + setting);
    ++cases;
  });
  return cases;
}

// Runs of autoencoders: the same bits at every setting, and no number beside the operands is read.
template <class T>
std::int64_t sweep_descents(std::int64_t runs, std::int64_t n, std::int64_t code, bool noised) {
  constexpr std::int64_t kUsers = 2, kSteps = 5, kRecords = 3;
  const auto at = [](std::int64_t i) { return static_cast<std::size_t>(i); };
  const auto numbers = [&](std::int64_t count, int step) {
    std::vector<T> made;
    for (std::int64_t i = 0; i < count; ++i) {
      made.push_back(static_cast<T>((i * step) % 17) / static_cast<T>(17));
    }
    return made;
  };
  const std::int64_t visits = runs * kSteps * kUsers, drawn = noised ? 2 * visits * n : 0;
  std::vector<std::int64_t> rows;
  for (std::int64_t i = 0; i < visits; ++i) rows.push_back(i % kRecords);
  std::vector<std::int32_t> x(at(drawn));
  std::vector<std::int16_t> bits(at(drawn));
  for (std::size_t i = 0; i < x.size(); ++i) {
    x[i] = static_cast<std::int32_t>(i % 9001) * 37 - 150000;
    bits[i] = static_cast<std::int16_t>(static_cast<int>(i % 60000) - 30000);
  }
  std::vector<T> want;
  std::int64_t cases = 0;
  for_every_setting([&](int threads, const std::string& setting) {
    Shifted<T> encoder(numbers(runs * kUsers * n * code, 3), 1);
    Shifted<T> decoder(numbers(runs * kUsers * n * code, 5), 3);
    Shifted<T> inputs(numbers(kRecords * n, 7), 1), targets(numbers(runs * kRecords * n, 11), 3);
    Shifted<T> added(numbers(visits * n, 13), 1);
    Shifted<std::int32_t> stopped(std::vector<std::int32_t>(at(runs)), 1), draws(x, 3);
    Shifted<std::int16_t> rounding(bits, 1);
    Shifted<std::int64_t> order(rows, 1);
    const cpu::Descend<T> call{encoder.data(),
                               decoder.data(),
                               stopped.data(),
                               inputs.data(),
                               targets.data(),
                               order.data(),
                               CoefForm::kPrinted,
                               0.05,
                               0.5,
                               1000.0,
                               added.data(),
                               noised ? draws.data() : nullptr,
                               noised ? rounding.data() : nullptr,
                               noised ? 0.5 : 0.0,
                               noised ? 0.25 : 0.0,
                               runs,
                               kUsers,
                               n,
                               code,
                               1,
                               kRecords,
                               runs,
                               kSteps};
    cpu::descend(call, threads);
    std::vector<T> got = encoder.values();
    const std::vector<T> rest = decoder.values();
    got.insert(got.end(), rest.begin(), rest.end());
    if (want.empty()) want = got;
    check_same(got, want, "descent" + setting);
    ++cases;
  });
  return cases;
}

}  // namespace

std::int64_t test_coef() {
  std::int64_t cases = 0;
  for (const bool noised : {false, true}) {
    cases += sweep_features<float>(35, 3, 25, noised) + sweep_features<double>(17, 2, 16, noised) +
             sweep_features<float>(2, 1, 530, noised) + sweep_features<float>(0, 2, 3, noised) +
             sweep_features<double>(3, 2, 0, noised);
    cases += sweep_descents<float>(5, 14, 7, noised) + sweep_descents<double>(1, 1, 1, noised) +
             sweep_descents<float>(3, 33, 17, noised);
  }
  return cases + sweep<float>(1, 1, 3) + sweep<float>(700, 14, 512) + sweep<float>(23, 1031, 700) +
         sweep<double>(40, 17, 1000) + sweep<float>(0, 5, 3) + sweep<double>(5, 0, 3);
}

}  // namespace dpkern::test
