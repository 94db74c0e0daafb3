#pragma once
// Counted executions of the ghost ops of layers and of the matrix product: plain loops with their
// operands' elements counted, results as the kernels', and what it took.

#include <cstdint>

#include "core/counted.h"

namespace dpkern::counted {

struct LinearSizes {
  std::int64_t batch, positions, inputs, outputs;
};

enum class Route : int { kRankOne, kGram, kDirect };

// squares [batch] from a [batch, positions, inputs] and g [batch, positions, outputs].
template <class F>
void linear_norm(const F* a, const F* g, const LinearSizes& sizes, Route route, double* squares);
// grads [batch, outputs, inputs].
template <class F>
void linear_gradient(const F* a, const F* g, const LinearSizes& sizes, F* grads, double* squares);
// out [outputs, inputs] += factors [batch] times the gradients.
template <class F>
void linear_sum(const F* a, const F* g, const LinearSizes& sizes, const F* factors, F* out);

// Three spatial dimensions, those missing in front with size 1.
struct ConvSizes {
  std::int64_t batch, in_channels, out_channels, groups;
  std::int64_t input[3], output[3], kernel[3], stride[3], padding[3], dilation[3];
};

template <class F>
void conv_norm(const ConvSizes& sizes, const F* x, const F* g, double* squares);
// Stride, dilation and groups 1, at most two dimensions.
template <class F>
void conv_gram_norm(const ConvSizes& sizes, const F* x, const F* g, double* squares);
// grads [batch, co, ci / groups, taps].
template <class F>
void conv_gradient(const ConvSizes& sizes, const F* x, const F* g, F* grads, double* squares);
template <class F>
void conv_sum(const ConvSizes& sizes, const F* x, const F* g, const F* factors, F* out);

// Equal ids are brought together without a count: which rows meet is a matter of addresses.
struct EmbeddingSizes {
  std::int64_t batch, positions, columns;
  bool has_padding;
  std::int64_t padding;
};

template <class F>
void embedding_norm(const std::int64_t* ids, const F* g, const EmbeddingSizes& sizes,
                    double* squares);
// out [table, columns].
template <class F>
void embedding_sum(const std::int64_t* ids, const F* g, const EmbeddingSizes& sizes,
                   const F* factors, std::int64_t table, F* out);
// a [batch, rows, columns], g [batch, rows, vocabulary].
template <class F>
void tied_cross(const std::int64_t* ids, const F* e, const F* a, const F* g,
                const EmbeddingSizes& sizes, std::int64_t rows, std::int64_t vocabulary,
                double* products);

// Without `centred`, the root mean square, neither mean nor dbias is touched; weight may be null.
template <class F>
struct LayerNormOperands {
  bool centred;
  const F *g, *x, *mean, *rstd, *weight;
  F *dx, *dweight, *dbias;
  std::int64_t batch, rows, columns;
};
template <class F>
void layer_norm_backward(const LayerNormOperands<F>& norm);

// [batch, groups, channels, places]; weight may be null.
template <class F>
struct GroupNormOperands {
  const F *g, *x, *mean, *rstd, *weight;
  F *dx, *dweight, *dbias;
  std::int64_t batch, groups, channels, places;
};
template <class F>
void group_norm_backward(const GroupNormOperands<F>& norm);

// out [rows, columns] = x [rows, inner] w + bias; bias may be null. `transposed`: w is stored as
// [columns, inner].
template <class F>
void matmul(const F* x, const F* w, const F* bias, std::int64_t rows, std::int64_t inner,
            std::int64_t columns, bool transposed, F* out);

}  // namespace dpkern::counted
