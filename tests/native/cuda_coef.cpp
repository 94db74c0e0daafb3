// The kernels of coefficients against those of the CPU, bit for bit.

#include "core/layouts.h"
#include "cpu/coef.h"
#include "cpu/tiles.h"
#include "cuda.h"

namespace dpkern::test {
namespace {

// One release, as the CPU and as a device takes it.
template <class T>
struct Release {
  cpu::CoefNoise noise;
  CoefPlan plan;
  std::vector<float> scales;
  std::vector<T> per_units, cells;
  std::vector<std::int32_t> values;
  std::vector<std::int16_t> bits;
};

// `total`: quadratic coefficients.
template <class T>
Release<T> release(NoiseSource source, bool scaled, std::int64_t rows, std::int64_t columns,
                   std::int64_t total) {
  Release<T> r{};
  const std::uint64_t first = 511, linear = static_cast<std::uint64_t>(rows * columns);
  const std::uint64_t behind = (first + linear + kTile - 1) / kTile * kTile;
  r.noise.scale = 0.75;
  r.plan.rows = rows;
  r.plan.columns = columns;
  r.plan.wide = sizeof(T) == sizeof(double);
  r.plan.noise = source;
  if (source == NoiseSource::kNone) return r;
  r.noise = {true,
             counting_key(0x04000000, 3, 8),
             counting_key(0x01000000, 3, 8),
             {},
             first,
             behind,
             0.75,
             nullptr,
             false};
  r.plan.stream = r.noise.stream;
  r.plan.rounding = r.noise.rounding;
  r.plan.linear = first;
  r.plan.quadratic = behind;
  const cpu::Lattice<T> lattice(r.noise.scale);
  r.plan.per_unit = static_cast<double>(lattice.per_unit);
  r.plan.cell = static_cast<double>(lattice.cell);
  for (std::int64_t row = 0; scaled && row < rows; ++row) {
    r.scales.push_back(0.1f + static_cast<float>(row % 7));
    const cpu::Lattice<T> own(static_cast<double>(r.scales.back()));
    r.per_units.push_back(own.per_unit);
    r.cells.push_back(own.cell);
  }
  if (source == NoiseSource::kStream) return r;
  const std::uint64_t count = behind + static_cast<std::uint64_t>(total) - first;
  r.values.resize(count);
  r.bits.resize(count);
  const auto n = static_cast<std::int64_t>(count);
  cpu::lattice_draws(r.noise.stream, Distribution::kLaplace, first, n, r.values.data(), 1);
  cpu::rounding_draws(r.noise.rounding, first, n, r.bits.data(), 1);
  r.plan.quadratic_at = static_cast<std::int64_t>(behind - first);
  return r;
}

// Its pointers, once it lies where it stays.
template <class T>
void point(Release<T>& r) {
  if (!r.scales.empty()) {
    r.noise.scales = r.scales.data();
    r.plan.per_units = r.per_units.data();
    r.plan.cells = r.cells.data();
  }
  if (r.values.empty()) return;
  r.noise.ahead = {r.values.data(), r.bits.data(), r.plan.linear};
  r.plan.draws = r.values.data();
  r.plan.rounding_bits = reinterpret_cast<const std::uint16_t*>(r.bits.data());
}

template <class T>
std::vector<T> numbers(std::int64_t count, int factor, int below) {
  std::vector<T> made;
  for (std::int64_t i = 0; i < count; ++i) {
    made.push_back(static_cast<T>(i * factor % (below + 1)) / static_cast<T>(below));
  }
  return made;
}

template <class T>
std::int64_t polynomials(NoiseSource source, bool scaled, std::int64_t rows, std::int64_t columns) {
  const std::int64_t n = rows * columns;
  Release<T> r = release<T>(source, scaled, rows, columns, n);
  point(r);
  const std::vector<T> x = numbers<T>(n, 37, 128), z = numbers<T>(n, 91, 64);
  const std::vector<T> shift = numbers<T>(rows, 5, 3);
  std::vector<T> linear(x.size()), quadratic(x.size()), slopes(x.size());
  std::vector<double> losses(static_cast<std::size_t>(rows));
  cpu::perturb(CoefForm::kPrinted, r.noise, rows, columns, x.data(), linear.data(),
               quadratic.data(), 1);
  cpu::quadratic_loss(CoefForm::kPrinted, r.noise, rows, columns, z.data(), x.data(), shift.data(),
                      losses.data(), slopes.data(), 1);
  std::int64_t cases = 0;
  in_both_orders([&](const std::string& order) {
    Shifted<T> from(x, 1), logits(z, 3), moved(shift, 1);
    Shifted<T> a1(std::vector<T>(x.size()), 3), a2(std::vector<T>(x.size()), 1);
    check_launch(cuda::coef_perturb(r.plan, from.data(), a1.data(), a2.data(), nullptr), "perturb");
    check_same(a1.values(), linear, "linear" + order);
    check_same(a2.values(), quadratic, "quadratic" + order);
    Shifted<double> loss(std::vector<double>(losses.size()), 1);
    check_launch(cuda::coef_quadratic(r.plan, logits.data(), from.data(), moved.data(), loss.data(),
                                      a1.data(), nullptr),
                 "quadratic");
    check_same(loss.values(), losses, "loss" + order);
    check_same(a1.values(), slopes, "slopes" + order);
    ++cases;
  });
  return cases;
}

template <class T>
std::int64_t features(NoiseSource source, bool scaled, std::int64_t records, std::int64_t classes,
                      std::int64_t width) {
  const std::int64_t each = classes * width;
  Release<T> r = release<T>(source, scaled, records, each, records * each * width);
  point(r);
  const std::vector<T> h = numbers<T>(records * width, 37, 128), w = numbers<T>(each, 91, 64);
  const std::vector<T> y = numbers<T>(records * classes, 5, 3);
  std::vector<double> losses(static_cast<std::size_t>(records));
  std::vector<T> by_weights(w.size()), by_hidden(h.size());
  cpu::expanded_loss(r.noise, records, classes, width, h.data(), y.data(), w.data(), losses.data(),
                     by_weights.data(), by_hidden.data(), 1);
  const auto room =
      static_cast<std::size_t>(cuda::coef_expanded_workspace(records, classes, width) / 8);
  std::int64_t cases = 0;
  in_both_orders([&](const std::string& order) {
    Shifted<T> hidden(h, 1), targets(y, 3), weights(w, 1);
    Shifted<T> dweights(std::vector<T>(w.size()), 3), dhidden(std::vector<T>(h.size()), 1);
    Shifted<double> loss(std::vector<double>(losses.size()), 1);
    Shifted<double> workspace(std::vector<double>(room), 0);
    check_launch(cuda::coef_expanded(r.plan, classes, width, hidden.data(), targets.data(),
                                     weights.data(), loss.data(), dweights.data(), dhidden.data(),
                                     workspace.data(), nullptr),
                 "expanded");
    check_same(loss.values(), losses, "expanded loss" + order);
    check_same(dweights.values(), by_weights, "by weights" + order);
    check_same(dhidden.values(), by_hidden, "by hidden" + order);
    ++cases;
  });
  return cases;
}

}  // namespace

std::int64_t test_cuda_coef() {
  std::int64_t cases = 0;
  for (const NoiseSource source : {NoiseSource::kNone, NoiseSource::kStream, NoiseSource::kDraws}) {
    for (const bool scaled : {false, true}) {
      cases +=
          polynomials<float>(source, scaled, 2, 3100) +
          polynomials<float>(source, scaled, 301, 14) +
          polynomials<double>(source, scaled, 5, 1536) + polynomials<double>(source, scaled, 0, 7) +
          features<float>(source, scaled, 18, 3, 25) + features<double>(source, scaled, 1, 61, 60) +
          features<float>(source, scaled, 0, 2, 3);
    }
  }
  return cases;
}

}  // namespace dpkern::test
