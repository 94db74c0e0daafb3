#pragma once
// The inner loops of clipping over one row of a sample's gradient. Sums run in fixed lanes, so the
// result does not depend on the instruction set.

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cpu/isa.h"

namespace dpkern::cpu {

struct Bfloat16 {
  std::uint16_t bits;
};

template <class G>
struct RowOf {
  using Value = G;
};
template <>
struct RowOf<Bfloat16> {
  using Value = float;
};

DPK_INLINE inline float value_of(float x) { return x; }
DPK_INLINE inline double value_of(double x) { return x; }
DPK_INLINE inline float value_of(Bfloat16 x) {
  const std::uint32_t bits = static_cast<std::uint32_t>(x.bits) << 16;
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

constexpr int kSumLanes = 8;
using Doubles = Vector<double, kSumLanes>;

DPK_INLINE inline void load_lanes(const float* x, Doubles& out) {
  Vector<float, kSumLanes> narrow;
  __builtin_memcpy(&narrow, x, sizeof(narrow));
  out = __builtin_convertvector(narrow, Doubles);
}
DPK_INLINE inline void load_lanes(const double* x, Doubles& out) {
  __builtin_memcpy(&out, x, sizeof(out));
}
DPK_INLINE inline void load_lanes(const Bfloat16* x, Doubles& out) {
  Vector<std::uint16_t, kSumLanes> bits;
  __builtin_memcpy(&bits, x, sizeof(bits));
  const auto wide = __builtin_convertvector(bits, Vector<std::uint32_t, kSumLanes>) << 16;
  Vector<float, kSumLanes> narrow;
  __builtin_memcpy(&narrow, &wide, sizeof(narrow));
  out = __builtin_convertvector(narrow, Doubles);
}

// sum |x|^p in float64 (p = 1 or 2).
template <class G>
double power_sum(const G* row, std::int64_t count, int p) {
  double total = 0;
  versioned([&]() DPK_INLINE {
    constexpr int kUnroll = 4;
    Doubles sums[kUnroll] = {};
    std::int64_t i = 0;
    if (p == 2) {
      for (; i + kUnroll * kSumLanes <= count; i += kUnroll * kSumLanes) {
        for (int k = 0; k < kUnroll; ++k) {
          Doubles x;
          load_lanes(row + i + k * kSumLanes, x);
          sums[k] += x * x;
        }
      }
    } else {
      for (; i + kUnroll * kSumLanes <= count; i += kUnroll * kSumLanes) {
        for (int k = 0; k < kUnroll; ++k) {
          Doubles x;
          load_lanes(row + i + k * kSumLanes, x);
          sums[k] += x < 0 ? -x : x;
        }
      }
    }
    for (int k = 1; k < kUnroll; ++k) sums[0] += sums[k];
    for (int l = 0; l < kSumLanes; ++l) total += sums[0][l];
    for (; i < count; ++i) {
      const double x = static_cast<double>(value_of(row[i]));
      total += p == 2 ? x * x : std::fabs(x);
    }
  });
  return total;
}

template <int kRows, class G, class Value, class Sum>
void add_some_rows(const G* const* rows, const Value* weights, std::int64_t count, Sum* sum) {
  versioned([&]() DPK_INLINE {
    const G* row[kRows];
    Value weight[kRows];
    for (int r = 0; r < kRows; ++r) row[r] = rows[r], weight[r] = weights[r];
    Sum* const out = sum;
    const std::int64_t n = count;
    for (std::int64_t i = 0; i < n; ++i) {
      Sum total = out[i];
      for (int r = 0; r < kRows; ++r) total += static_cast<Sum>(weight[r] * value_of(row[r][i]));
      out[i] = total;
    }
  });
}

// sum += weights[r] rows[r], row after row: the order of additions is that of the samples. Sums of
// integers take each product's integer part.
template <class G, class Value, class Sum>
void add_rows(const G* const* rows, const Value* weights, int used, std::int64_t count, Sum* sum) {
  switch (used) {
    case 4:
      return add_some_rows<4>(rows, weights, count, sum);
    case 3:
      return add_some_rows<3>(rows, weights, count, sum);
    case 2:
      return add_some_rows<2>(rows, weights, count, sum);
    case 1:
      return add_some_rows<1>(rows, weights, count, sum);
    default:
      return;
  }
}

// sum += other.
template <class S>
void add_to(const S* other, std::int64_t count, S* sum) {
  versioned([&]() DPK_INLINE {
    S* const out = sum;
    const S* const in = other;
    const std::int64_t n = count;
    for (std::int64_t i = 0; i < n; ++i) out[i] += in[i];
  });
}

// sum += sign * trunc(weight row); returns sum |trunc(weight row)|^p exactly.
template <class G, class Value, class Sum>
std::int64_t add_integer_row(const G* row, Value weight, int sign, int p, std::int64_t count,
                             Sum* sum) {
  std::int64_t total = 0;
  versioned([&]() DPK_INLINE {
    Sum* const out = sum;
    const G* const in = row;
    const Value scale = weight;
    const Sum direction = static_cast<Sum>(sign);
    const std::int64_t n = count;
    std::int64_t power = 0;
    if (p == 2) {
      for (std::int64_t i = 0; i < n; ++i) {
        const std::int32_t q = static_cast<std::int32_t>(scale * value_of(in[i]));
        out[i] += direction * q;
        power += static_cast<std::int64_t>(q) * q;
      }
    } else {
      for (std::int64_t i = 0; i < n; ++i) {
        const std::int32_t q = static_cast<std::int32_t>(scale * value_of(in[i]));
        out[i] += direction * q;
        power += q < 0 ? -q : q;
      }
    }
    total = power;
  });
  return total;
}

}  // namespace dpkern::cpu
