#pragma once
// A small matrix times the numbers of every channel pair, in double.

#include <cstdint>
#include <vector>

namespace dpkern::cpu {

// A matrix [rows, columns] with its columns as vectors of kPadded rows, zeros behind the last.
class PairMatrix {
 public:
  static constexpr std::int64_t kPadded = 8;  // numbers of the widest vector

  PairMatrix() = default;
  PairMatrix(const double* matrix, std::int64_t rows, std::int64_t columns);

  // to [pairs, rows] = from [pairs, columns] matrix^T. `to` has room for kPadded numbers more.
  void multiply(const double* from, std::int64_t pairs, double* to) const;

 private:
  std::int64_t rows_ = 0, columns_ = 0, height_ = 0;
  std::vector<double> turned_;  // [columns, height]
};

}  // namespace dpkern::cpu
