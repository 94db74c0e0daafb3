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
#include "cpu/parallel.h"

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

// Makes the integers nearest to scale x, entries below 2^15; the sum of their squares.
template <class F>
DPK_INLINE inline std::int64_t round_row(const F* x, std::int64_t count, F scale,
                                         std::int16_t* to) {
  for (std::int64_t i = 0; i < count; ++i) {
    const F whole = (scale * x[i] + kOrigin<F>)-kOrigin<F>;
    to[i] = static_cast<std::int16_t>(static_cast<std::int32_t>(whole));
  }
  std::int32_t total = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    total += static_cast<std::int32_t>(to[i]) * static_cast<std::int32_t>(to[i]);
  }
  return total;
}

// The inputs or the output gradients of all samples, and the integers of some of them.
template <class F>
struct Side {
  const F* x;
  std::int64_t count;  // entries of a row
  std::int16_t* to;
  std::int64_t stride;  // from the integers of a row to those of the next
};

// What the integers of a sample's longer vector may come to.
struct Room {
  double left;            // of the product's norm, by that of the shorter vector's integers
  std::int64_t integers;  // the square of this norm
  std::int64_t most;      // the square of the product's
};

// Makes integers near to x that leave nothing of the room, with the sign of `factor`; false if they
// are 0. Rounding rarely adds more than a half; where it does, there has to be less to round.
template <class F>
DPK_INLINE inline bool fill(Room room, const F* x, std::int64_t count, double norm, double factor,
                            std::int16_t* to) {
  for (double less = 0.5;; less *= 2) {
    room.left -= less;
    const auto scale = static_cast<F>(std::copysign(room.left / norm, factor));
    if (!(room.left > 0 && std::isfinite(scale))) return false;
    const std::int64_t integers = round_row(x, count, scale, to);
    if (room.integers * integers <= room.most) return integers != 0;
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
  static constexpr int kTogether = 16;  // samples whose roots are drawn together

  // The two vectors of at most kTogether samples, whose product's norm is at most factor |a| |g|;
  // both are zero if a sample counts for nothing. The vector of more entries is rounded last: its
  // norm comes nearer to what is wanted.
  DPK_INLINE void round(Range samples, std::int16_t* inputs, std::int64_t wide,
                        std::int16_t* outputs, std::int64_t tall) const {
    const Side<F> x{a, shape.inputs, inputs, wide}, y{g, shape.outputs, outputs, tall};
    const bool wider = x.count >= y.count;
    round(at + samples.begin, samples.end - samples.begin, wider ? y : x, wider ? x : y);
  }

 private:
  using Numbers = double[kTogether];

  DPK_INLINE void round(const std::int64_t* numbers, std::int64_t n, const Side<F>& few,
                        const Side<F>& many) const {
    Numbers factor = {}, few_square = {}, many_square = {};
    for (std::int64_t i = 0; i < n; ++i) {
      factor[i] = static_cast<double>(factors[numbers[i]]);
      few_square[i] = square_of(few.x + numbers[i] * few.count, few.count);
      many_square[i] = square_of(many.x + numbers[i] * many.count, many.count);
    }
    const double ratio = static_cast<double>(few.count) / static_cast<double>(many.count);
    const double skew = std::max(std::sqrt(std::sqrt(ratio)), kSkew);
    Numbers square, norm, few_scale, many_norm;
    for (int i = 0; i < kTogether; ++i) {
      const double product = factor[i] * factor[i] * few_square[i] * many_square[i];
      square[i] = std::min(product, kMost * kMost);
      norm[i] = std::sqrt(square[i]);
      few_scale[i] = std::sqrt(norm[i]) * skew / std::sqrt(few_square[i]);
      many_norm[i] = std::sqrt(many_square[i]);
    }
    Numbers integers = {};
    for (std::int64_t i = 0; i < n; ++i) {
      // Also false for NaN; an infinite square may be that of a sample that is not finite.
      const bool counts =
          square[i] > 0 && few_square[i] * many_square[i] <= std::numeric_limits<double>::max();
      const auto scale = static_cast<F>(few_scale[i]);
      if (!counts || !std::isfinite(scale)) continue;
      integers[i] = static_cast<double>(
          round_row(few.x + numbers[i] * few.count, few.count, scale, few.to + i * few.stride));
    }
    Numbers left;
    for (int i = 0; i < kTogether; ++i) {
      left[i] = std::min(norm[i] / std::sqrt(integers[i]), kLongest);
    }
    for (std::int64_t i = 0; i < n; ++i) {
      std::int16_t *const few_to = few.to + i * few.stride, *const many_to =
                                                                many.to + i * many.stride;
      if (integers[i] > 0) {
        const Room room{left[i], static_cast<std::int64_t>(integers[i]),
                        static_cast<std::int64_t>(square[i])};
        const F* const x = many.x + numbers[i] * many.count;
        if (fill(room, x, many.count, many_norm[i], factor[i], many_to)) continue;
      }
      std::fill_n(few_to, few.count, std::int16_t{0});
      std::fill_n(many_to, many.count, std::int16_t{0});
    }
  }
};

}  // namespace dpkern::cpu::exact
