#pragma once
// Per-sample weight gradients of 2-D convolutions (1-D ones have height 1): kept, or squared and
// dropped.

#include <cstdint>

namespace dpkern::cpu {

struct ConvSize {
  std::int64_t height;
  std::int64_t width;
};

struct ConvPlan {
  std::int64_t batch;
  std::int64_t in_channels;
  std::int64_t out_channels;
  std::int64_t groups;
  ConvSize input;
  ConvSize output;
  ConvSize kernel;
  ConvSize stride;
  ConvSize padding;
  ConvSize dilation;
};

// Which channels lie innermost in memory.
enum class ConvLayout : int {
  kInputsLast = 0,   // [co, kh, kw, ci / groups]
  kOutputsLast = 1,  // [ci, kh, kw, co]
  kPlain = 2         // [co, ci / groups, kh, kw]
};

// In which order of the dimensions conv_gradient writes a sample.
ConvLayout conv_layout(const ConvPlan& plan, bool wide);

// gradients [batch][layout]; squares [batch]: of these numbers, from above. T is float or double.
template <class T>
void conv_gradient(const ConvPlan& plan, const T* x, const T* g, T* gradients, double* squares,
                   int threads);

// squares [batch]: of the exact gradients, from above. The direct way: tile by tile.
template <class T>
void conv_norm(const ConvPlan& plan, const T* x, const T* g, double* squares, int threads);

// The same from Gram matrices over positions; stride, dilation and groups must be 1.
template <class T>
void conv_gram_norm(const ConvPlan& plan, const T* x, const T* g, double* squares, int threads);

// total [co, ci / groups, kh, kw] += factors [batch] times the gradients; samples of factor 0 are
// not read.
template <class T>
void conv_sum(const ConvPlan& plan, const T* x, const T* g, const T* factors, T* total,
              int threads);

}  // namespace dpkern::cpu
