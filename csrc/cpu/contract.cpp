#include "cpu/contract.h"

#include <algorithm>

#include "cpu/parallel.h"
#include "cpu/rows.h"

namespace dpkern::cpu {
namespace {

constexpr std::int64_t kGrain = 1 << 15;    // entries worth a thread
constexpr std::int64_t kColumns = 1 << 12;  // of the sums that stay in the first cache
constexpr int kMostRows = 4;

}  // namespace

template <class F>
void contract(const F* rows, const F* factors, std::int64_t batch, std::int64_t columns, F* out,
              int threads) {
  const std::int64_t grain = std::max<std::int64_t>(64, kGrain / std::max<std::int64_t>(1, batch));
  parallel_for(columns, grain, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t first = begin; first < end; first += kColumns) {
      const std::int64_t count = std::min(kColumns, end - first);
      const F* used_rows[kMostRows];
      F weights[kMostRows];
      int used = 0;
      for (std::int64_t b = 0; b < batch; ++b) {
        if (factors[b] == 0) continue;  // 0 * inf would not vanish
        used_rows[used] = rows + b * columns + first;
        weights[used++] = factors[b];
        if (used < kMostRows) continue;
        add_rows(used_rows, weights, used, count, out + first);
        used = 0;
      }
      add_rows(used_rows, weights, used, count, out + first);
    }
  });
}

template void contract<float>(const float*, const float*, std::int64_t, std::int64_t, float*, int);
template void contract<double>(const double*, const double*, std::int64_t, std::int64_t, double*,
                               int);

}  // namespace dpkern::cpu
