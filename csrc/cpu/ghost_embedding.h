#pragma once
// Per-sample gradients of embedding tables: row v is the sum of g[b, t, :] over t with
// ids[b, t] = v. F is float or double; positions with id `padding` (-1: none) are ignored.

#include <cstdint>

namespace dpkern::cpu {

struct EmbeddingShape {
  std::int64_t batch;
  std::int64_t positions;  // T
  std::int64_t columns;    // D
  std::int64_t padding;
};

// squares[b] >= the squared norm, and tight (docs/ghost.md); not finite for a sample that is not.
template <class F>
void embedding_norm(const std::int64_t* ids, const F* g, const EmbeddingShape& shape,
                    double* squares, int threads);

// out[ids[b, t], :] += factors[b] g[b, t, :]; a factor of 0 drops the sample. Ids must be inside.
template <class F>
void embedding_sum(const std::int64_t* ids, const F* g, const F* factors,
                   const EmbeddingShape& shape, F* out, int threads);

// products[b] >= sum_{s,t} g[b, t, ids[b, s]] <a[b, t], e[b, s]>, and tight, for e
// [batch, positions, columns], a [batch, rows, columns], g [batch, rows, vocabulary].
template <class F>
void tied_cross(const std::int64_t* ids, const F* e, const F* a, const F* g,
                const EmbeddingShape& shape, std::int64_t rows, std::int64_t vocabulary,
                double* products, int threads);

}  // namespace dpkern::cpu
