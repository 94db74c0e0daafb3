#pragma once
// The two vectors of integers of a sample, whose product's norm is known exactly: docs/exact.md,
// lemma 2. Not for files that fuse products with sums: every instruction set makes the same ones.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "cpu/ghost_linear.h"
#include "cpu/isa.h"
#include "cpu/panels.h"

namespace dpkern::cpu::exact {

using ghost::square_of;

// The norm of a sample's integers is below 2^22, so that those of a block's 256 samples add up to
// less than 2^31.
constexpr double kMost = 0x1p22;
// What a factor's norm aims at is at most 2^14: entries fit into 16 bits. Rounding doubles an entry
// at most, so that its square fits into 31 bits.
constexpr double kLongest = 0x1p14;
constexpr double kSkew = 0x1p-3;  // of the shorter vector's norm and the root of the product's

// Numbers within 2^22 of it have no bits behind the point.
template <class F>
constexpr F kOrigin = std::is_same_v<F, float> ? F(0x1.8p23) : F(0x1.8p52);

// One of the two vectors of a sample, and its integers.
template <class F>
struct Row {
  const F* x;
  std::int64_t count;
  std::int16_t* to;

  double square() const {
    double sum = 0;
    versioned([&]() DPK_INLINE { sum = square_of(x, count); });
    return sum;
  }
  // Makes the integers nearest to scale x, entries below 2^15; the sum of their squares.
  std::int64_t round(F scale) const {
    std::int32_t sum = 0;
    versioned([&]() DPK_INLINE {
      const F* const from = x;
      std::int16_t* const rounded = to;
      const std::int64_t n = count;
      const F s = scale;
      for (std::int64_t i = 0; i < n; ++i) {
        const F whole = (s * from[i] + kOrigin<F>)-kOrigin<F>;
        rounded[i] = static_cast<std::int16_t>(static_cast<std::int32_t>(whole));
      }
      std::int32_t total = 0;
      for (std::int64_t i = 0; i < n; ++i) {
        total += static_cast<std::int32_t>(rounded[i]) * static_cast<std::int32_t>(rounded[i]);
      }
      sum = total;
    });
    return sum;
  }
};

// Makes integers whose product's norm is at most factor |few| |many|; false if it is 0. The vector
// of more entries is rounded last: its norm comes nearer to what is wanted.
template <class F>
bool round_sample(const Row<F>& few, const Row<F>& many, F factor) {
  const double f = static_cast<double>(factor);
  const double few_square = few.square(), many_square = many.square();
  const double square = std::min(f * f * few_square * many_square, kMost * kMost);
  // Also false for NaN; an infinite square may be that of a sample that is not finite.
  if (!(square > 0 && few_square * many_square <= std::numeric_limits<double>::max())) return false;
  const double room = std::sqrt(square);
  const double ratio = static_cast<double>(few.count) / static_cast<double>(many.count);
  const double skew = std::max(std::sqrt(std::sqrt(ratio)), kSkew);
  const auto s = static_cast<F>(std::sqrt(room) * skew / std::sqrt(few_square));
  if (!std::isfinite(s)) return false;
  const std::int64_t few_integers = few.round(s);
  if (few_integers == 0) return false;
  const auto most = static_cast<std::int64_t>(square);
  double left = std::min(room / std::sqrt(static_cast<double>(few_integers)), kLongest);
  // Rounding rarely adds more than a half; where it does, there has to be less to round.
  for (double less = 0.5;; less *= 2) {
    left -= less;
    const auto t = static_cast<F>(std::copysign(left / std::sqrt(many_square), f));
    if (!(left > 0 && std::isfinite(t))) return false;
    const std::int64_t many_integers = many.round(t);
    if (few_integers * many_integers <= most) return many_integers != 0;
  }
}

// Some samples of a call, whose integers fit into 32 bits together.
template <class F>
struct Samples {
  const F *a, *g, *factors;
  const std::int64_t* at;  // their numbers in the batch
  std::int64_t count;
  LinearShape shape;

  static constexpr std::int64_t kMostSamples = 256;

  // The two vectors of sample i, both zero from the first entry on if it counts for nothing.
  void round(std::int64_t i, std::int16_t* inputs, std::int16_t* outputs) const {
    const std::int64_t b = at[i];
    const Row<F> x{a + b * shape.inputs, shape.inputs, inputs};
    const Row<F> y{g + b * shape.outputs, shape.outputs, outputs};
    const bool wider = x.count >= y.count;
    if (!round_sample(wider ? y : x, wider ? x : y, factors[b])) {
      std::fill_n(inputs, shape.inputs, std::int16_t{0});
      std::fill_n(outputs, shape.outputs, std::int16_t{0});
    }
  }
};

}  // namespace dpkern::cpu::exact
