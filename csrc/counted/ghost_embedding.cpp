#include <algorithm>
#include <utility>

#include "counted/ghost.h"
#include "counted/plain.h"

namespace dpkern::counted {
namespace {

using Ids = Operand<const std::int64_t>;

// Places of one sample by id, without those that are ignored, each test of which counts.
std::vector<std::pair<std::int64_t, std::int64_t>> kept_of(const Ids& ids,
                                                           const EmbeddingSizes& sizes,
                                                           std::int64_t b) {
  std::vector<std::pair<std::int64_t, std::int64_t>> kept;
  for (std::int64_t t = b * sizes.positions; t < (b + 1) * sizes.positions; ++t) {
    const Counted<std::int64_t> id = ids[t];
    if (sizes.has_padding && id == sizes.padding) continue;
    kept.push_back({id.value, t});
  }
  return kept;
}

// Of the sum of some rows, from above.
template <class F>
Counted<double> group_square(const Operand<const F>& g, std::int64_t columns,
                             const std::pair<std::int64_t, std::int64_t>* places,
                             std::int64_t count) {
  const double slack = 1 + gamma(columns + 8);
  if (count == 1) {
    return square_of(loaded<double>(g, places->second * columns, columns).data(), columns) * slack;
  }
  Row<double> sums = zeros<double>(columns);
  Counted<double> absolute;
  for (std::int64_t k = 0; k < count; ++k) {
    const Row<double> row = loaded<double>(g, places[k].second * columns, columns);
    for (std::size_t i = 0; i < row.size(); ++i) sums[i] += row[i];
    absolute += sqrt(square_of(row.data(), columns));
  }
  const Counted<double> norm =
      sqrt(square_of(sums.data(), columns)) + gamma(2 * (count + columns + 64)) * absolute;
  return norm * norm * slack;
}

}  // namespace

template <class F>
void embedding_norm(const std::int64_t* ids, const F* g, const EmbeddingSizes& sizes,
                    double* squares) {
  const Ids all(ids, sizes.batch * sizes.positions);
  const Operand<const F> gs(g, sizes.batch * sizes.positions * sizes.columns);
  Operand<double> out(squares, sizes.batch);
  for (std::int64_t b = 0; b < sizes.batch; ++b) {
    auto kept = kept_of(all, sizes, b);
    std::sort(kept.begin(), kept.end());
    Counted<double> total;
    for (std::size_t begin = 0; begin < kept.size();) {
      std::size_t end = begin + 1;
      while (end < kept.size() && kept[end].first == kept[begin].first) ++end;
      total += group_square(gs, sizes.columns, kept.data() + begin,
                            static_cast<std::int64_t>(end - begin));
      begin = end;
    }
    out.store(b, total * (1 + gamma(sizes.positions + 4)));
  }
}

template <class F>
void embedding_sum(const std::int64_t* ids, const F* g, const EmbeddingSizes& sizes,
                   const F* factors, std::int64_t table, F* out) {
  const Ids all(ids, sizes.batch * sizes.positions);
  const Operand<const F> gs(g, sizes.batch * sizes.positions * sizes.columns);
  const Operand<const F> weights(factors, sizes.batch);
  Operand<F> rows(out, table * sizes.columns);
  for (std::int64_t b = 0; b < sizes.batch; ++b) {
    const Counted<F> factor = weights[b];
    if (factor == F{0}) continue;
    for (const auto& [id, t] : kept_of(all, sizes, b)) {
      for (std::int64_t i = 0; i < sizes.columns; ++i) {
        const std::int64_t to = id * sizes.columns + i;
        rows.store(to, Counted<F>(rows[to]) + factor * gs[t * sizes.columns + i]);
      }
    }
  }
}

template <class F>
void tied_cross(const std::int64_t* ids, const F* e, const F* a, const F* g,
                const EmbeddingSizes& sizes, std::int64_t rows, std::int64_t vocabulary,
                double* products) {
  const std::int64_t columns = sizes.columns;
  const Ids all(ids, sizes.batch * sizes.positions);
  const Operand<const F> es(e, sizes.batch * sizes.positions * columns);
  const Operand<const F> as(a, sizes.batch * rows * columns);
  const Operand<const F> gs(g, sizes.batch * rows * vocabulary);
  Operand<double> out(products, sizes.batch);
  const double slack = gamma(2 * (sizes.positions * rows + rows + columns) + 64);
  for (std::int64_t b = 0; b < sizes.batch; ++b) {
    Counted<double> sum, absolute;
    const Row<double> inputs = loaded<double>(as, b * rows * columns, rows * columns);
    Row<double> norms;
    for (std::int64_t t = 0; t < rows; ++t) {
      norms.push_back(sqrt(square_of(inputs.data() + t * columns, columns)));
    }
    for (const auto& [id, s] : kept_of(all, sizes, b)) {
      const Row<double> embedded = loaded<double>(es, s * columns, columns);
      const Counted<double> norm = sqrt(square_of(embedded.data(), columns));
      for (std::int64_t t = 0; t < rows; ++t) {
        const Counted<double> weight(gs[(b * rows + t) * vocabulary + id]);
        sum += weight * dot(inputs.data() + t * columns, embedded.data(), columns);
        absolute += fabs(weight) * norms[static_cast<std::size_t>(t)] * norm;
      }
    }
    out.store(b, sum + slack * absolute);
  }
}

#define DPK_COUNTED(F)                                                                         \
  template void embedding_norm(const std::int64_t*, const F*, const EmbeddingSizes&, double*); \
  template void embedding_sum(const std::int64_t*, const F*, const EmbeddingSizes&, const F*,  \
                              std::int64_t, F*);                                               \
  template void tied_cross(const std::int64_t*, const F*, const F*, const F*,                  \
                           const EmbeddingSizes&, std::int64_t, std::int64_t, double*);
DPK_COUNTED(float)
DPK_COUNTED(double)
#undef DPK_COUNTED

}  // namespace dpkern::counted
