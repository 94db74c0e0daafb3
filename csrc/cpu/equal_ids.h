#pragma once
// The rows of a sample that one row of an embedding table has seen, brought together and added.

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "cpu/ghost_tiles.h"
#include "cpu/parallel.h"

namespace dpkern::cpu {

// The positions of one sample, those of equal ids together, ids increasing.
class EqualIds {
 public:
  using Place = std::pair<std::int64_t, std::int64_t>;  // id, position

  void sort(const std::int64_t* ids, std::int64_t positions, std::int64_t padding) {
    order_.clear();
    for (std::int64_t t = 0; t < positions; ++t) {
      if (ids[t] != padding) order_.push_back({ids[t], t});
    }
    std::sort(order_.begin(), order_.end());
  }
  // body(places, count) for each id.
  template <class F>
  void for_each(const F& body) const {
    for (std::size_t begin = 0; begin < order_.size();) {
      std::size_t end = begin + 1;
      while (end < order_.size() && order_[end].first == order_[begin].first) ++end;
      body(order_.data() + begin, end - begin);
      begin = end;
    }
  }

 private:
  std::vector<Place> order_;
};

// The sums over these places of g [positions, width], in double and in the order of the places;
// they stay until this thread's next call.
template <class F>
DPK_INLINE inline double* sum_rows(const F* g, std::int64_t width, Range columns,
                                   const EqualIds::Place* places, std::size_t count) {
  const std::int64_t n = columns.end - columns.begin;
  double* const sums = ghost::scratch<double, 7>(n);
  std::fill_n(sums, n, 0.0);
  for (std::size_t k = 0; k < count; ++k) {
    const F* const row = g + places[k].second * width + columns.begin;
    for (std::int64_t i = 0; i < n; ++i) sums[i] += static_cast<double>(row[i]);
  }
  return sums;
}

}  // namespace dpkern::cpu
