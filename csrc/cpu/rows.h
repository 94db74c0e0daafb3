#pragma once
// The inner loops of clipping over one row of a sample's gradient. Sums run in fixed lanes, so the
// result does not depend on the instruction set.

#include <cmath>
#include <cstdint>
#include <type_traits>
#include <utility>

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

// A vector's halves in a wider type: in one piece, compilers widen by quarters.
template <class Narrow, class Wide>
DPK_INLINE inline void widen(const Narrow& x, Wide* halves) {
  using Entry = std::decay_t<decltype(std::declval<Wide>()[0])>;
  constexpr int kCount = 2 * static_cast<int>(sizeof(Wide) / sizeof(Entry));
  const auto wide = __builtin_convertvector(x, Vector<Entry, kCount>);
  __builtin_memcpy(halves, &wide, sizeof(wide));
}

// Two or four vectors of kLanes neighbours each.
template <int kLanes>
DPK_INLINE inline void load_two(const double* x, Vector<double, kLanes>* out) {
  __builtin_memcpy(out, x, 2 * sizeof(*out));
}
template <int kLanes>
DPK_INLINE inline void load_two(const float* x, Vector<double, kLanes>* out) {
  Vector<float, 2 * kLanes> narrow;
  __builtin_memcpy(&narrow, x, sizeof(narrow));
  widen(narrow, out);
}
template <int kLanes, class G>
DPK_INLINE inline void load_four(const G* x, Vector<double, kLanes>* out) {
  if constexpr (std::is_same_v<G, Bfloat16>) {
    Vector<std::uint16_t, 4 * kLanes> bits;
    __builtin_memcpy(&bits, x, sizeof(bits));
    Vector<std::uint32_t, 2 * kLanes> wide[2];
    widen(bits, wide);
    for (int half = 0; half < 2; ++half) {
      widen(reinterpret_cast<Vector<float, 2 * kLanes>>(wide[half] << 16), out + 2 * half);
    }
  } else {
    load_two<kLanes>(x, out);
    load_two<kLanes>(x + 2 * kLanes, out + 2);
  }
}

// `total` and kSums sums, in vectors of any width: to eight of them first, then one by one.
template <int kSums, class D>
DPK_INLINE inline double total_of(D* sums, double total = 0) {
  constexpr int kLanes = static_cast<int>(sizeof(D) / sizeof(double)), kStep = 8 / kLanes;
  for (int k = kStep; k < kSums / kLanes; ++k) sums[k % kStep] += sums[k];
  for (int l = 0; l < 8; ++l) total += sums[l / kLanes][l % kLanes];
  return total;
}

// sum |x|^p in float64 (p = 1 or 2), in 32 sums whatever the width of a vector.
template <class G>
double power_sum(const G* row, std::int64_t count, int p) {
  double total = 0;
  versioned_by_width([&](auto width) DPK_INLINE {
    constexpr int kSums = 32;
    constexpr int kLanes = decltype(width)::value / static_cast<int>(sizeof(double));
    using D = Vector<double, kLanes>;
    D sums[kSums / kLanes] = {};
    std::int64_t i = 0;
    const auto add = [&](auto power) DPK_INLINE {
      for (; i + kSums <= count; i += kSums) {
#pragma GCC unroll 4
        for (int k = 0; k < kSums / kLanes; k += 4) {
          D x[4];
          load_four<kLanes>(row + i + k * kLanes, x);
#pragma GCC unroll 4
          for (int j = 0; j < 4; ++j) sums[k + j] += power(x[j]);
        }
      }
    };
    if (p == 2) {
      add([](const D& x) DPK_INLINE { return x * x; });
    } else {
      add([](const D& x) DPK_INLINE { return x < 0 ? -x : x; });
    }
    total = total_of<kSums>(sums);
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
