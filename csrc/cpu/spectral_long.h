#pragma once
// Powers of the spectra of large maps. A line of n = n1 n2 values is transformed in two levels of
// small products: with j = n2 a + b about an origin, and k = k1 + n1 m,
//
//   X(k) = sum_b exp(-2 pi i m b / n2) exp(-2 pi i k1 b / n) Y_b(k1)
//   Y_b(k1) = sum_a exp(-2 pi i k1 a / n1) x(n2 a + b)
//
// so that a line takes about n (n1 + n2) / 4 products, where one level takes n^2 / 4. Both levels
// fold their values and share products as one level does (spectral_transform.h). Spectra are pairs
// (p, q) that mean p - i q.
//
// Rows are transformed two at a time to half of their frequencies, then each of these columns as
// complex numbers to all of them: there is a slot for every bin of a half plane, which holds its
// power. Volumes have a third axis, the depth, along which lines of what columns gave are
// transformed in the same way, one column's plane after the other.

#include "cpu/spectral_transform.h"

namespace dpkern::cpu::spectral {

constexpr std::int64_t kPart = 16;  // products of a sum; `_lines.py` knows it

// `count` values on a circle of `n`, whose origin is `n2 (terms / 2) + n2 / 2`.
template <class F>
struct LongLine {
  std::int64_t n, count, n1, n2;
  std::int64_t terms;  // values of a sequence of the first level, zeros behind the last included
  Line<F> first, second;
  std::vector<F> twiddles;  // [b][k1]: cosine and sine

  // `turns`: cosines and sines of 2 pi m / n.
  LongLine(const std::int64_t* sizes, const double* turns)
      : n(sizes[0]),
        count(sizes[1]),
        n1(sizes[2]),
        n2(n / n1),
        terms((count + n2 - 1) / n2),
        first(n1, terms, 1, turns, n),
        second(n2, n2, 1, turns, n) {
    twiddles.reserve(static_cast<std::size_t>(2 * n));
    for (std::int64_t b = 0; b < n2; ++b) {
      for (std::int64_t k = 0; k < n1; ++k) {
        const std::int64_t turn = k * (b - n2 / 2 + n) % n;
        twiddles.push_back(static_cast<F>(turns[turn]));
        twiddles.push_back(static_cast<F>(turns[n + turn]));
      }
    }
  }
  std::int64_t padded() const { return terms * n2; }
  // Frequencies k1 + n1 m of a real line, m < kept(k1), are none another's conjugate.
  std::int64_t kept(std::int64_t k1) const {
    return k1 == 0 ? n2 / 2 + 1 : 2 * k1 == n1 ? (n2 + 1) / 2 : n2;
  }
  // Where those of k1 begin.
  std::int64_t slot(std::int64_t k1) const { return k1 == 0 ? 0 : kept(0) + (k1 - 1) * n2; }
  // The k1 of a slot.
  std::int64_t first_of(std::int64_t at) const {
    return at < kept(0) ? 0 : 1 + (at - kept(0)) / n2;
  }
  // Vectors between two k1 behind the first level, an odd number: stores that are a multiple of
  // 4 KiB apart fight for one set of the cache.
  std::int64_t plane() const { return 2 * n2 + 1; }
  // Values of a folded line of either level, and as many frequencies.
  std::int64_t half() const { return std::max(n1, n2) / 2 + 1; }
};

// A line of one value, which is its own spectrum.
template <class F>
LongLine<F> single_value() {
  constexpr std::int64_t kSizes[] = {1, 1, 1};
  constexpr double kTurns[] = {1, 0};
  return {kSizes, kTurns};
}

// Maps of one operand, as `Maps`: planes, or volumes of which the first planes are used.
template <class F>
struct LongMaps {
  static constexpr int kParts = 1;  // a slot's power

  const void* data;
  bool narrow;
  std::int64_t samples, channels, height, width;  // rows of all planes of a volume
  LongLine<F> rows, columns;
  LongLine<F> depth = single_value<F>();
  std::int64_t between = 0;  // rows from one plane of a volume to the next

  bool deep() const { return depth.n > 1; }
  bool flat() const { return rows.n == 1 && !deep(); }
  // Bins of a frequency kx, [ky][kz].
  std::int64_t bins() const { return rows.n * depth.n; }
  std::int64_t slots() const { return (columns.n / 2 + 1) * bins(); }
  // Rows that are transformed, with zeros behind the last of each plane.
  std::int64_t padded() const { return depth.count * rows.padded(); }
  // Vectors of transformed rows.
  std::int64_t plane() const { return flat() ? 0 : (columns.n + 2) * padded(); }
  // Those of one kx, transformed along columns.
  std::int64_t lines() const { return deep() ? 2 * rows.n * depth.padded() : 0; }
  // Those between the first level and the second.
  std::int64_t turned() const {
    return std::max(
        {(columns.n1 + 2) * columns.plane(), rows.n1 * rows.plane(), depth.n1 * depth.plane()});
  }
  std::int64_t half() const { return std::max({rows.half(), columns.half(), depth.half()}); }
  std::int64_t room() const {
    return plane() + lines() + 2 * columns.padded() + 8 * half() + turned();
  }
};

template <class F, int kBytes>
struct LongTransform : Transform<F, kBytes> {
  using Base = Transform<F, kBytes>;
  using Base::fold, Base::load_row, Base::square_of, Base::with_size;
  using typename Base::V;

  // Room for one map, or for two maps of one row.
  struct Room {
    V* columns;  // [k1][row][m][2]
    V* lines;    // [ky][plane][2] of one kx, with zeros behind the last
    V* rows[2];  // with zeros behind the last value
    V* cosines[2];
    V* sines[2];
    V* sums;    // [frequency][4]: of cosines of two folded lines, and of sines
    V* turned;  // [k1][2][b], of two rows or one column
  };
  static DPK_INLINE Room make_room(V* from, const LongMaps<F>& maps) {
    Room room;
    room.columns = from;
    from += maps.plane();
    room.lines = from;
    from += maps.lines();
    std::fill(room.lines, from, V{});
    for (V*& row : room.rows) {
      row = from;
      from += maps.columns.padded();
      std::fill(row + maps.columns.count, from, V{});
    }
    if (!maps.flat()) clear_rows(maps, room.columns);
    const std::int64_t half = maps.half();
    for (V*& folded : room.cosines) folded = from, from += half;
    for (V*& folded : room.sines) folded = from, from += half;
    room.sums = from;
    room.turned = from + 4 * half;
    return room;
  }
  // Zeros in the rows behind the last of each plane.
  static DPK_INLINE void clear_rows(const LongMaps<F>& maps, V* columns) {
    for (std::int64_t k = 0; 2 * k <= maps.columns.n1; ++k) {
      const std::int64_t row = 2 * maps.columns.kept(k);
      for (std::int64_t z = 0; z < maps.depth.count; ++z) {
        std::fill(columns + maps.rows.count * row, columns + maps.rows.padded() * row, V{});
        columns += maps.rows.padded() * row;
      }
    }
  }

  // `Base::multiply` in parts that are added up: rounding grows with their length.
  template <int kCount>
  static DPK_INLINE void multiply(const F* table, const V* row0, const V* row1, std::int64_t terms,
                                  V (&sums)[kCount][2]) {
    Base::template multiply<kCount>(table, row0, row1, std::min(terms, kPart), sums);
    for (std::int64_t t = kPart; t < terms; t += kPart) {
      V part[kCount][2];
      Base::template multiply<kCount>(table + t * kCount, row0 + t, row1 + t,
                                      std::min(terms - t, kPart), part);
#pragma GCC unroll 16
      for (int i = 0; i < kCount; ++i) {
        sums[i][0] += part[i][0];
        sums[i][1] += part[i][1];
      }
    }
  }
  // The sums of two folded lines. A frequency that is its own partner is written twice, alike.
  static DPK_INLINE void multiply_folded(const Line<F>& line, const Room& room) {
    const F* table = line.table.data();
    line.each_tile([&](std::int64_t first, int size) DPK_INLINE {
      with_size(size, [&](auto count) DPK_INLINE {
        constexpr int kCount = count;
        V even[kCount][2], odd[kCount][2];
        for (int sines = 0; sines < 2; ++sines) {
          V* const* const inputs = sines ? room.sines : room.cosines;
          const std::int64_t evens = line.evens - sines;
          multiply<kCount>(table, inputs[0] + sines, inputs[1] + sines, evens, even);
          table += evens * kCount;
          multiply<kCount>(table, inputs[0] + line.evens, inputs[1] + line.evens, line.odds, odd);
          table += line.odds * kCount;
          V* const to = room.sums + 2 * sines;
#pragma GCC unroll 16
          for (int i = 0; i < kCount; ++i) {
#pragma GCC unroll 2
            for (int r = 0; r < 2; ++r) {
              to[4 * (first + i) + r] = even[i][r] + odd[i][r];
              if (!line.split) continue;
              to[4 * (line.n / 2 - first - i) + r] =
                  sines ? odd[i][r] - even[i][r] : even[i][r] - odd[i][r];
            }
          }
        }
      });
    });
  }

  // body(k, p, q) for k < count of n, from the sums of p and q.
  template <class Body>
  static DPK_INLINE void each_frequency(std::int64_t n, std::int64_t count, const V* sums,
                                        const Body& body) {
    for (std::int64_t k = 0; 2 * k <= n; ++k, sums += 4) {
      if (k < count) body(k, sums[0] - sums[3], sums[1] + sums[2]);
      if (k == 0 || 2 * k == n || n - k >= count) continue;
      body(n - k, sums[0] + sums[3], sums[1] - sums[2]);
    }
  }
  // Between the levels: sequence b times its phases.
  static DPK_INLINE void turn(const LongLine<F>& line, const Room& room, std::int64_t b,
                              bool real) {
    const std::int64_t n1 = line.n1, n2 = line.n2, plane = line.plane();
    const F* const w = line.twiddles.data() + 2 * b * n1;
    V* const to = room.turned + b;
    const auto twist = [&](std::int64_t k, V p, V q, V* at) DPK_INLINE {
      at[0] = w[2 * k] * p - w[2 * k + 1] * q;
      at[n2] = w[2 * k] * q + w[2 * k + 1] * p;
    };
    if (!real) {
      each_frequency(n1, n1, room.sums,
                     [&](std::int64_t k, V p, V q) DPK_INLINE { twist(k, p, q, to + k * plane); });
      return;
    }
    const std::int64_t half = n1 / 2 + 1;
    for (std::int64_t k = 0; k < half; ++k) {
      const V* const sums = room.sums + 4 * k;
      twist(k, sums[0], sums[2], to + k * plane);
      twist(k, sums[1], sums[3], to + (half + k) * plane);
    }
  }
  // Transform `reals` rows of real numbers, or one line of pairs if that is 0, whose values are
  // `step` vectors apart. emit(row, k1) finds the sums of the second level at k1.
  template <class Emit>
  static DPK_INLINE void transform(const LongLine<F>& line, const Room& room, const V* p,
                                   const V* q, std::int64_t step, std::int64_t reals,
                                   const Emit& emit) {
    const std::int64_t n2 = line.n2, each = reals == 0 ? line.n1 : line.n1 / 2 + 1;
    const std::int64_t spectra = reals == 0 ? each : reals * each;
    for (std::int64_t i = 0; i < n2 + spectra; ++i) {
      const bool again = i >= n2;
      const Line<F>& level = again ? line.second : line.first;
      const V* const turned = room.turned + (again ? i - n2 : 0) * line.plane();
      const std::int64_t apart = again ? 1 : n2 * step;
      fold(level, again ? turned : p + i * step, room.cosines[0], room.sines[0], apart);
      fold(level, again ? turned + n2 : q + i * step, room.cosines[1], room.sines[1], apart);
      multiply_folded(level, room);
      if (again) {
        emit((i - n2) / each, (i - n2) % each);
      } else {
        turn(line, room, i, reals > 0);
      }
    }
  }

  // Add the powers of a map to `powers [slots]`; without powers, return its square, and take those
  // columns alone that hold a bin. Maps of one row come two at a time.
  template <bool kPowers>
  static DPK_INLINE V add_maps(const LongMaps<F>& maps, const std::int64_t* samples,
                               std::int64_t count, const Room& room, V* powers, const Kept* keep,
                               V* kept) {
    const LongLine<F>&rows = maps.rows, &columns = maps.columns, &depth = maps.depth;
    const bool flat = maps.flat(), deep = maps.deep();
    const std::int64_t lines = flat ? count : depth.count * rows.count, pairs = (lines + 1) / 2;
    // Lines of a kx: a column of each plane, and then one along the depth at each ky.
    const std::int64_t each = deep ? depth.count + rows.n : 1;
    const std::int64_t passes = pairs + (flat ? 0 : (columns.n / 2 + 1) * each);
    const auto begins = [&](std::int64_t line) DPK_INLINE {
      if (flat) return line * maps.height * maps.width;
      return (line / rows.count * maps.between + line % rows.count) * maps.width;
    };
    const auto add = [&](std::int64_t slot, V p, V q, V* bins) DPK_INLINE {
      if constexpr (kPowers) powers[slot] += p * p + q * q;
      if (keep == nullptr || keep->bins[slot] < 0) return;
      bins[2 * keep->bins[slot]] = p;
      bins[2 * keep->bins[slot] + 1] = q;
    };
    V square{};
    for (std::int64_t pass = 0; pass < passes; ++pass) {
      // Two rows, then one column, then one line along the depth.
      const bool of_rows = pass < pairs;
      const std::int64_t row = 2 * pass, column = (pass - pairs) / each;
      const std::int64_t plane = (pass - pairs) % each, ky = plane - depth.count;
      const bool of_depth = !of_rows && deep && ky >= 0;
      const std::int64_t used = of_rows ? std::min<std::int64_t>(2, lines - row) : 0;
      const V *p = room.rows[0], *q = room.rows[used == 1 ? 0 : 1];
      std::int64_t step = 1;
      for (std::int64_t i = 0; i < used; ++i) {
        load_row(maps, samples, begins(row + i), room.rows[i]);
        if constexpr (!kPowers) square += square_of(room.rows[i], columns.count);
      }
      if (!of_rows) {
        if (!kPowers && !keep->tiles[column]) continue;
        const std::int64_t k1 = columns.first_of(column), width = columns.kept(k1);
        const std::int64_t m = column - columns.slot(k1);
        step = of_depth ? 2 : 2 * width;
        p = of_depth ? room.lines + 2 * ky * depth.padded()
                     : room.columns + 2 * (columns.slot(k1) * maps.padded() +
                                           plane * rows.padded() * width + m);
        q = p + 1;
      }
      const LongLine<F>& line = of_rows ? columns : of_depth ? depth : rows;
      transform(line, room, p, q, step, used, [&](std::int64_t i, std::int64_t k) DPK_INLINE {
        const std::int64_t first = columns.slot(k), width = columns.kept(k);
        // Powers of the last axis; else where the next one finds its values.
        const bool last = flat || of_depth || (!of_rows && !deep);
        const std::int64_t slot = of_rows    ? first
                                  : of_depth ? (column * rows.n + ky) * depth.n + k * depth.n2
                                             : column * rows.n + k * rows.n2;
        const std::int64_t place = (row + i) / rows.count * rows.padded() + (row + i) % rows.count;
        V* const to = of_rows ? room.columns + 2 * (first * maps.padded() + place * width)
                              : room.lines + 2 * (k * rows.n2 * depth.padded() + plane);
        const std::int64_t apart = of_rows ? 2 : 2 * depth.padded();
        V* const bins = kept + (keep == nullptr ? 0 : i * keep->plane());
        each_frequency(line.n2, of_rows ? width : line.n2, room.sums,
                       [&](std::int64_t m, V a, V b) DPK_INLINE {
                         if (last) return add(slot + m, a, b, bins);
                         to[apart * m] = a;
                         to[apart * m + 1] = b;
                       });
      });
    }
    return square;
  }

  // As `Transform::add_channels`.
  template <bool kPowers>
  static DPK_INLINE void add_channels(const LongMaps<F>& maps, const Kept* keep, std::int64_t first,
                                      std::int64_t used, std::int64_t begin, std::int64_t end,
                                      V* powers, V* from, V* kept, double* squares = nullptr) {
    const Room room = make_room(from, maps);
    if constexpr (kPowers) std::fill(powers, powers + maps.slots(), V{});
    Base::each_channel(maps, maps.flat() ? 2 : 1, keep, first, used, begin, end, kept,
                       [&](const std::int64_t* samples, std::int64_t count, V* bins) DPK_INLINE {
                         const V square =
                             add_maps<kPowers>(maps, samples, count, room, powers, keep, bins);
                         if constexpr (!kPowers) Base::add_lanes(square, squares);
                       });
  }
};

template <class M, int kBytes>
struct TransformOf;
template <class F, int kBytes>
struct TransformOf<Maps<F>, kBytes> : Transform<F, kBytes> {};
template <class F, int kBytes>
struct TransformOf<LongMaps<F>, kBytes> : LongTransform<F, kBytes> {};

}  // namespace dpkern::cpu::spectral
