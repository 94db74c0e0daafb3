// Products of block-circulant matrices, and weighted sums of their gradients.
//
// A product is a sum over blocks at each frequency, so that d entries of a block cost d products
// instead of d^2. Blocks are transformed on the way: folded about their first entry they are cosine
// and sine sums, which are products with tables as long as half a block, for as many samples (or
// blocks) at once as a vector has lanes. With X = c - i s the row convention has
//   Y_i = sum_j conj(W_ij) X_j:  c_y = w_c c + w_s s,  s_y = w_c s - w_s c
// and the weighted gradient sum_b conj(G_bi) X_bj the same form, with samples for blocks.

#include <algorithm>
#include <vector>

#include "cpu/circulant_lines.h"
#include "cpu/ghost_tiles.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"

namespace dpkern::cpu {
namespace {

using circulant::Lines;
using ghost::round_up;
using ghost::scratch;

constexpr std::int64_t kRowsTogether = 64;  // samples whose transforms are in the cache
constexpr std::int64_t kTerms = 64;         // terms of a sum whose lanes are in the first cache

template <class F, int kBytes>
struct Circulant : circulant::Blocks<F, kBytes> {
  using Base = circulant::Blocks<F, kBytes>;
  using Base::kTile, Base::kVectors, Base::kWide, Base::transform, Base::transform_back,
      Base::turn_in;
  using V = typename Base::V;

  // sums [row][2][kWide], `step` apart, += over n of scalars [row][2][n], whose rows are `between`
  // and whose parts are half of that apart, and lanes [n][2][kWide].
  template <int kRows, bool kReal>
  static DPK_INLINE void add_rows(const F* scalars, std::int64_t between, const F* lanes,
                                  std::int64_t apart, std::int64_t count, F* to,
                                  std::int64_t step) {
    V c[kRows][kVectors], s[kRows][kVectors];
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        c[i][v] = reinterpret_cast<const V*>(to + i * step)[v];
        if constexpr (!kReal) s[i][v] = reinterpret_cast<const V*>(to + i * step + kWide)[v];
      }
    }
    for (std::int64_t n = 0; n < count; ++n) {
      const V* const at = reinterpret_cast<const V*>(lanes + n * apart);
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
        const F* const scalar = scalars + i * between + n;
        const F cosine = scalar[0], sine = kReal ? F{0} : scalar[between / 2];
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
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        reinterpret_cast<V*>(to + i * step)[v] = c[i][v];
        if constexpr (!kReal) reinterpret_cast<V*>(to + i * step + kWide)[v] = s[i][v];
      }
    }
  }
  static DPK_INLINE void add(bool real, std::int64_t rows, const F* scalars, std::int64_t between,
                             const F* lanes, std::int64_t apart, std::int64_t count, F* to,
                             std::int64_t step) {
    for (std::int64_t n = 0; n < count; n += kTerms) {
      const std::int64_t terms = std::min(kTerms, count - n);
      if (real) {
        add_terms<true>(rows, scalars + n, between, lanes + n * apart, apart, terms, to, step);
      } else {
        add_terms<false>(rows, scalars + n, between, lanes + n * apart, apart, terms, to, step);
      }
    }
  }
  template <bool kReal>
  static DPK_INLINE void add_terms(std::int64_t rows, const F* scalars, std::int64_t between,
                                   const F* lanes, std::int64_t apart, std::int64_t terms, F* to,
                                   std::int64_t step) {
    constexpr int kTogether = kReal ? 2 * kTile : kTile;  // as many sums as registers hold
    std::int64_t i = 0;
    for (; i + kTogether <= rows; i += kTogether) {
      add_rows<kTogether, kReal>(scalars + i * between, between, lanes, apart, terms, to + i * step,
                                 step);
    }
    for (; i < rows; ++i) {
      add_rows<1, kReal>(scalars + i * between, between, lanes, apart, terms, to + i * step, step);
    }
  }

  // Where the spectra of consecutive blocks go, `columns` of them in a row: frequency k of column j
  // of row i to k * step + i * between + j, if one panel holds a row, the sine sum `behind` that.
  struct Places {
    std::int64_t columns, step, between, behind;
    std::int64_t panel, panel_step;  // columns of a panel, and what is between two
  };

  // Spectra of `count` consecutive blocks, with sine sums times `sign`.
  static DPK_INLINE void spectra_of(const Lines<F>& lines, const F* from, std::int64_t count,
                                    F sign, F* room, F* to, const Places& places) {
    F* const blocks = room;
    F* const spectra = blocks + lines.d * kWide;
    F* const folded = spectra + 2 * lines.K * kWide;
    std::int64_t row = 0, column = 0;
    for (std::int64_t first = 0; first < count; first += kWide) {
      const std::int64_t used = std::min<std::int64_t>(kWide, count - first);
      turn_in(from + first * lines.d, lines.d, used, lines.d, blocks);
      transform(lines, blocks, folded, spectra, 2 * kWide);
      for (std::int64_t begin = 0; begin < used;) {
        const std::int64_t in_panel = column % places.panel;
        const std::int64_t run =
            std::min({used - begin, places.columns - column, places.panel - in_panel});
        F* here = to + row * places.between + column / places.panel * places.panel_step + in_panel;
        const F* cosines = spectra + begin;
        for (std::int64_t k = 0; k < lines.K; ++k, here += places.step, cosines += 2 * kWide) {
          for (std::int64_t i = 0; i < run; ++i) here[i] = cosines[i];
          if (lines.real(k)) continue;
          for (std::int64_t i = 0; i < run; ++i)
            here[places.behind + i] = sign * cosines[kWide + i];
        }
        begin += run;
        column += run;
        if (column == places.columns) column = 0, ++row;
      }
    }
  }
  // Sums of `rows` rows at each frequency, [row][2][kWide], set to zero; those of sines where there
  // are any.
  static DPK_INLINE void clear(const Lines<F>& lines, std::int64_t rows, F* sums,
                               std::int64_t step) {
    for (std::int64_t k = 0; k < lines.K; ++k, sums += step) {
      if (!lines.real(k)) {
        std::fill(sums, sums + 2 * rows * kWide, F{0});
        continue;
      }
      for (std::int64_t i = 0; i < 2 * rows; i += 2) {
        std::fill(sums + i * kWide, sums + (i + 1) * kWide, F{0});
      }
    }
  }
  static std::int64_t room_of(const Lines<F>& lines) {
    return (lines.d + 2 * lines.K) * kWide + Base::room(lines);
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
    clear(lines, call.p, ys, y_step);
    for (std::int64_t k = 0; k < K; ++k) {
      add(lines.real(k), call.p, scalars + 2 * k * call.p * call.q, 2 * call.q, xs + k * x_step,
          2 * kWide, call.q, ys + k * y_step, 2 * kWide);
    }
    for (std::int64_t i = 0; i < call.p; ++i) {
      transform_back(lines, ys + 2 * i * kWide, y_step, folded, flat + i * d * kWide);
    }
    Base::template turn_out<false>(flat, used, call.p * d, call.y + first * call.p * d, call.p * d);
  }
  static std::int64_t multiply_room(const CirculantMultiply<F>& call, const Lines<F>& lines) {
    return (std::max(call.q, call.p) * lines.d + lines.K * (2 * (call.q + call.p) + 2)) * kWide +
           Base::room(lines);
  }
};

}  // namespace

// y [B, p, d] = the circulant blocks of `weight` times those of x.
template <class F>
void circulant_multiply(const CirculantMultiply<F>& call, int threads) {
  const Lines<F>& lines = circulant::lines_of<F>(call.d);
  F* const scalars = scratch<F, 5>(2 * lines.K * call.p * call.q);
  versioned_by_width([&](auto width) DPK_INLINE {
    using Of = Circulant<F, width>;
    F* const room = scratch<F, 6>(Of::room_of(lines));
    Of::spectra_of(lines, call.weight, call.p * call.q, static_cast<F>(call.sign), room, scalars,
                   {call.q, 2 * call.p * call.q, 2 * call.q, call.q, call.q, 0});
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
  const Lines<F>& lines = circulant::lines_of<F>(call.d);
  const std::int64_t K = lines.K, d = lines.d;
  std::int64_t wide = 0;
  versioned_by_width([&](auto width) DPK_INLINE { wide = Circulant<F, width>::kWide; });
  const std::int64_t panels = (call.q + wide - 1) / wide, lanes = 2 * wide;
  const bool sparse = 2 * panels * wide > 3 * call.q;  // a sample's blocks leave lanes empty
  // sums [K][panel][p][2][wide], xs [K][panel][row][2][wide], gs [K][p][2][row]
  const std::int64_t x_size = K * panels * kRowsTogether * lanes;
  F* const sums = scratch<F, 5>(K * panels * call.p * lanes);
  F* const xs = scratch<F, 6>(x_size + K * call.p * kRowsTogether * 2);
  F* const gs = xs + x_size;
  if (sparse) std::fill(xs, xs + x_size, F{0});  // lanes behind the last block
  versioned_by_width([&](auto width) DPK_INLINE {
    Circulant<F, width>::clear(lines, panels * call.p, sums, panels * call.p * lanes);
  });
  std::vector<std::int64_t> rows;
  rows.reserve(static_cast<std::size_t>(call.B * call.T));
  for (std::int64_t row = 0; row < call.B * call.T; ++row) {
    if (call.factors[row / call.T] != 0) rows.push_back(row);
  }
  const std::int64_t count = static_cast<std::int64_t>(rows.size());
  for (std::int64_t first = 0; first < count; first += kRowsTogether) {
    const std::int64_t used = std::min(kRowsTogether, count - first);
    const std::int64_t groups = (used + wide - 1) / wide;
    parallel_for(groups, 1, threads, [&](std::int64_t begin, std::int64_t end) {
      versioned_by_width([&](auto width) DPK_INLINE {
        using Of = Circulant<F, width>;
        const std::int64_t most = std::max(call.q, call.p) * d * Of::kWide;
        F* const room = scratch<F, 7>(Of::room_of(lines) + 2 * most);
        F *const held = room + Of::room_of(lines), *const flat = held + most;
        for (std::int64_t group = begin; group < end; ++group) {
          const std::int64_t from = group * Of::kWide, to = std::min(used, from + Of::kWide);
          for (std::int64_t n = from; n < to; ++n) {
            const std::int64_t row = rows[static_cast<std::size_t>(first + n)];
            const F *const g = call.g + row * call.p * d, factor = call.factors[row / call.T];
            F* const scaled = held + (n - from) * call.p * d;
            for (std::int64_t i = 0; i < call.p * d; ++i) scaled[i] = factor * g[i];
          }
          Of::turn_in(held, call.p * d, to - from, call.p * d, flat);
          for (std::int64_t i = 0; i < call.p; ++i) {
            F* const spectra = room + Of::Base::room(lines);
            Of::transform(lines, flat + i * d * Of::kWide, room, spectra, 2 * Of::kWide);
            for (std::int64_t k = 0; k < K; ++k) {
              F* const at = gs + (k * call.p + i) * 2 * kRowsTogether + from;
              std::copy_n(spectra + 2 * k * Of::kWide, Of::kWide, at);
              if (lines.real(k)) continue;
              std::copy_n(spectra + (2 * k + 1) * Of::kWide, Of::kWide, at + kRowsTogether);
            }
          }
          if (sparse) {  // blocks of several samples fill the lanes
            for (std::int64_t n = from; n < to; ++n) {
              const F* const x = call.x + rows[static_cast<std::size_t>(first + n)] * call.q * d;
              std::copy(x, x + call.q * d, held + (n - from) * call.q * d);
            }
            Of::spectra_of(lines, held, (to - from) * call.q, F{1}, room, xs + from * lanes,
                           {call.q, panels * kRowsTogether * lanes, lanes, Of::kWide, Of::kWide,
                            kRowsTogether * lanes});
            continue;
          }
          for (std::int64_t n = from; n < to; ++n) {
            const F* const x = call.x + rows[static_cast<std::size_t>(first + n)] * call.q * d;
            for (std::int64_t panel = 0; panel < panels; ++panel) {
              const std::int64_t j = panel * Of::kWide;
              Of::turn_in(x + j * d, d, std::min<std::int64_t>(Of::kWide, call.q - j), d, held);
              Of::transform(lines, held, room, xs + (panel * kRowsTogether + n) * lanes,
                            panels * kRowsTogether * lanes);
            }
          }
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
      F* const blocks = scratch<F, 7>(d * Of::kWide + Of::Base::room(lines));
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
