#pragma once
// What the counted layer kernels share. Sums of products start at zero, as the kernels' chains of
// fused multiply-adds do: n products take n additions.

#include <vector>

#include "core/counted.h"

namespace dpkern::counted {

template <class W>
using Row = std::vector<Counted<W>>;

// `count` elements from `begin` on, read once and converted once.
template <class W, class F>
Row<W> loaded(const Operand<const F>& from, std::int64_t begin, std::int64_t count) {
  Row<W> row;
  row.reserve(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) row.push_back(Counted<W>(from[begin + i]));
  return row;
}

template <class T>
Row<T> zeros(std::int64_t count) {
  return Row<T>(static_cast<std::size_t>(count));
}

// sum of x[i step] y[i step].
template <class T>
Counted<T> dot(const Counted<T>* x, const Counted<T>* y, std::int64_t count,
               std::int64_t step = 1) {
  Counted<T> total;
  for (std::int64_t i = 0; i < count; ++i) total += x[i * step] * y[i * step];
  return total;
}

// The same in double.
template <class T>
Counted<double> square_of(const Counted<T>* x, std::int64_t count) {
  Counted<double> total;
  for (std::int64_t i = 0; i < count; ++i) {
    const Counted<double> wide(x[i]);
    total += wide * wide;
  }
  return total;
}

// n roundings of double, to first order and a little more.
inline double gamma(std::int64_t n) { return 1.01 * static_cast<double>(n) * 0x1p-53; }

}  // namespace dpkern::counted
