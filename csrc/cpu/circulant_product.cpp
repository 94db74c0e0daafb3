// Products of block-circulant matrices, and weighted sums of their gradients.
//
// A product is a sum over blocks at each frequency, so that d entries of a block cost d products
// instead of d^2. Blocks are transformed on the way: folded about their first entry they are cosine
// and sine sums, which are products with tables as long as half a block, for as many samples (or
// blocks) at once as a vector has lanes. With X = c - i s the row convention has
//   Y_i = sum_j conj(W_ij) X_j:  c_y = w_c c + w_s s,  s_y = w_c s - w_s c
// and the weighted gradient sum_b conj(G_bi) X_bj the same form, with samples for blocks.

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/ghost_tiles.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"

namespace dpkern::cpu {
namespace {

using ghost::load;
using ghost::round_up;
using ghost::scratch;

constexpr std::int64_t kRowsTogether = 128;  // samples whose transforms are in the cache

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

template <class F, int kBytes>
struct Circulant {
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

  // sums [row][2][kWide], `step` apart, += over n of scalars [row][n][2] and lanes [n][2][kWide].
  template <int kRows, bool kReal>
  static DPK_INLINE void add_rows(const F* scalars, std::int64_t between, const F* lanes,
                                  std::int64_t apart, std::int64_t count, F* to,
                                  std::int64_t step) {
    V c[kRows][kVectors], s[kRows][kVectors];
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        c[i][v] = reinterpret_cast<const V*>(to + i * step)[v];
        s[i][v] = reinterpret_cast<const V*>(to + i * step + kWide)[v];
      }
    }
    for (std::int64_t n = 0; n < count; ++n) {
      const V* const at = reinterpret_cast<const V*>(lanes + n * apart);
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i) {
        const F cosine = scalars[i * between + 2 * n], sine = scalars[i * between + 2 * n + 1];
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          c[i][v] += cosine * at[v];
          if constexpr (!kReal) {
            c[i][v] += sine * at[kVectors + v];
            s[i][v] += cosine * at[kVectors + v];
            s[i][v] -= sine * at[v];
          }
        }
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        reinterpret_cast<V*>(to + i * step)[v] = c[i][v];
        reinterpret_cast<V*>(to + i * step + kWide)[v] = s[i][v];
      }
    }
  }
  static DPK_INLINE void add(bool real, std::int64_t rows, const F* scalars, std::int64_t between,
                             const F* lanes, std::int64_t apart, std::int64_t count, F* to,
                             std::int64_t step) {
    for (std::int64_t i = 0; i < rows;) {
      const F* const from = scalars + i * between;
      F* const at = to + i * step;
      if (rows - i >= kTile) {
        if (real) {
          add_rows<kTile, true>(from, between, lanes, apart, count, at, step);
        } else {
          add_rows<kTile, false>(from, between, lanes, apart, count, at, step);
        }
        i += kTile;
      } else {
        add_rows<1, false>(from, between, lanes, apart, count, at, step);
        i += 1;
      }
    }
  }

  // Spectra of `count` consecutive blocks as scalars: frequency k of block n stands at
  // to[k * step + n * apart], cosine sum first, sine sum times `sign` behind it.
  static DPK_INLINE void scalars_of(const Lines<F>& lines, const F* from, std::int64_t count,
                                    F factor, F sign, F* room, F* to, std::int64_t step,
                                    std::int64_t apart) {
    F* const blocks = room;
    F* const spectra = blocks + lines.d * kWide;
    F* const folded = spectra + 2 * lines.K * kWide;
    for (std::int64_t first = 0; first < count; first += kWide) {
      const std::int64_t used = std::min<std::int64_t>(kWide, count - first);
      turn_in(from + first * lines.d, lines.d, used, lines.d, blocks);
      transform(lines, blocks, folded, spectra, 2 * kWide);
      for (std::int64_t k = 0; k < lines.K; ++k) {
        const F* const at = spectra + 2 * k * kWide;
        F* const here = to + k * step + first * apart;
        for (std::int64_t i = 0; i < used; ++i) {
          here[i * apart] = factor * at[i];
          here[i * apart + 1] = sign * factor * at[kWide + i];
        }
      }
    }
  }
  static std::int64_t room_of(const Lines<F>& lines) {
    return (lines.d + 3 * lines.K + 2) * kWide + lines.d * kWide;
  }

  // kWide rows of y = W x.
  static DPK_INLINE void multiply(const CirculantMultiply<F>& call, const Lines<F>& lines,
                                  const F* scalars, std::int64_t first, F* room) {
    const std::int64_t used = std::min<std::int64_t>(kWide, call.B - first);
    const std::int64_t most = std::max(call.q, call.p), d = lines.d, K = lines.K;
    // An odd number of vectors between frequencies keeps them in different sets of the cache.
    const std::int64_t x_step = (2 * call.q + 1) * kWide, y_step = (2 * call.p + 1) * kWide;
    F* const flat = room;
    F* const xs = flat + most * d * kWide;
    F* const ys = xs + K * x_step;
    F* const folded = ys + K * y_step;
    turn_in(call.x + first * call.q * d, call.q * d, used, call.q * d, flat);
    for (std::int64_t j = 0; j < call.q; ++j) {
      transform(lines, flat + j * d * kWide, folded, xs + 2 * j * kWide, x_step);
    }
    std::fill(ys, ys + K * y_step, F{0});
    for (std::int64_t k = 0; k < K; ++k) {
      add(lines.real(k), call.p, scalars + 2 * k * call.p * call.q, 2 * call.q, xs + k * x_step,
          2 * kWide, call.q, ys + k * y_step, 2 * kWide);
    }
    for (std::int64_t i = 0; i < call.p; ++i) {
      transform_back(lines, ys + 2 * i * kWide, y_step, folded, flat + i * d * kWide);
    }
    turn_out<false>(flat, used, call.p * d, call.y + first * call.p * d, call.p * d);
  }
  static std::int64_t multiply_room(const CirculantMultiply<F>& call, const Lines<F>& lines) {
    return (std::max(call.q, call.p) * lines.d + lines.K * (2 * (call.q + call.p) + 2) +
            2 * lines.K) *
           kWide;
  }
};

}  // namespace

// y [B, p, d] = the circulant blocks of `weight` times those of x.
template <class F>
void circulant_multiply(const CirculantMultiply<F>& call, int threads) {
  const Lines<F> lines(call.d);
  F* const scalars = scratch<F, 5>(2 * lines.K * call.p * call.q);
  versioned_by_width([&](auto width) DPK_INLINE {
    using Of = Circulant<F, width>;
    F* const room = scratch<F, 6>(Of::room_of(lines));
    for (std::int64_t i = 0; i < call.p; ++i) {
      Of::scalars_of(lines, call.weight + i * call.q * call.d, call.q, F{1},
                     static_cast<F>(call.sign), room, scalars + 2 * i * call.q, 2 * call.p * call.q,
                     2);
    }
  });
  std::int64_t wide = 0;
  versioned_by_width([&](auto width) DPK_INLINE { wide = Circulant<F, width>::kWide; });
  parallel_for((call.B + wide - 1) / wide, 1, threads, [&](std::int64_t begin, std::int64_t end) {
    versioned_by_width([&](auto width) DPK_INLINE {
      using Of = Circulant<F, width>;
      F* const room = scratch<F, 7>(Of::multiply_room(call, lines));
      for (std::int64_t tile = begin; tile < end; ++tile) {
        Of::multiply(call, lines, scalars, tile * Of::kWide, room);
      }
    });
  });
}

// out [p, q, d] += sum_b factors_b gains(k) conj(G_bi(k)) X_bj(k), without samples of factor 0.
template <class F>
void circulant_add(const CirculantAdd<F>& call, int threads) {
  const Lines<F> lines(call.d);
  const std::int64_t K = lines.K, d = lines.d;
  std::int64_t wide = 0;
  versioned_by_width([&](auto width) DPK_INLINE { wide = Circulant<F, width>::kWide; });
  const std::int64_t panels = (call.q + wide - 1) / wide, lanes = 2 * wide;
  // sums [K][panel][p][2][wide], xs [K][panel][row][2][wide], gs [K][p][row][2]
  const std::int64_t x_size = K * panels * kRowsTogether * lanes;
  F* const sums = scratch<F, 5>(K * panels * call.p * lanes);
  F* const xs = scratch<F, 6>(x_size + K * call.p * kRowsTogether * 2);
  F* const gs = xs + x_size;
  std::fill(sums, sums + K * panels * call.p * lanes, F{0});
  std::vector<std::int64_t> rows;
  rows.reserve(static_cast<std::size_t>(call.B * call.T));
  for (std::int64_t row = 0; row < call.B * call.T; ++row) {
    if (call.factors[row / call.T] != 0) rows.push_back(row);
  }
  const std::int64_t count = static_cast<std::int64_t>(rows.size());
  for (std::int64_t first = 0; first < count; first += kRowsTogether) {
    const std::int64_t used = std::min(kRowsTogether, count - first);
    parallel_for(used, 8, threads, [&](std::int64_t begin, std::int64_t end) {
      versioned_by_width([&](auto width) DPK_INLINE {
        using Of = Circulant<F, width>;
        F* const room = scratch<F, 7>(Of::room_of(lines));
        for (std::int64_t n = begin; n < end; ++n) {
          const std::int64_t row = rows[static_cast<std::size_t>(first + n)];
          for (std::int64_t panel = 0; panel < panels; ++panel) {
            const std::int64_t j = panel * Of::kWide;
            Of::turn_in(call.x + (row * call.q + j) * d, d,
                        std::min<std::int64_t>(Of::kWide, call.q - j), d, room);
            Of::transform(lines, room, room + d * Of::kWide,
                          xs + (panel * kRowsTogether + n) * lanes, panels * kRowsTogether * lanes);
          }
          Of::scalars_of(lines, call.g + row * call.p * d, call.p, call.factors[row / call.T], F{1},
                         room, gs + 2 * n, call.p * kRowsTogether * 2, 2 * kRowsTogether);
        }
      });
    });
    parallel_for(K * panels, 1, threads, [&](std::int64_t begin, std::int64_t end) {
      versioned_by_width([&](auto width) DPK_INLINE {
        using Of = Circulant<F, width>;
        for (std::int64_t at = begin; at < end; ++at) {
          const std::int64_t k = at / panels;
          Of::add(lines.real(k), call.p, gs + k * call.p * kRowsTogether * 2, 2 * kRowsTogether,
                  xs + at * kRowsTogether * lanes, lanes, used, sums + at * call.p * lanes, lanes);
        }
      });
    });
  }
  parallel_for(call.p, 1, threads, [&](std::int64_t begin, std::int64_t end) {
    versioned_by_width([&](auto width) DPK_INLINE {
      using Of = Circulant<F, width>;
      const std::int64_t step = panels * call.p * lanes;
      F* const blocks = scratch<F, 7>((2 * d + 2 * K) * Of::kWide);
      for (std::int64_t i = begin; i < end; ++i) {
        for (std::int64_t panel = 0; panel < panels; ++panel) {
          F* const mine = sums + (panel * call.p + i) * lanes;
          for (std::int64_t k = 0; call.gains != nullptr && k < K; ++k) {
            const F gain = static_cast<F>(call.gains[k]);
            for (std::int64_t lane = 0; lane < lanes; ++lane) mine[k * step + lane] *= gain;
          }
          Of::transform_back(lines, mine, step, blocks + d * Of::kWide, blocks);
          const std::int64_t j = panel * Of::kWide;
          Of::template turn_out<true>(blocks, std::min<std::int64_t>(Of::kWide, call.q - j), d,
                                      call.out + (i * call.q + j) * d, d);
        }
      }
    });
  });
}

template void circulant_multiply<float>(const CirculantMultiply<float>&, int);
template void circulant_multiply<double>(const CirculantMultiply<double>&, int);
template void circulant_add<float>(const CirculantAdd<float>&, int);
template void circulant_add<double>(const CirculantAdd<double>&, int);

}  // namespace dpkern::cpu
