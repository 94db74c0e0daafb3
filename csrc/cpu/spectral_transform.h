#pragma once
// Powers of the spectra of small maps, by products with cosines and sines. The lanes of a vector
// are samples, so no sum crosses lanes and a sample's bits do not depend on the others.
//
// Powers ignore shifts, so the origin is put at the centre of a map and both axes are folded there:
// e_j = x_j + x_-j meets cosines, o_j = x_j - x_-j meets sines. On an even grid n the frequencies
// k and n/2 - k share products: with even and odd j apart,
//
//   C(k) = E + O, C(n/2 - k) = E - O for cosines;  S(k) = O + E, S(n/2 - k) = O - E for sines.
//
// Rows are transformed first, to U (cosines) and V (sines), then columns: U to a (cosines) and d, V
// to c and b. The spectrum is X(+-ky, kx) = (a -+ b) - i (c +- d), and its powers are M +- 2 N with
//
//   M = a^2 + b^2 + c^2 + d^2,  N = c d - a b.

#include "cpu/ghost_tiles.h"
#include "cpu/spectral_line.h"

namespace dpkern::cpu::spectral {

using ghost::load;

template <class F, int kBytes>
struct Transform {
  static constexpr int kLanes = kBytes / static_cast<int>(sizeof(F));
  using V = Vector<F, kLanes>;

  // sums[i][r] = sum_t coefficients[t][i] * rows[r][t]
  template <int kCount>
  static DPK_INLINE void multiply(const F* coefficients, const V* row0, const V* row1,
                                  std::int64_t terms, V (&sums)[kCount][2]) {
#pragma GCC unroll 16
    for (int i = 0; i < kCount; ++i) sums[i][0] = sums[i][1] = V{};
    for (std::int64_t t = 0; t < terms; ++t) {
      const V a = row0[t], b = row1[t];
#pragma GCC unroll 16
      for (int i = 0; i < kCount; ++i) {
        const F s = coefficients[t * kCount + i];
        sums[i][0] += s * a;
        sums[i][1] += s * b;
      }
    }
  }
  template <class Body>
  static DPK_INLINE void with_size(int size, const Body& body) {
    switch (size) {
      case 1:
        return body(std::integral_constant<int, 1>{});
      case 2:
        return body(std::integral_constant<int, 2>{});
      case 3:
        return body(std::integral_constant<int, 3>{});
      case 4:
        return body(std::integral_constant<int, 4>{});
      default:
        return body(std::integral_constant<int, 5>{});
    }
  }

  // Squares of four across vectors: entry i of quarter q of vector j to entry j of vector i.
  template <class W, int... l>
  static DPK_INLINE void transpose(W* x, std::integer_sequence<int, l...>) {
    constexpr auto interleaved = [](int lane, int from) {
      return lane / 4 * 4 + from + lane % 4 / 2 + (lane % 2) * kLanes;
    };
    constexpr auto pairs = [](int lane, int from) {
      return lane / 4 * 4 + from + lane % 2 + (lane % 4 / 2) * kLanes;
    };
    const W low0 = __builtin_shufflevector(x[0], x[1], interleaved(l, 0)...);
    const W high0 = __builtin_shufflevector(x[0], x[1], interleaved(l, 2)...);
    const W low1 = __builtin_shufflevector(x[2], x[3], interleaved(l, 0)...);
    const W high1 = __builtin_shufflevector(x[2], x[3], interleaved(l, 2)...);
    x[0] = __builtin_shufflevector(low0, low1, pairs(l, 0)...);
    x[1] = __builtin_shufflevector(low0, low1, pairs(l, 2)...);
    x[2] = __builtin_shufflevector(high0, high1, pairs(l, 0)...);
    x[3] = __builtin_shufflevector(high0, high1, pairs(l, 2)...);
  }
  // Quarters 0, 2, ... of both vectors, and quarters 1, 3, ...
  template <class W, int... l>
  static DPK_INLINE void unzip(W& a, W& b, std::integer_sequence<int, l...>) {
    constexpr auto at = [](int lane, int from) { return (2 * (lane / 4) + from) * 4 + lane % 4; };
    const W even = __builtin_shufflevector(a, b, at(l, 0)...);
    b = __builtin_shufflevector(a, b, at(l, 1)...);
    a = even;
  }
  // Entry i of vector j to entry j of vector i, for as many vectors as lanes: whole lines of the
  // cache on either side.
  template <class W>
  static DPK_INLINE void transpose_all(W* x) {
    using Lanes = std::make_integer_sequence<int, kLanes>;
#pragma GCC unroll 4
    for (int i = 0; i < kLanes; i += 4) transpose<W>(x + i, Lanes{});
#pragma GCC unroll 2
    for (int apart = 4; apart < kLanes; apart *= 2) {
#pragma GCC unroll 2
      for (int begin = 0; begin < kLanes; begin += 2 * apart) {
#pragma GCC unroll 8
        for (int i = begin; i < begin + apart; ++i) unzip<W>(x[i], x[i + apart], Lanes{});
      }
    }
  }
  template <class H, int... l>
  static DPK_INLINE auto joined(H a, H b, std::integer_sequence<int, l...>) {
    return __builtin_shufflevector(a, b, l...);
  }
  // Quarter i of the result: four columns of sample 4 i.
  template <int kCount>
  static DPK_INLINE Vector<float, kCount> quarters(const float* from, const std::int64_t* samples) {
    if constexpr (kCount == 4) {
      return load<Vector<float, 4>>(from + samples[0]);
    } else {
      return joined(quarters<kCount / 2>(from, samples),
                    quarters<kCount / 2>(from, samples + kCount / 2),
                    std::make_integer_sequence<int, kCount>{});
    }
  }
  // One row of every sample, `at` entries behind the beginning of its map: a vector per column.
  template <class M>
  static DPK_INLINE void load_row(const M& maps, const std::int64_t* samples, std::int64_t at,
                                  V* to) {
    const std::int64_t columns = maps.columns.count;
    if (!maps.narrow)
      return load_entries(static_cast<const double*>(maps.data) + at, samples, columns, to);
    const float* const from = static_cast<const float*>(maps.data) + at;
    if constexpr (kLanes < 4) {
      load_entries(from, samples, columns, to);
    } else {
      if (columns < 4) return load_entries(from, samples, columns, to);
      using W = Vector<float, kLanes>;
      std::int64_t column = 0;
      if constexpr (kLanes > 4) {
        for (; column + kLanes <= columns; column += kLanes) {
          W x[kLanes];
#pragma GCC unroll 16
          for (int i = 0; i < kLanes; ++i) x[i] = load<W>(from + column + samples[i]);
          transpose_all<W>(x);
#pragma GCC unroll 16
          for (int i = 0; i < kLanes; ++i) to[column + i] = __builtin_convertvector(x[i], V);
        }
      }
      for (; column < columns; column += 4) {
        const std::int64_t first = std::min(column, columns - 4);
        W x[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) x[i] = quarters<kLanes>(from + first, samples + i);
        transpose<W>(x, std::make_integer_sequence<int, kLanes>{});
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) to[first + i] = __builtin_convertvector(x[i], V);
      }
    }
  }
  template <class T>
  static DPK_INLINE void load_entries(const T* from, const std::int64_t* samples,
                                      std::int64_t columns, V* to) {
    for (std::int64_t column = 0; column < columns; ++column) {
      F entries[kLanes];
      for (int i = 0; i < kLanes; ++i) entries[i] = static_cast<F>(from[samples[i] + column]);
      to[column] = load<V>(entries);
    }
  }

  // cosine and sine inputs of a row, whose entries are `step` apart, in the line's order.
  static DPK_INLINE void fold(const Line<F>& line, const V* row, V* cosine, V* sine,
                              std::int64_t step = 1) {
    const V* const centre = row + line.count / 2 * step;
    const std::int64_t paired = (line.count - 1) / 2;
    cosine[0] = centre[0];
    const auto pair = [&](std::int64_t j, std::int64_t place) DPK_INLINE {
      cosine[place] = centre[j * step] + centre[-j * step];
      sine[place] = centre[j * step] - centre[-j * step];
    };
    if (line.split) {
      for (std::int64_t j = 1; j <= paired; j += 2) pair(j, line.evens + j / 2);
      for (std::int64_t j = 2; j <= paired; j += 2) pair(j, j / 2);
    } else {
      for (std::int64_t j = 1; j <= paired; ++j) pair(j, j);
    }
    if (paired < line.half) {
      const std::int64_t place = line.place(line.half);
      cosine[place] = row[0];
      sine[place] = -row[0];
    }
  }

  // Room for one map: rows, folded rows, and the transformed columns.
  struct Room {
    V* rows[2];
    V* cosines[2];
    V* sines[2];
    V* columns;
    std::int64_t part, plane;  // of `columns`: [frequency][U, V of even, U, V of odd][place]
  };
  static DPK_INLINE Room make_room(V* from, const Line<F>& rows, const Line<F>& columns) {
    Room room;
    for (V*& row : room.rows) row = from, from += columns.count;
    for (V*& row : room.cosines) row = from, from += columns.half + 1;
    for (V*& row : room.sines) row = from, from += columns.half + 1;
    room.columns = from;
    room.part = rows.half + 1;
    room.plane = rows.plane();
    return room;
  }

  // U and V of two folded rows, of the first `columns` frequencies, or of all.
  template <bool kAll>
  static DPK_INLINE void transform_rows(const Line<F>& line, const Room& room, std::int64_t columns,
                                        V* to0, V* to1) {
    const F* table = line.table.data();
    line.each_tile([&](std::int64_t first, int size) DPK_INLINE {
      if (!kAll && first >= columns) return;
      with_size(size, [&](auto count) DPK_INLINE {
        constexpr int kCount = count;
        const std::int64_t high = line.n / 2;
        V even[kCount][2], odd[kCount][2];
        for (int sines = 0; sines < 2; ++sines) {
          V* const* const inputs = sines ? room.sines : room.cosines;
          multiply<kCount>(table, inputs[0] + sines, inputs[1] + sines, line.evens - sines, even);
          table += (line.evens - sines) * kCount;
          V* const out0 = to0 + sines * room.part;
          V* const out1 = to1 + sines * room.part;
          if (!line.split) {
#pragma GCC unroll 16
            for (int i = 0; i < kCount; ++i) {
              out0[(first + i) * room.plane] = even[i][0];
              out1[(first + i) * room.plane] = even[i][1];
            }
            continue;
          }
          multiply<kCount>(table, inputs[0] + line.evens, inputs[1] + line.evens, line.odds, odd);
          table += line.odds * kCount;
#pragma GCC unroll 16
          for (int i = 0; i < kCount; ++i) {
            const std::int64_t k = (first + i) * room.plane, m = (high - first - i) * room.plane;
            const V sign0 = sines ? odd[i][0] - even[i][0] : even[i][0] - odd[i][0];
            const V sign1 = sines ? odd[i][1] - even[i][1] : even[i][1] - odd[i][1];
            out0[k] = even[i][0] + odd[i][0];
            out1[k] = even[i][1] + odd[i][1];
            if (!kAll && high - first - i >= columns) continue;
            out0[m] = sign0;
            out1[m] = sign1;
          }
        }
      });
    });
  }

  // Add M and N of one frequency to `powers`, and keep the bins that are retained.
  template <bool kPowers>
  static DPK_INLINE void add(V a, V b, V c, V d, V* powers, const std::int64_t* bins, V* kept) {
    if constexpr (kPowers) {
      V m = powers[0], n = powers[1];
      m += a * a;
      n += c * d;
      m += b * b;
      n -= a * b;
      m += c * c;
      m += d * d;
      powers[0] = m;
      powers[1] = n;
    }
    if (bins != nullptr) {
      if (bins[0] >= 0) {
        kept[bins[0] * 2] = a - b;
        kept[bins[0] * 2 + 1] = c + d;
      }
      if (bins[1] >= 0) {
        kept[bins[1] * 2] = a + b;
        kept[bins[1] * 2 + 1] = c - d;
      }
    }
  }

  // One column's frequencies along the rows. Without powers, `tiles` says where bins are kept.
  template <bool kPowers>
  static DPK_INLINE void transform_column(const Line<F>& line, const V* column, std::int64_t part,
                                          V* powers, const std::int64_t* bins, V* kept,
                                          const char* tiles) {
    const F* table = line.table.data();
    const V *const even_u = column, *const even_v = column + part;
    const V *const odd_u = even_v + part, *const odd_v = odd_u + part;
    line.each_tile([&](std::int64_t, int size) DPK_INLINE {
      if constexpr (!kPowers) {
        if (!*tiles++) {
          table += size * line.terms();
          bins += (line.split ? 4 : 2) * size;
          return;
        }
      }
      with_size(size, [&](auto count) DPK_INLINE {
        constexpr int kCount = count;
        const std::int64_t evens = line.evens, odds = line.odds;
        V a[kCount][2], d[kCount][2];
        multiply<kCount>(table, even_u, even_v, evens, a);
        table += evens * kCount;
        if (!line.split) {
          multiply<kCount>(table, odd_u + 1, odd_v + 1, evens - 1, d);
          table += (evens - 1) * kCount;
#pragma GCC unroll 16
          for (int i = 0; i < kCount; ++i) {
            add<kPowers>(a[i][0], d[i][1], a[i][1], d[i][0], powers, bins, kept);
            if constexpr (kPowers) powers += 2;
            if (bins != nullptr) bins += 2;
          }
          return;
        }
        V high_a[kCount][2], high_d[kCount][2], odd[kCount][2];
        multiply<kCount>(table, even_u + evens, even_v + evens, odds, odd);
        table += odds * kCount;
#pragma GCC unroll 16
        for (int i = 0; i < kCount; ++i) {
#pragma GCC unroll 2
          for (int r = 0; r < 2; ++r) {
            high_a[i][r] = a[i][r] - odd[i][r];
            a[i][r] += odd[i][r];
          }
        }
        multiply<kCount>(table, odd_u + 1, odd_v + 1, evens - 1, d);
        table += (evens - 1) * kCount;
        multiply<kCount>(table, odd_u + evens, odd_v + evens, odds, odd);
        table += odds * kCount;
#pragma GCC unroll 16
        for (int i = 0; i < kCount; ++i) {
#pragma GCC unroll 2
          for (int r = 0; r < 2; ++r) {
            high_d[i][r] = odd[i][r] - d[i][r];
            d[i][r] += odd[i][r];
          }
          add<kPowers>(a[i][0], d[i][1], a[i][1], d[i][0], powers, bins, kept);
          add<kPowers>(high_a[i][0], high_d[i][1], high_a[i][1], high_d[i][0],
                       kPowers ? powers + 2 : powers, bins == nullptr ? bins : bins + 2, kept);
          if constexpr (kPowers) powers += 4;
          if (bins != nullptr) bins += 4;
        }
      });
    });
  }

  static DPK_INLINE V square_of(const V* row, std::int64_t count) {
    V sums[4] = {};
    std::int64_t i = 0;
    for (; i + 4 <= count; i += 4) {
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) sums[j] += row[i + j] * row[i + j];
    }
    for (; i < count; ++i) sums[0] += row[i] * row[i];
    return sums[0] + sums[1] + (sums[2] + sums[3]);
  }

  // Add the powers of one map to `powers [slots, 2]`. Without powers, return its square;
  // frequencies along the rows end with the last that is kept.
  template <bool kPowers>
  static DPK_INLINE V add_map(const Maps<F>& maps, const std::int64_t* samples, const Room& room,
                              V* powers, const Kept* keep, V* kept) {
    const Line<F>&rows = maps.rows, &columns = maps.columns;
    const std::int64_t centre = rows.count / 2, paired = (rows.count - 1) / 2;
    const std::int64_t odd = 2 * room.part;
    const bool unpaired = paired < rows.half;
    const std::int64_t used = kPowers ? columns.n / 2 + 1 : keep->columns;
    V square{};
    // The centre, together with the first of an even number of rows, then pairs of rows.
    V* const last = room.columns + rows.place(rows.half);
    for (std::int64_t j = 0; j <= paired; ++j) {
      const std::int64_t partner = j > 0 || !unpaired ? centre - j : 0;
#pragma GCC unroll 1
      for (int i = 0; i < 2; ++i) {
        load_row(maps, samples, (i == 0 ? centre + j : partner) * maps.width, room.rows[i]);
      }
      if constexpr (!kPowers) {
        square += square_of(room.rows[0], columns.count);
        if (j > 0 || unpaired) square += square_of(room.rows[1], columns.count);
      }
      if (j > 0) {
        for (std::int64_t i = 0; i < columns.count; ++i) {
          const V x = room.rows[0][i], y = room.rows[1][i];
          room.rows[0][i] = x + y;
          room.rows[1][i] = x - y;
        }
      }
      for (int i = 0; i < 2; ++i) fold(columns, room.rows[i], room.cosines[i], room.sines[i]);
      V* const to = room.columns + rows.place(j);
      transform_rows<kPowers>(columns, room, used, to, j > 0 ? to + odd : unpaired ? last : to);
    }
    for (std::int64_t k = 0; k < used; ++k) {
      if (unpaired) {
        V* const end = last + k * room.plane;
        end[odd] = -end[0];
        end[odd + room.part] = -end[room.part];
      }
      const std::int64_t slot = 2 * k * rows.slots;
      transform_column<kPowers>(rows, room.columns + k * room.plane, room.part,
                                kPowers ? powers + slot : powers,
                                keep == nullptr ? nullptr : keep->bins + slot, kept,
                                kPowers ? nullptr : keep->tiles + k * rows.tiles());
    }
    return square;
  }

  // Write the retained bins of up to kLanes channels from `channel` on, for `used` samples.
  template <class T, class M>
  static DPK_INLINE void write_bins(const Kept& keep, const M& maps, const V* kept,
                                    std::int64_t first, std::int64_t used, std::int64_t channel) {
    const std::int64_t channels = std::min<std::int64_t>(kLanes, maps.channels - channel);
    const std::int64_t step = 2 * maps.channels;
    for (std::int64_t i = 0; i < 2 * keep.R; ++i) {
      const std::int64_t r = i / 2, part = i % 2;
      const V* const re = kept + keep.from[r] * 2;
      const F s = static_cast<F>(keep.turn[2 * i]), t = static_cast<F>(keep.turn[2 * i + 1]);
      T* const to = static_cast<T*>(keep.out) +
                    ((r * maps.samples + first) * 2 + part) * maps.channels + channel;
      write_bin<T>(re, keep.plane(), s, t, channels, used, to, step);
    }
  }
  // One part of a bin: s times what `re` holds and t times what stands behind it.
  template <class T>
  static DPK_INLINE void write_bin(const V* re, std::int64_t plane, F s, F t, std::int64_t channels,
                                   std::int64_t used, T* to, std::int64_t step) {
    const auto turned = [&](std::int64_t c) DPK_INLINE {
      V x = s * re[c * plane];
      x += t * re[c * plane + 1];
      return x;
    };
    if constexpr (kLanes >= 4) {
      if (channels == kLanes) {
        V x[kLanes];
#pragma GCC unroll 16
        for (int c = 0; c < kLanes; ++c) x[c] = turned(c);
        transpose_all<V>(x);
        for (std::int64_t b = 0; b < used; ++b) {
          const auto line = __builtin_convertvector(x[b], Vector<T, kLanes>);
          __builtin_memcpy(to + b * step, &line, sizeof(line));
        }
        return;
      }
      for (std::int64_t begin = 0; begin < channels; begin += 4) {
        V x[4];
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c) x[c] = turned(begin + c);
        transpose<V>(x, std::make_integer_sequence<int, kLanes>{});
        with_size(static_cast<int>(channels - begin), [&](auto count) DPK_INLINE {
          constexpr int kCount = count < 4 ? count : 4;
          for (std::int64_t b = 0; b < used; ++b) {
            const F* const quad = reinterpret_cast<const F*>(x + b % 4) + b / 4 * 4;
#pragma GCC unroll 4
            for (int c = 0; c < kCount; ++c) {
              to[b * step + begin + c] = static_cast<T>(quad[c]);
            }
          }
        });
      }
    } else {
      for (std::int64_t c = 0; c < channels; ++c) {
        const V x = turned(c);
        for (std::int64_t b = 0; b < used; ++b) to[b * step + c] = static_cast<T>(x[b]);
      }
    }
  }

  // powers [slots, 2] of channels [begin, end) of `used` samples from `first` on; lanes without a
  // sample hold the last. Without powers, bins alone are kept, and `squares [kLanes]` are added to.
  template <bool kPowers>
  static DPK_INLINE void add_channels(const Maps<F>& maps, const Kept* keep, std::int64_t first,
                                      std::int64_t used, std::int64_t begin, std::int64_t end,
                                      V* powers, V* from, V* kept, double* squares = nullptr) {
    const Room room = make_room(from, maps.rows, maps.columns);
    if constexpr (kPowers) {
      for (std::int64_t i = 0; i < 2 * maps.slots(); ++i) powers[i] = V{};
    }
    each_channel(maps, 1, keep, first, used, begin, end, kept,
                 [&](const std::int64_t* samples, std::int64_t, V* bins) DPK_INLINE {
                   const V square = add_map<kPowers>(maps, samples, room, powers, keep, bins);
                   if constexpr (!kPowers) add_lanes(square, squares);
                 });
  }
  static DPK_INLINE void add_lanes(V values, double* sums) {
    for (int i = 0; i < kLanes; ++i) sums[i] += static_cast<double>(values[i]);
  }
  // add(where each lane's map begins, how many channels, where to keep their bins) for channels of
  // the range, `together` of them if the first is a multiple of it; then write their bins.
  template <class M, class Add>
  static DPK_INLINE void each_channel(const M& maps, std::int64_t together, const Kept* keep,
                                      std::int64_t first, std::int64_t used, std::int64_t begin,
                                      std::int64_t end, V* kept, const Add& add) {
    const std::int64_t size = maps.height * maps.width;
    const std::int64_t plane = keep == nullptr ? 0 : keep->plane();
    for (std::int64_t c = begin; c < end;) {
      std::int64_t samples[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        const std::int64_t b = std::min(first + i, first + used - 1);
        samples[i] = (b * maps.channels + c) * size;
      }
      const std::int64_t count = c % together == 0 && c + together <= end ? together : 1;
      add(samples, count, kept + c % kLanes * plane);
      c += count;
      if (keep == nullptr || (c % kLanes != 0 && c != maps.channels)) continue;
      const std::int64_t channel = (c - 1) / kLanes * kLanes;
      if (maps.narrow) {
        write_bins<float>(*keep, maps, kept, first, used, channel);
      } else {
        write_bins<double>(*keep, maps, kept, first, used, channel);
      }
    }
  }
};

}  // namespace dpkern::cpu::spectral
