// The loss whose coefficients hold the hidden layer, counted.

#include <cstddef>

#include "counted/coef.h"
#include "counted/coef_noise.h"
#include "counted/plain.h"

namespace dpkern::counted {
namespace {

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

// The sum of term(0) .. term(n - 1) in lanes.
template <class F>
Counted<double> lane_sum(std::int64_t n, const F& term) {
  Counted<double> lanes[kLossLanes];
  for (std::int64_t i = 0; i < n; ++i) lanes[i % kLossLanes] += term(i);
  return sum_of_lanes(lanes);
}

// Numbers in double, each converted once.
template <class T>
Row<double> widened(const Counted<T>* from, std::int64_t count) {
  Row<double> row;
  for (std::int64_t i = 0; i < count; ++i) row.push_back(Counted<double>(from[i]));
  return row;
}

}  // namespace

template <class T>
void expanded_loss(const cpu::CoefNoise& noise, const Draws& ahead, std::int64_t records,
                   std::int64_t classes, std::int64_t width, const T* hidden, const T* targets,
                   const T* weights, double* loss, T* dweights, T* dhidden) {
  const Row<T> h = loaded<T>(Operand(hidden, records * width), 0, records * width);
  const Row<double> w = widened(
      loaded<T>(Operand(weights, classes * width), 0, classes * width).data(), classes * width);
  const Operand<const T> y(targets, records * classes);
  Coefficients<T> factors, linear, quadratic;
  for (std::int64_t i = 0; i < records; ++i) {
    Row<T> eighths;
    for (std::int64_t g = 0; g < width; ++g) eighths.push_back(eighth_of(h[index(i * width + g)]));
    for (std::int64_t label = 0; label < classes; ++label) {
      factors.push_back(linear_coefficient(y[i * classes + label]));
      for (std::int64_t e = 0; e < width; ++e) {
        const Counted<T> own = h[index(i * width + e)];
        linear.push_back(factors.back() * own);
        for (const Counted<T> eighth : eighths) quadratic.push_back(own * eighth);
      }
    }
  }
  add_noise(noise, ahead, records, linear, quadratic);
  Operand<double> losses(loss, records);
  Operand<T> by_hidden(dhidden, records * width), by_weights(dweights, classes * width);
  Row<double> total = zeros<double>(classes * width), of_run = zeros<double>(classes * width);
  for (std::int64_t i = 0; i < records; ++i) {
    const Row<double> features = widened(h.data() + i * width, width);
    Row<double> slopes = zeros<double>(width);
    Counted<double> of_record;
    for (std::int64_t label = 0; label < classes; ++label) {
      const std::int64_t pair = i * classes + label;
      const Row<double> a1 = widened(linear.data() + pair * width, width);
      const Row<double> a2 = widened(quadratic.data() + pair * width * width, width * width);
      const Counted<double>* of_label = w.data() + label * width;
      const auto row_of = [&](std::int64_t e) {
        return lane_sum(width,
                        [&](std::int64_t g) { return a2[index(e * width + g)] * of_label[g]; });
      };
      Row<double> sums;
      for (std::int64_t e = 0; e < width; ++e) sums.push_back(a1[index(e)] + row_of(e));
      of_record += lane_sum(width, [&](std::int64_t e) { return of_label[e] * sums[index(e)]; });
      for (std::int64_t g = 0; g < width; ++g) {
        Counted<double> column;
        for (std::int64_t e = 0; e < width; ++e) column += a2[index(e * width + g)] * of_label[e];
        of_run[index(label * width + g)] += sums[index(g)] + column;
      }
      const Counted<double> score =
          lane_sum(width, [&](std::int64_t e) { return features[index(e)] * of_label[e]; });
      const Counted<double> slope = score_slope(Counted<double>(factors[index(pair)]), score);
      for (std::int64_t e = 0; e < width; ++e) slopes[index(e)] += of_label[e] * slope;
    }
    losses.store(i, of_record);
    for (std::int64_t e = 0; e < width; ++e) {
      by_hidden.store(i * width + e, Counted<T>(slopes[index(e)]));
    }
    if ((i + 1) % kRecordRun != 0 && i + 1 < records) continue;
    for (std::size_t e = 0; e < total.size(); ++e) total[e] += of_run[e];
    of_run = zeros<double>(classes * width);
  }
  for (std::size_t e = 0; e < total.size(); ++e) {
    by_weights.store(static_cast<std::int64_t>(e), Counted<T>(total[e]));
  }
}

template void expanded_loss(const cpu::CoefNoise&, const Draws&, std::int64_t, std::int64_t,
                            std::int64_t, const float*, const float*, const float*, double*, float*,
                            float*);
template void expanded_loss(const cpu::CoefNoise&, const Draws&, std::int64_t, std::int64_t,
                            std::int64_t, const double*, const double*, const double*, double*,
                            double*, double*);

}  // namespace dpkern::counted
