#pragma once
// Transforms of circulant blocks, for as many samples or blocks at once as a vector has lanes.
//
// A block of d entries is folded about its first one, so that cosines meet sums and sines meet
// differences. Where 4 divides d it is folded once more, about entry d / 4: with a' = d / 2 - a,
//   cos(2 pi k a' / d) = (-1)^k cos(2 pi k a / d)    sin(2 pi k a' / d) = -(-1)^k sin(2 pi k a / d)
// so that even and odd frequencies each meet half of the entries, in tables of a quarter of the
// block's length. The way back is the same with entries and frequencies changed over.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <mutex>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "cpu/ghost_tiles.h"

namespace dpkern::cpu::circulant {

using ghost::load;

// Tables of a block of d entries with K frequencies.
template <class F>
struct Lines {
  std::int64_t d, K;
  bool twice;         // whether it is folded about d / 4 too
  std::int64_t half;  // the last entry that is left, d / 2 (rounded down) or d / 4
  // Of even and odd frequencies (of all where it is folded once, as the even ones), [rows, columns]
  // each; for the way back of even and odd entries.
  struct Table {
    std::int64_t rows, columns;
    std::vector<F> entries;
  };
  Table cosines[2], sines[2], back_cosines[2], back_sines[2];

  explicit Lines(std::int64_t block)
      : d(block), K(block / 2 + 1), twice(block % 4 == 0), half(twice ? block / 4 : block / 2) {
    std::vector<double> turns(static_cast<std::size_t>(2 * d));
    for (std::int64_t m = 0; m < d; ++m) {
      const double angle =
          2 * 3.14159265358979323846 * static_cast<double>(m) / static_cast<double>(d);
      turns[static_cast<std::size_t>(2 * m)] = 4 * m == d || 4 * m == 3 * d ? 0 : std::cos(angle);
      turns[static_cast<std::size_t>(2 * m + 1)] = 2 * m == d ? 0 : std::sin(angle);
    }
    const auto weight = [&](std::int64_t k) {
      return (k == 0 || 2 * k == d ? 1.0 : 2.0) / static_cast<double>(d);
    };
    // Rows are all frequencies (or entries), or every other one from `first` on; columns go from
    // one entry to another one, up or down.
    const auto table = [&](std::int64_t first, std::int64_t from, std::int64_t to, int part,
                           bool back) {
      const std::int64_t columns = std::abs(to - from) + 1, up = to >= from ? 1 : -1;
      Table made{0, columns, {}};
      for (std::int64_t row = first; row < K; row += twice ? 2 : 1, ++made.rows) {
        for (std::int64_t i = 0; i < columns; ++i) {
          const std::int64_t column = from + up * i;
          const double turn = turns[static_cast<std::size_t>(2 * (row * column % d) + part)];
          made.entries.push_back(static_cast<F>((back ? weight(column) : 1.0) * turn));
        }
      }
      return made;
    };
    for (const bool back : {false, true}) {
      Table *const of_sums = back ? back_cosines : cosines, *const of_odd =
                                                                back ? back_sines : sines;
      of_sums[0] = table(0, 0, half, 0, back);
      if (twice) {  // differences stand behind the sums, the last pair's first
        of_sums[1] = table(1, half - 1, 0, 0, back);
        of_odd[0] = half > 1 ? table(0, half - 1, 1, 1, back) : Table{(K + 1) / 2, 0, {}};
        of_odd[1] = table(1, 1, half, 1, back);
      } else {
        of_odd[0] = d > 2 ? table(0, 1, (d - 1) / 2, 1, back) : Table{K, 0, {}};
      }
    }
  }
  bool real(std::int64_t k) const { return k == 0 || 2 * k == d; }
};

// The lines of a block's size, made once.
template <class F>
const Lines<F>& lines_of(std::int64_t block) {
  static std::mutex mutex;
  static std::unordered_map<std::int64_t, std::unique_ptr<const Lines<F>>> made;
  const std::lock_guard<std::mutex> lock(mutex);
  auto& found = made[block];
  if (found == nullptr) found = std::make_unique<const Lines<F>>(block);
  return *found;
}

template <class F, int kBytes>
struct Blocks {
  static constexpr int kLanes = kBytes / static_cast<int>(sizeof(F));
  static constexpr int kVectors = kBytes == 64 ? 2 : 1;
  static constexpr int kWide = kVectors * kLanes;  // samples or blocks that go together
  static constexpr int kTile = 4;                  // rows of an output tile
  using V = Vector<F, kLanes>;
  using Four = Vector<F, 4>;

  // to [width, kWide] = the transpose of kWide rows `step` apart, of which `count` are there.
  static DPK_INLINE void turn_in(const F* from, std::int64_t step, std::int64_t count,
                                 std::int64_t width, F* to) {
    if (count < kWide) std::fill(to, to + width * kWide, F{0});
    if (width == 2 && step == 2 && count == kWide) return turn_pairs(from, to);
    std::int64_t row = 0;
    for (; row + 4 <= count; row += 4) {
      std::int64_t a = 0;
      for (; a + 4 <= width; a += 4) {
        const F* const at = from + row * step + a;
        Four rows[4] = {load<Four>(at), load<Four>(at + step), load<Four>(at + 2 * step),
                        load<Four>(at + 3 * step)};
        transpose(rows);
        for (int i = 0; i < 4; ++i)
          __builtin_memcpy(to + (a + i) * kWide + row, &rows[i], sizeof(Four));
      }
      for (; a < width; ++a) {
        for (int i = 0; i < 4; ++i) to[a * kWide + row + i] = from[(row + i) * step + a];
      }
    }
    for (; row < count; ++row) {
      for (std::int64_t a = 0; a < width; ++a) to[a * kWide + row] = from[row * step + a];
    }
  }
  // Pairs that stand one behind the other.
  static DPK_INLINE void turn_pairs(const F* from, F* to) {
    using Mask = Vector<std::conditional_t<sizeof(F) == 4, std::int32_t, std::int64_t>, kLanes>;
    Mask first, second;
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) first[i] = 2 * i, second[i] = 2 * i + 1;
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      const V left = load<V>(from + 2 * v * kLanes), right = load<V>(from + (2 * v + 1) * kLanes);
      reinterpret_cast<V*>(to)[v] = __builtin_shuffle(left, right, first);
      reinterpret_cast<V*>(to + kWide)[v] = __builtin_shuffle(left, right, second);
    }
  }
  template <bool kAdd>
  static DPK_INLINE void turn_pairs_back(const F* from, F* to) {
    using Mask = Vector<std::conditional_t<sizeof(F) == 4, std::int32_t, std::int64_t>, kLanes>;
    Mask low, high;
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      low[i] = i / 2 + i % 2 * kLanes;
      high[i] = low[i] + kLanes / 2;
    }
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      const V first = reinterpret_cast<const V*>(from)[v];
      const V second = reinterpret_cast<const V*>(from + kWide)[v];
      V pairs[2] = {__builtin_shuffle(first, second, low), __builtin_shuffle(first, second, high)};
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        F* const at = to + (2 * v + i) * kLanes;
        if (kAdd) pairs[i] += load<V>(at);
        __builtin_memcpy(at, &pairs[i], sizeof(V));
      }
    }
  }
  // The way back, added to what is there or in its place.
  template <bool kAdd>
  static DPK_INLINE void turn_out(const F* from, std::int64_t count, std::int64_t width, F* to,
                                  std::int64_t step) {
    if (width == 2 && step == 2 && count == kWide) return turn_pairs_back<kAdd>(from, to);
    for (std::int64_t row = 0; row < count; row += 4) {
      const int used = static_cast<int>(std::min<std::int64_t>(4, count - row));
      std::int64_t a = 0;
      for (; a + 4 <= width; a += 4) {
        Four rows[4];
        for (int i = 0; i < 4; ++i) rows[i] = load<Four>(from + (a + i) * kWide + row);
        transpose(rows);
        for (int i = 0; i < used; ++i) {
          F* const at = to + (row + i) * step + a;
          if (kAdd) rows[i] += load<Four>(at);
          __builtin_memcpy(at, &rows[i], sizeof(Four));
        }
      }
      for (; a < width; ++a) {
        for (int i = 0; i < used; ++i) {
          F& at = to[(row + i) * step + a];
          at = (kAdd ? at : F{0}) + from[a * kWide + row + i];
        }
      }
    }
  }
  static DPK_INLINE void transpose(Four* rows) {
    using Mask = Vector<std::conditional_t<sizeof(F) == 4, std::int32_t, std::int64_t>, 4>;
    const Four a = __builtin_shuffle(rows[0], rows[1], Mask{0, 4, 1, 5});
    const Four b = __builtin_shuffle(rows[0], rows[1], Mask{2, 6, 3, 7});
    const Four c = __builtin_shuffle(rows[2], rows[3], Mask{0, 4, 1, 5});
    const Four d = __builtin_shuffle(rows[2], rows[3], Mask{2, 6, 3, 7});
    rows[0] = __builtin_shuffle(a, c, Mask{0, 1, 4, 5});
    rows[1] = __builtin_shuffle(a, c, Mask{2, 3, 6, 7});
    rows[2] = __builtin_shuffle(b, d, Mask{0, 1, 4, 5});
    rows[3] = __builtin_shuffle(b, d, Mask{2, 3, 6, 7});
  }

  // to[r] = sum_c table[r, c] from[c], of so many lanes; rows `from_step` and `to_step` apart.
  static DPK_INLINE void combine(const F* table, std::int64_t rows, std::int64_t columns,
                                 const F* from, std::int64_t from_step, F* to,
                                 std::int64_t to_step) {
    std::int64_t r = 0;
    for (; r + kTile <= rows; r += kTile) {
      combine_rows<kTile>(table + r * columns, columns, from, from_step, to + r * to_step, to_step);
    }
    for (; r < rows; ++r) {
      combine_rows<1>(table + r * columns, columns, from, from_step, to + r * to_step, to_step);
    }
  }
  template <int kRows>
  static DPK_INLINE void combine_rows(const F* table, std::int64_t columns, const F* from,
                                      std::int64_t from_step, F* to, std::int64_t to_step) {
    V sums[kRows][kVectors] = {};
    for (std::int64_t c = 0; c < columns; ++c) {
      const V* const at = reinterpret_cast<const V*>(from + c * from_step);
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i) {
        const F factor = table[i * columns + c];
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) sums[i][v] += factor * at[v];
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) reinterpret_cast<V*>(to + i * to_step)[v] = sums[i][v];
    }
  }

  // What folding needs, and the way back.
  static std::int64_t room(const Lines<F>& lines) { return 4 * lines.K * kWide; }

  // to0 and to1 = `scale` times the sum and the difference of two entries.
  static DPK_INLINE void butterfly(const F* from0, const F* from1, F scale, F* to0, F* to1) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      const V first = reinterpret_cast<const V*>(from0)[v];
      const V second = reinterpret_cast<const V*>(from1)[v];
      reinterpret_cast<V*>(to0)[v] = scale * (first + second);
      reinterpret_cast<V*>(to1)[v] = scale * (first - second);
    }
  }
  // Spectra of blocks [d, kWide]: cosine and sine sums of frequency k at `to + k * step`. Real
  // frequencies may have no sine sums.
  static DPK_INLINE void transform(const Lines<F>& lines, const F* from, F* room, F* to,
                                   std::int64_t step) {
    const std::int64_t d = lines.d, K = lines.K;
    if (d == 2) return butterfly(from, from + kWide, F{1}, to, to + step);
    const V* const at = reinterpret_cast<const V*>(from);
    V* const even = reinterpret_cast<V*>(room);
    V* const odd = even + K * kVectors;
    for (int v = 0; v < kVectors; ++v) even[v] = at[v];
    for (std::int64_t a = 1; a < K; ++a) {
      for (int v = 0; v < kVectors; ++v) {
        const V first = at[a * kVectors + v], last = at[(d - a) * kVectors + v];
        even[a * kVectors + v] = 2 * a == d ? first : first + last;
        odd[a * kVectors + v] = first - last;
      }
    }
    meet(lines, lines.cosines, lines.sines, even, odd, to, to + kWide, step);
  }
  // Blocks [d, kWide] of spectra.
  static DPK_INLINE void transform_back(const Lines<F>& lines, const F* from, std::int64_t step,
                                        F* room, F* to) {
    const std::int64_t d = lines.d, K = lines.K;
    if (d == 2) return butterfly(from, from + step, F{0.5}, to, to + kWide);
    V* const even = reinterpret_cast<V*>(room);
    V* const odd = even + K * kVectors;
    for (std::int64_t k = 0; k < K; ++k) {
      const V* const at = reinterpret_cast<const V*>(from + k * step);
      for (int v = 0; v < kVectors; ++v) {
        even[k * kVectors + v] = at[v];
        odd[k * kVectors + v] = at[kVectors + v];
      }
    }
    F* const results = room + 2 * K * kWide;
    meet(lines, lines.back_cosines, lines.back_sines, even, odd, results, results + K * kWide,
         kWide);
    const V* const e = reinterpret_cast<const V*>(results);
    const V* const o = e + K * kVectors;
    V* const out = reinterpret_cast<V*>(to);
    for (std::int64_t a = 0; a < K; ++a) {
      const bool paired = a > 0 && 2 * a != d;
      for (int v = 0; v < kVectors; ++v) {
        const V first = e[a * kVectors + v], second = o[a * kVectors + v];
        out[a * kVectors + v] = paired ? first + second : first;
        if (paired) out[(d - a) * kVectors + v] = first - second;
      }
    }
  }
  static DPK_INLINE void by(const typename Lines<F>::Table& table, const V* from, F* to,
                            std::int64_t step) {
    combine(table.entries.data(), table.rows, table.columns, reinterpret_cast<const F*>(from),
            kWide, to, step);
  }
  // Cosine sums of even[0..d/2] and sine sums of odd[1..], which are folded in place.
  static DPK_INLINE void meet(const Lines<F>& lines, const typename Lines<F>::Table* cosines,
                              const typename Lines<F>::Table* sines, V* even, V* odd, F* to_even,
                              F* to_odd, std::int64_t step) {
    if (!lines.twice) {
      by(cosines[0], even, to_even, step);
      by(sines[0], odd + kVectors, to_odd, step);
      return;
    }
    for (std::int64_t a = 0; a < lines.half; ++a) {
      const std::int64_t partner = 2 * lines.half - a;
      for (int v = 0; v < kVectors; ++v) {
        V &first = even[a * kVectors + v], &last = even[partner * kVectors + v];
        const V sum = first + last, difference = first - last;
        first = sum, last = difference;
        if (a == 0) continue;
        V &begin = odd[a * kVectors + v], &end = odd[partner * kVectors + v];
        const V odd_sum = begin + end, odd_difference = begin - end;
        begin = odd_sum, end = odd_difference;
      }
    }
    const V *const differences = even + (lines.half + 1) * kVectors, *const odd_differences =
                                                                         odd + (lines.half + 1) *
                                                                                   kVectors;
    by(cosines[0], even, to_even, 2 * step);
    by(cosines[1], differences, to_even + step, 2 * step);
    by(sines[0], odd_differences, to_odd, 2 * step);
    by(sines[1], odd + kVectors, to_odd + step, 2 * step);
  }
};

}  // namespace dpkern::cpu::circulant
