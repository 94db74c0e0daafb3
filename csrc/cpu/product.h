#pragma once
// Matrix products of layers: forwards with the transposed weight, backwards with the weight itself.

#include <cstdint>

namespace dpkern::cpu {

struct ProductShape {
  std::int64_t rows;
  std::int64_t inner;  // what is summed over, at least 1
  std::int64_t columns;
  bool transposed;  // w is stored [columns, inner] instead of [inner, columns]
};

// out [rows, columns] = x [rows, inner] w + bias [columns], null for none.
template <class F>
void matmul(const F* x, const F* w, const F* bias, const ProductShape& shape, F* out, int threads);

}  // namespace dpkern::cpu
