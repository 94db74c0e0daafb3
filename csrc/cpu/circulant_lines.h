#pragma once
// Transforms of circulant blocks, for as many samples or blocks at once as a vector has lanes.
//
// A block is folded about its first entry, so that cosines meet sums and sines meet differences,
// and multiplied by tables of half its length. The way back is the same with entries and
// frequencies changed over.

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

// Cosines and sines of a block of d entries: K frequencies, K entries that cosines meet, `odd` that
// sines do.
template <class F>
struct Lines {
  std::int64_t d, K, odd;
  std::vector<F> cosines, sines;             // [K, K] and [K, odd], of the transform
  std::vector<F> even_entries, odd_entries;  // [K, K] and [odd, K], of the way back

  explicit Lines(std::int64_t block) : d(block), K(block / 2 + 1), odd((block - 1) / 2) {
    std::vector<double> turns(static_cast<std::size_t>(2 * d));
    for (std::int64_t m = 0; m < d; ++m) {
      const double angle =
          2 * 3.14159265358979323846 * static_cast<double>(m) / static_cast<double>(d);
      turns[static_cast<std::size_t>(2 * m)] = 4 * m == d || 4 * m == 3 * d ? 0 : std::cos(angle);
      turns[static_cast<std::size_t>(2 * m + 1)] = 2 * m == d ? 0 : std::sin(angle);
    }
    const auto turn = [&](std::int64_t k, std::int64_t a, int part) {
      return turns[static_cast<std::size_t>(2 * (k * a % d) + part)];
    };
    const auto weight = [&](std::int64_t k) {
      return (k == 0 || 2 * k == d ? 1.0 : 2.0) / static_cast<double>(d);
    };
    for (std::int64_t k = 0; k < K; ++k) {
      for (std::int64_t a = 0; a < K; ++a) cosines.push_back(static_cast<F>(turn(k, a, 0)));
      for (std::int64_t a = 1; a <= odd; ++a) sines.push_back(static_cast<F>(turn(k, a, 1)));
    }
    for (std::int64_t a = 0; a < K; ++a) {
      for (std::int64_t k = 0; k < K; ++k) {
        even_entries.push_back(static_cast<F>(weight(k) * turn(k, a, 0)));
      }
    }
    for (std::int64_t a = 1; a <= odd; ++a) {
      for (std::int64_t k = 0; k < K; ++k) {
        odd_entries.push_back(static_cast<F>(weight(k) * turn(k, a, 1)));
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
  // The way back, added to what is there or in its place.
  template <bool kAdd>
  static DPK_INLINE void turn_out(const F* from, std::int64_t count, std::int64_t width, F* to,
                                  std::int64_t step) {
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

  // Spectra of blocks [d, kWide]: cosine and sine sums of frequency k at `to + k * step`.
  static DPK_INLINE void transform(const Lines<F>& lines, const F* from, F* room, F* to,
                                   std::int64_t step) {
    V* const even = reinterpret_cast<V*>(room);
    V* const odd = reinterpret_cast<V*>(room + lines.K * kWide);
    const V* const at = reinterpret_cast<const V*>(from);
    for (int v = 0; v < kVectors; ++v) even[v] = at[v];
    for (std::int64_t a = 1; a < lines.K; ++a) {
      for (int v = 0; v < kVectors; ++v) {
        const V first = at[a * kVectors + v], last = at[(lines.d - a) * kVectors + v];
        even[a * kVectors + v] = 2 * a == lines.d ? first : first + last;
        if (a <= lines.odd) odd[(a - 1) * kVectors + v] = first - last;
      }
    }
    combine(lines.cosines.data(), lines.K, lines.K, room, kWide, to, step);
    combine(lines.sines.data(), lines.K, lines.odd, room + lines.K * kWide, kWide, to + kWide,
            step);
  }
  // Blocks [d, kWide] of spectra.
  static DPK_INLINE void transform_back(const Lines<F>& lines, const F* from, std::int64_t step,
                                        F* room, F* to) {
    combine(lines.even_entries.data(), lines.K, lines.K, from, step, room, kWide);
    F* const odd = room + lines.K * kWide;
    combine(lines.odd_entries.data(), lines.odd, lines.K, from + kWide, step, odd, kWide);
    for (std::int64_t a = 0; a < lines.K; ++a) {
      const bool paired = a > 0 && a <= lines.odd;
      for (int i = 0; i < kWide; ++i) {
        const F e = room[a * kWide + i], o = paired ? odd[(a - 1) * kWide + i] : F{0};
        to[a * kWide + i] = e + o;
        if (paired) to[(lines.d - a) * kWide + i] = e - o;
      }
    }
  }
};

}  // namespace dpkern::cpu::circulant
