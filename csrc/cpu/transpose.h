#pragma once
// Many matrices transposed: operands whose channels are last in memory, as kernels want them.

#include <cstdint>

namespace dpkern::cpu {

// to [count, columns, rows] = from [count, rows, columns], each matrix transposed.
template <class F>
void transpose_each(const F* from, std::int64_t count, std::int64_t rows, std::int64_t columns,
                    F* to, int threads);

}  // namespace dpkern::cpu
