// Products with the matrix of a release map. Rows of the matrix are the lanes of a vector and each
// number of a channel pair is broadcast, so that pairs stay as they are in memory.

#include "cpu/pair_map.h"

#include <algorithm>

#include "cpu/isa.h"

namespace dpkern::cpu {
namespace {

template <int kBytes>
struct PairProduct {
  static constexpr int kLanes = kBytes / static_cast<int>(sizeof(double));
  static constexpr int kMostVectors = 4;               // of one pass over the pairs
  static constexpr int kPairs = kBytes == 64 ? 4 : 2;  // together, to hide the latency of sums
  using V = Vector<double, kLanes>;

  struct Pass {
    const double* from;
    std::int64_t pairs, columns;
    const double* matrix;  // from the pass's first row on
    std::int64_t height;
    double* to;
    std::int64_t rows;
  };

  template <int kVectors, int kCount>
  static DPK_INLINE void multiply_pairs(const Pass& pass, std::int64_t first) {
    V sums[kCount][kVectors];
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sums[i][v] = V{};
    }
    const double* const numbers = pass.from + first * pass.columns;
    for (std::int64_t c = 0; c < pass.columns; ++c) {
      V column[kVectors];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        __builtin_memcpy(&column[v], pass.matrix + c * pass.height + v * kLanes, sizeof(V));
      }
#pragma GCC unroll 8
      for (int i = 0; i < kCount; ++i) {
        const double number = numbers[i * pass.columns + c];
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sums[i][v] += number * column[v];
      }
    }
    // What a vector writes beyond the last row belongs to the next pair, which is written later.
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) {
      double* const to = pass.to + (first + i) * pass.rows;
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        __builtin_memcpy(to + v * kLanes, &sums[i][v], sizeof(V));
      }
    }
  }

  template <int kVectors>
  static DPK_INLINE void multiply(const Pass& pass) {
    std::int64_t pair = 0;
    for (; pair + kPairs <= pass.pairs; pair += kPairs) {
      multiply_pairs<kVectors, kPairs>(pass, pair);
    }
    for (; pair < pass.pairs; ++pair) multiply_pairs<kVectors, 1>(pass, pair);
  }

  static DPK_INLINE void multiply(int vectors, const Pass& pass) {
    switch (vectors) {
      case 1:
        return multiply<1>(pass);
      case 2:
        return multiply<2>(pass);
      case 3:
        return multiply<3>(pass);
      default:
        return multiply<kMostVectors>(pass);
    }
  }
};

}  // namespace

PairMatrix::PairMatrix(const double* matrix, std::int64_t rows, std::int64_t columns)
    : rows_(rows),
      columns_(columns),
      height_((rows + kPadded - 1) / kPadded * kPadded),
      turned_(static_cast<std::size_t>(columns * height_), 0.0) {
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < columns; ++c) {
      turned_[static_cast<std::size_t>(c * height_ + r)] = matrix[r * columns + c];
    }
  }
}

void PairMatrix::multiply(const double* from, std::int64_t pairs, double* to) const {
  versioned_by_width([&](auto width) DPK_INLINE {
    using Of = PairProduct<width>;
    constexpr std::int64_t kRows = Of::kMostVectors * Of::kLanes;
    // The last rows first: only they are followed by numbers of the next pair.
    for (std::int64_t first = (rows_ - 1) / kRows * kRows; first >= 0; first -= kRows) {
      const std::int64_t left = std::min(kRows, rows_ - first);
      Of::multiply(static_cast<int>((left + Of::kLanes - 1) / Of::kLanes),
                   {from, pairs, columns_, turned_.data() + first, height_, to + first, rows_});
    }
  });
}

}  // namespace dpkern::cpu
