// Norms of correlation maps by Parseval's product, from operand to norm without a spectrum in
// memory.
//
// A block of samples, one per lane, is transformed map by map; only the sums over channels of M and
// N (spectral_transform.h) are kept. Over one quarter of the frequencies
//
//   || h * R ||^2 = sum w_0 M_x M_d + w_1 N_x N_d + w_2 (+-M_x N_d + N_x M_d).
//
// Long lines (spectral_long.h) give the powers of a half plane instead, whose products are added.
// docs/spectral.md proves the bound that `from_above` adds.

#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/spectral_long.h"

namespace dpkern::cpu {
namespace {

using ghost::scratch;
using spectral::Kept;
using spectral::LongMaps;
using spectral::Maps;
using spectral::TransformOf;

constexpr int kMost = 64 / 4;  // samples of a block, at most

// What one sample's frequencies add up to, one group after the other.
struct Sums {
  double product = 0;  // the squared norm
  double larger = 0;   // sum w_0 M_x M_d, of which its rounding is a part
  double x_norm = 0;   // squared
  double g_norm = 0;
  double x_most = 0;  // largest powers
  double g_most = 0;
};

template <class M>
struct Plan {
  M x, g;
  double x_error, g_error;  // of a transform, relative to the norm of its map

  template <class T>
  Plan(const SpectralNorm<T>& call, bool wide)
      : x(maps(call, call.x, call.C, call.D, call.H, call.W, 0)),
        g(maps(call, call.g, call.O, call.Z, call.Y, call.X, call.N / 6)),
        x_error(call.errors[wide ? 2 : 0]),
        g_error(call.errors[wide ? 3 : 1]) {}

 private:
  using Line = decltype(M::rows);

  template <class T>
  static Line line(const SpectralNorm<T>& call, std::int64_t which) {
    const double* turns = call.turns;
    for (std::int64_t i = 0; i < which; ++i) turns += 2 * call.lines[3 * i];
    return {call.lines + 3 * which, turns};
  }
  // Of an operand whose lines begin with `first`: of depth, if maps are volumes, rows and columns.
  template <class T>
  static M maps(const SpectralNorm<T>& call, const T* data, std::int64_t channels,
                std::int64_t depth, std::int64_t height, std::int64_t width, std::int64_t first) {
    const bool deep = call.N == 18;
    const std::int64_t rows = first + (deep ? 1 : 0);
    M found{data,           sizeof(T) == 4, call.B,           channels,
            depth * height, width,          line(call, rows), line(call, rows + 1)};
    if constexpr (M::kParts == 1) {
      if (deep) found.depth = line(call, first);
      found.between = height;
    }
    return found;
  }
};

// The frequencies of one group of a block of samples, widened a register at a time.
template <class F, int kBytes>
struct Product {
  static constexpr int kLanes = kBytes / static_cast<int>(sizeof(F));
  static constexpr int kWide = kBytes / static_cast<int>(sizeof(double));
  using V = Vector<F, kLanes>;
  using D = Vector<double, kWide>;

  static DPK_INLINE D widened(const V* from, int part) {
    const auto narrow =
        ghost::load<Vector<F, kWide>>(reinterpret_cast<const F*>(from) + part * kWide);
    return __builtin_convertvector(narrow, D);
  }
  static DPK_INLINE D larger(D a, D b) { return a > b ? a : b; }
  static DPK_INLINE D size_of(D a) { return larger(a, -a); }

  // The same of powers: their products over a half plane.
  template <class Call>
  static DPK_INLINE void add_powers(const Call& call, const V* x, const V* g, Sums* sums) {
    for (int part = 0; part < kLanes / kWide; ++part) {
      D product{}, x_norm{}, g_norm{}, x_most{}, g_most{};
      for (std::int64_t k = 0; k < call.K; ++k) {
        const D x_power = widened(x + k, part);
        x_norm += call.x_weights[k] * x_power;
        if (call.weights[k] == 0) continue;
        const D g_power = widened(g + call.index[k], part);
        product += call.weights[k] * x_power * g_power;
        x_most = larger(x_most, x_power);
        g_most = larger(g_most, g_power);
      }
      for (std::int64_t k = 0; k < call.L; ++k) g_norm += call.g_weights[k] * widened(g + k, part);
      to_lanes(product, product, x_norm, g_norm, x_most, g_most, sums + part * kWide);
    }
  }
  template <class Call>
  static DPK_INLINE void add(const Call& call, const V* x, const V* g, Sums* sums) {
    for (int part = 0; part < kLanes / kWide; ++part) {
      D product{}, all{}, x_norm{}, g_norm{}, x_most{}, g_most{};
      for (std::int64_t k = 0; k < call.K; ++k) {
        const V* const other = g + 2 * call.index[k];
        const double* const w = call.weights + 3 * k;
        const D mx = widened(x + 2 * k, part), nx = widened(x + 2 * k + 1, part);
        x_norm += call.x_weights[k] * mx;
        if (w[0] == 0) continue;
        const D md = widened(other, part), nd = widened(other + 1, part);
        const D both = w[0] * mx * md;
        all += both;
        product += both;
        product += w[1] * nx * nd;
        if (w[2] != 0) product += w[2] * (w[1] > 0 ? mx * nd + nx * md : nx * md - mx * nd);
        x_most = larger(x_most, mx + 2 * size_of(nx));
        g_most = larger(g_most, md + 2 * size_of(nd));
      }
      for (std::int64_t k = 0; k < call.L; ++k)
        g_norm += call.g_weights[k] * widened(g + 2 * k, part);
      to_lanes(product, all, x_norm, g_norm, x_most, g_most, sums + part * kWide);
    }
  }
  static DPK_INLINE void to_lanes(D product, D all, D x_norm, D g_norm, D x_most, D g_most,
                                  Sums* sums) {
    for (int i = 0; i < kWide; ++i) {
      Sums& to = sums[i];
      to.product += product[i];
      to.larger += all[i];
      to.x_norm += x_norm[i];
      to.g_norm += g_norm[i];
      to.x_most = std::max(to.x_most, x_most[i]);
      to.g_most = std::max(to.g_most, g_most[i]);
    }
  }
};

// One function per instruction set and precision: everything in it is inlined once.
template <class M, class F>
void add_channels(const M& maps, const Kept* keep, std::int64_t first, std::int64_t used,
                  Range channels, F* powers, F* room, F* kept) {
  versioned_by_width([&](auto width) DPK_INLINE {
    using Of = TransformOf<M, width>;
    using V = typename Of::V;
    Of::template add_channels<true>(maps, keep, first, used, channels.begin, channels.end,
                                    reinterpret_cast<V*>(powers), reinterpret_cast<V*>(room),
                                    reinterpret_cast<V*>(kept));
  });
}

// Sums of `used` samples from `first` on.
template <class T, template <class> class M, class F>
void add_block(const SpectralNorm<T>& call, const Plan<M<F>>& plan, const Kept* keep,
               std::int64_t lanes, std::int64_t first, std::int64_t used, Sums* sums) {
  const M<F>&x = plan.x, &g = plan.g;
  constexpr int kParts = M<F>::kParts;
  const std::int64_t need[] = {std::max(x.room(), g.room()), kParts * x.slots(), kParts * g.slots(),
                               keep == nullptr ? 0 : keep[0].room(lanes),
                               keep == nullptr ? 0 : keep[1].room(lanes)};
  F* parts[5];
  F* next = scratch<F, 2>(lanes * (need[0] + need[1] + need[2] + need[3] + need[4]));
  for (int i = 0; i < 5; ++i) parts[i] = next, next += lanes * need[i];
  std::fill(parts[3], next, F{0});
  for (std::int64_t i = 0; i < call.groups; ++i) {
    const auto of_group = [&](std::int64_t channels) {
      return Range{channels / call.groups * i, channels / call.groups * (i + 1)};
    };
    add_channels(x, keep, first, used, of_group(call.C), parts[1], parts[0], parts[3]);
    add_channels(g, keep == nullptr ? keep : keep + 1, first, used, of_group(call.O), parts[2],
                 parts[0], parts[4]);
    versioned_by_width([&](auto width) DPK_INLINE {
      using Of = Product<F, width>;
      using V = typename Of::V;
      const V *const xs = reinterpret_cast<const V*>(parts[1]), *const gs =
                                                                    reinterpret_cast<const V*>(
                                                                        parts[2]);
      if constexpr (kParts == 1) {
        Of::add_powers(call, xs, gs, sums);
      } else {
        Of::add(call, xs, gs, sums);
      }
    });
  }
}

// Whether nothing that float cannot hold was lost on the way to these sums.
bool in_range(const Sums& sums) {
  constexpr double kLeast = 0x1p-80, kLargest = 0x1p120;
  return sums.x_norm >= kLeast && sums.g_norm >= kLeast && sums.x_most <= kLargest &&
         sums.g_most <= kLargest;
}

// || (A + e)(B + f) || <= || A B || + max A || f || + max B || e || + || e || || f ||.
template <class T, template <class> class M, class F>
double from_above(const SpectralNorm<T>& call, const Plan<M<F>>& plan, const Sums& sums) {
  constexpr bool kNarrow = sizeof(F) == 4;
  constexpr double kNorms = 1 + 0x1p-10;  // the operands' norms come from computed spectra
  const double x_norm = kNorms * std::sqrt(sums.x_norm);
  const double g_norm = kNorms * std::sqrt(sums.g_norm);
  const double rounding = kNarrow ? call.narrow_sums : call.wide_sums;
  // What underflows in a sum of squares, times the other operand's powers.
  const double channels = static_cast<double>((call.C + call.O) / call.groups);
  const double lost =
      kNarrow ? 16 * channels * 0x1p-126 * (x_norm * x_norm + g_norm * g_norm + 1) : 0;
  const double square = std::max(0.0, sums.product) + rounding * sums.larger + lost;
  const double slack = plan.g_error * g_norm * kNorms * std::sqrt(sums.x_most) +
                       plan.x_error * x_norm *
                           (kNorms * std::sqrt(sums.g_most) + call.share * plan.g_error * g_norm);
  const double norm = std::sqrt(square) + slack;
  return norm * norm * (1 + 0x1p-42);
}

// Whether one operand of a sample is zero and the other finite, so that its norm is exactly zero.
template <class T>
bool vanishes(const SpectralNorm<T>& call, std::int64_t sample, const Sums& sums) {
  const auto zero = [&](const T* from, std::int64_t size) {
    from += sample * size;
    return std::all_of(from, from + size, [](T entry) { return entry == 0; });
  };
  const bool finite = std::isfinite(sums.x_norm + sums.g_norm);
  return finite && ((sums.x_norm == 0 && zero(call.x, call.C * call.D * call.H * call.W)) ||
                    (sums.g_norm == 0 && zero(call.g, call.O * call.Z * call.Y * call.X)));
}

template <class T, template <class> class M, class F>
void norms(const SpectralNorm<T>& call, const Plan<M<F>>& plan, const Kept* keep,
           std::int64_t lanes, std::int64_t first, std::int64_t used, bool* trusted) {
  Sums sums[kMost];
  add_block(call, plan, keep, lanes, first, used, sums);
  for (std::int64_t i = 0; i < used; ++i) {
    if (vanishes(call, first + i, sums[i])) {
      call.squares[first + i] = 0;
      trusted[i] = true;
      continue;
    }
    trusted[i] = in_range(sums[i]);
    // Largest values drop NaN; the product of all frequencies does not.
    const double bad = sums[i].product - sums[i].product;
    call.squares[first + i] = bad == 0 ? from_above(call, plan, sums[i]) : bad;
  }
}

template <template <class> class M, class T>
void run(const SpectralNorm<T>& call, int threads) {
  const bool narrow = sizeof(T) == 4 && !call.wide;
  const Plan<M<double>> wide(call, true);
  std::vector<Plan<M<float>>> plans;
  if (narrow) plans.emplace_back(call, false);
  const Kept kept[2] = {
      {call.x_bin, call.x_from, call.x_turn, call.x_bins, call.x_count, call.retained},
      {call.g_bin, call.g_from, call.g_turn, call.g_bins, call.g_count, call.retained}};
  const Kept* const keep = call.x_bins == nullptr ? nullptr : kept;
  std::int64_t bytes = 0;
  versioned_by_width([&](auto width) DPK_INLINE { bytes = width; });
  const std::int64_t lanes = bytes / (narrow ? 4 : 8), blocks = (call.B + lanes - 1) / lanes;
  parallel_for(blocks, 1, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t block = begin; block < end; ++block) {
      const std::int64_t first = block * lanes, used = std::min(lanes, call.B - first);
      bool trusted[kMost], any[1];
      if (!narrow) {
        norms(call, wide, keep, lanes, first, used, trusted);
        continue;
      }
      norms(call, plans[0], keep, lanes, first, used, trusted);
      for (std::int64_t i = 0; i < used; ++i) {
        if (!trusted[i]) norms(call, wide, nullptr, lanes / 2, first + i, 1, any);
      }
    }
  });
}

}  // namespace

// Weights of one product for each slot say that lines are long.
template <class T>
void spectral_norm(const SpectralNorm<T>& call, int threads) {
  call.J == 1 ? run<LongMaps>(call, threads) : run<Maps>(call, threads);
}

template void spectral_norm<float>(const SpectralNorm<float>&, int);
template void spectral_norm<double>(const SpectralNorm<double>&, int);

}  // namespace dpkern::cpu
