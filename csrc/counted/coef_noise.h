#pragma once
// Both kinds of coefficients of a release, noised and counted.

#include <vector>

#include "core/coef.h"
#include "counted/tensor_noise.h"
#include "cpu/coef_noise.h"

namespace dpkern::counted {

template <class T>
using Coefficients = std::vector<Counted<T>>;

// 1 / u and the cell of every row; one for all where there is one scale.
template <class T>
std::vector<Grid<T>> grids_of(const CoefNoise& noise, std::int64_t rows) {
  if (noise.scales == nullptr) return {Grid<T>(noise.scale)};
  std::vector<Grid<T>> grids;
  const auto make = [&](const auto* scales) {
    const Operand each(scales, rows);
    for (std::int64_t row = 0; row < rows; ++row) grids.emplace_back(wide(each[row]));
  };
  if (noise.wide_scales) {
    make(static_cast<const double*>(noise.scales));
  } else {
    make(static_cast<const float*>(noise.scales));
  }
  return grids;
}

// Noise of both kinds; every row has equally many of each.
template <class T>
void add_noise(const CoefNoise& noise, std::int64_t rows, Coefficients<T>& linear,
               Coefficients<T>& quadratic) {
  if (!noise.on || linear.empty()) return;
  const std::vector<Grid<T>> grids = grids_of<T>(noise, rows);
  UpdateNoise streams{};
  streams.law = Distribution::kLaplace;
  streams.stream = noise.stream;
  streams.rounding = noise.rounding;
  streams.draws = noise.draws;
  TensorNoise drawn(streams, true);
  const auto add = [&](Coefficients<T>& values, std::uint64_t first) {
    const std::size_t columns = values.size() / static_cast<std::size_t>(rows);
    drawn.make(first, static_cast<std::int64_t>(values.size()));
    for (std::size_t i = 0; i < values.size(); ++i) {
      const Grid<T>& grid = grids[grids.size() == 1 ? 0 : i / columns];
      values[i] =
          noised_coefficient(values[i], grid.per_unit, grid.cell, drawn.bits[i], drawn.draws[i]);
    }
  };
  add(linear, noise.linear);
  add(quadratic, cpu::quadratic_position(noise, static_cast<std::int64_t>(linear.size())));
}

}  // namespace dpkern::counted
