#include <algorithm>
#include <functional>

#include "counted/factor.h"
#include "counted/kernels.h"

namespace dpkern::counted {
namespace {

template <class T>
std::vector<Operand<T>> operands_of(const std::vector<Part<T>>& params) {
  std::vector<Operand<T>> operands;
  for (const Part<T>& part : params) operands.emplace_back(part.data, part.size);
  return operands;
}

template <class T, class F>
void for_all(const std::vector<Part<T>>& params, std::vector<Operand<T>>& operands, const F& body) {
  for (std::size_t k = 0; k < params.size(); ++k) {
    for (std::int64_t i = 0; i < params[k].size; ++i) body(operands[k], i);
  }
}

template <class T>
void store_wide(Operand<T>& x, std::int64_t i, Counted<double> value) {
  if constexpr (std::is_same_v<T, double>) {
    x.store(i, value);
  } else {
    x.store(i, Counted<T>(value));
  }
}

}  // namespace

template <class T>
void project_box(const std::vector<Part<T>>& params, double low, double high) {
  std::vector<Operand<T>> operands = operands_of(params);
  const Counted<T> least(low), most(high);
  for_all(params, operands, [&](Operand<T>& x, std::int64_t i) {
    const Counted<T> value = x[i];
    const Counted<T> raised = choose(value < least, least, value);
    x.store(i, choose(raised > most, most, raised));
  });
}

template <class T>
void project_ball(const std::vector<Part<T>>& params, double radius) {
  std::vector<Operand<T>> operands = operands_of(params);
  Total<double> square;
  for_all(params, operands, [&](Operand<T>& x, std::int64_t i) {
    const Counted<double> value = wide(x[i]);
    square.add(value * value);
  });
  if (square.empty()) return;
  const Counted<double> norm = sqrt(square.total());
  if (norm <= radius) return;
  const Counted<double> factor = Counted<double>(radius) / norm;
  for_all(params, operands,
          [&](Operand<T>& x, std::int64_t i) { store_wide(x, i, wide(x[i]) * factor); });
}

// Sorting is a library's and not counted.
template <class T>
void project_simplex(const std::vector<Part<T>>& params, double total) {
  std::vector<Operand<T>> operands = operands_of(params);
  std::vector<double> falling;
  std::vector<Counted<double>> values;
  for_all(params, operands, [&](Operand<T>& x, std::int64_t i) {
    values.push_back(wide(x[i]));
    falling.push_back(values.back().value);
  });
  if (falling.empty()) return;
  std::sort(falling.begin(), falling.end(), std::greater<double>());
  std::vector<Counted<double>> thresholds;
  Total<double> sum;
  std::size_t above = 0;
  for (std::size_t i = 0; i < falling.size(); ++i) {
    sum.add(falling[i]);
    thresholds.push_back((sum.total() - total) / static_cast<double>(i + 1));
    if (Counted<double>(falling[i]) > thresholds.back()) above += 1;
  }
  const Counted<double> threshold = thresholds[above == 0 ? 0 : above - 1];
  std::size_t next = 0;
  for_all(params, operands, [&](Operand<T>& x, std::int64_t i) {
    const Counted<double> rest = values[next++] - threshold;
    store_wide(x, i, choose(rest < 0.0, Counted<double>{}, rest));
  });
}

template void project_box(const std::vector<Part<float>>&, double, double);
template void project_box(const std::vector<Part<double>>&, double, double);
template void project_ball(const std::vector<Part<float>>&, double);
template void project_ball(const std::vector<Part<double>>&, double);
template void project_simplex(const std::vector<Part<float>>&, double);
template void project_simplex(const std::vector<Part<double>>&, double);

}  // namespace dpkern::counted
