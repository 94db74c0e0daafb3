#include "counted/spectral.h"

#include "counted/plain.h"

namespace dpkern::counted {
namespace {

template <class F>
struct Complex {
  Counted<F> re, im;
};

template <class W, class F>
Complex<W> complex_at(const F* spectra, std::int64_t i) {
  return {Counted<W>(Counted<F>(spectra[2 * i])), Counted<W>(Counted<F>(spectra[2 * i + 1]))};
}

// total += conj(a) b.
template <class F>
void add_product(const Complex<F>& a, const Complex<F>& b, Complex<F>& total) {
  total.re += a.re * b.re + a.im * b.im;
  total.im += a.re * b.im - a.im * b.re;
}

Counted<double> larger(Counted<double> a, Counted<double> b) { return choose(a > b, a, b); }

template <class F>
Counted<F> power(const Complex<F>& a) {
  return a.re * a.re + a.im * a.im;
}

}  // namespace

template <class F>
void spectral_place(const F* from, const Placement& p, F* grids) {
  const Operand<const F> x(from, p.count * p.height * p.width);
  for (std::int64_t i = 0; i < p.count * p.rows; ++i) {
    const std::int64_t map = i / p.rows, row = i % p.rows;
    for (std::int64_t column = 0; column < p.columns; ++column) {
      grids[(map * p.grid_height + p.top + row * p.row_step) * p.grid_width + p.left +
            column * p.column_step] = x.raw((map * p.height + row) * p.width + column);
    }
  }
}

template <class F>
void spectral_take(const F* grids, const Placement& p, F* to) {
  Operand<F> out(to, p.count * p.rows * p.columns);
  for (std::int64_t i = 0; i < p.count * p.rows; ++i) {
    const std::int64_t map = i / p.rows, row = i % p.rows;
    for (std::int64_t column = 0; column < p.columns; ++column) {
      out.store(i * p.columns + column, grids[(map * p.grid_height + row) * p.grid_width + column]);
    }
  }
}

template <class F>
void spectral_gain(F* spectra, std::int64_t count, std::int64_t bins, const F* gains) {
  for (std::int64_t i = 0; i < 2 * count * bins; ++i) {
    spectra[i] = (Counted<F>(spectra[i]) * gains[i / 2 % bins]).value;
  }
}

template <class F>
void spectral_powers(const F* spectra, std::int64_t batch, std::int64_t groups,
                     std::int64_t channels, std::int64_t bins, bool real, double* powers) {
  for (std::int64_t i = 0; i < batch * groups * bins; ++i) {
    Counted<double> total;
    for (std::int64_t c = 0; c < channels; ++c) {
      const std::int64_t at = (i / bins * channels + c) * bins + i % bins;
      if (real) {
        const Counted<double> value{Counted<F>(spectra[at])};
        total += value * value;
      } else {
        total += power(complex_at<double>(spectra, at));
      }
    }
    powers[i] = total.value;
  }
}

void spectral_squares(const SpectralBins& bins, const double* x_powers, const double* g_powers,
                      double* squares) {
  Operand<double> out(squares, bins.batch);
  constexpr double kNorms = 1 + 0x1p-10;  // the operands' norms come from computed spectra
  for (std::int64_t b = 0; b < bins.batch; ++b) {
    Counted<double> product, x_norm, g_norm, x_most, g_most;
    for (std::int64_t set = b * bins.groups; set < (b + 1) * bins.groups; ++set) {
      const double* const x = x_powers + set * bins.x_bins;
      const double* const g = g_powers + (bins.constant ? set : set * bins.g_bins);
      Row<double> folded = zeros<double>(bins.g_bins);
      for (std::int64_t k = 0; k < bins.x_bins; ++k) {
        const Counted<double> value = Counted<double>(bins.factors[k]) * x[k];
        if (bins.index == nullptr) {
          folded[static_cast<std::size_t>(k)] = value;
        } else {
          folded[static_cast<std::size_t>(bins.index[k])] += value;
        }
        x_norm += Counted<double>(bins.x_weights[k]) * x[k];
      }
      for (std::int64_t k = 0; k < bins.g_bins; ++k) {
        const Counted<double> power = g[bins.constant ? 0 : k];
        const Counted<double> other = folded[static_cast<std::size_t>(k)];
        product += other * power;
        g_norm += Counted<double>(bins.g_weights[k]) * power;
        x_most = larger(x_most, other);
        g_most = larger(g_most, power);
      }
    }
    // || (A + e)(B + f) || <= || A B || + max A || f || + max B || e || + || e || || f ||.
    const Counted<double> x_size = kNorms * sqrt(x_norm), g_size = kNorms * sqrt(g_norm);
    const Counted<double> slack =
        bins.error *
        (sqrt(g_most) * x_size + bins.share * g_size * (sqrt(x_most) + bins.error * x_size));
    const Counted<double> norm = sqrt(product) + slack;
    out.store(b, norm * norm * (1 + 0x1p-42));
  }
}

template <class F>
void spectral_gather(const F* spectra, std::int64_t batch, std::int64_t channels, std::int64_t bins,
                     bool real, std::int64_t kept, const std::int64_t* at,
                     const unsigned char* turned, F* out) {
  Operand<F> to(out, kept * batch * 2 * channels);
  for (std::int64_t k = 0; k < kept; ++k) {
    for (std::int64_t b = 0; b < batch; ++b) {
      for (std::int64_t c = 0; c < channels; ++c) {
        const std::int64_t row = b * channels + c, place = (k * batch + b) * 2 * channels + c;
        const Complex<F> value =
            real ? Complex<F>{spectra[row], F{0}} : complex_at<F>(spectra, row * bins + at[k]);
        to.store(place, value.re);
        to.store(place + channels, !real && turned[k] ? -value.im : value.im);
      }
    }
  }
}

template <class F>
void spectral_bins_sum(const F* x_bins, const F* g_bins, const F* factors, const BinsSum& s,
                       const F* cosines, const F* sines, F* out) {
  const std::int64_t x_channels = s.groups * s.inputs, g_channels = s.groups * s.outputs;
  const Operand<const F> xs(x_bins, 2 * s.kept * s.batch * x_channels);
  const Operand<const F> gs(g_bins, 2 * s.kept * s.batch * g_channels);
  const Operand<const F> weights(factors, s.batch);
  Operand<F> total(out, g_channels * s.inputs * s.taps);
  Row<F> used;
  std::vector<std::int64_t> samples;
  for (std::int64_t b = 0; b < s.batch; ++b) {
    const Counted<F> factor = weights[b];
    if (factor == F{0}) continue;
    used.push_back(factor), samples.push_back(b);
  }
  if (samples.empty()) return;
  const auto entries = g_channels * s.inputs * s.taps;
  Row<F> sums = zeros<F>(entries);
  for (std::int64_t k = 0; k < s.kept; ++k) {
    Row<F> scaled[2];
    for (std::size_t i = 0; i < samples.size(); ++i) {
      const std::int64_t row = (k * s.batch + samples[i]) * 2 * g_channels;
      for (std::int64_t o = 0; o < g_channels; ++o) {
        scaled[0].push_back(used[i] * gs[row + o]);
        scaled[1].push_back(used[i] * gs[row + g_channels + o]);
      }
    }
    for (std::int64_t pair = 0; pair < g_channels * s.inputs; ++pair) {
      const std::int64_t o = pair / s.inputs;
      const std::int64_t c = o / s.outputs * s.inputs + pair % s.inputs;
      Counted<F> re_re, im_im, re_im, im_re;
      for (std::size_t i = 0; i < samples.size(); ++i) {
        const std::int64_t row = (k * s.batch + samples[i]) * 2 * x_channels;
        const auto g = i * static_cast<std::size_t>(g_channels) + static_cast<std::size_t>(o);
        const Counted<F> re = xs[row + c], im = xs[row + x_channels + c];
        re_re += scaled[0][g] * re, im_im += scaled[1][g] * im;
        re_im += scaled[0][g] * im, im_re += scaled[1][g] * re;
      }
      const Counted<F> re = re_re + im_im, im = re_im - im_re;
      for (std::int64_t u = 0; u < s.taps; ++u) {
        Counted<F>& sum = sums[static_cast<std::size_t>(pair * s.taps + u)];
        sum += cosines[u * s.kept + k] * re;
        sum += sines[u * s.kept + k] * im;
      }
    }
  }
  for (std::int64_t i = 0; i < entries; ++i) {
    total.store(i, Counted<F>(total[i]) + sums[static_cast<std::size_t>(i)]);
  }
}

template <class F>
void spectral_separable(const F* x, const Separable& s, const F* down, const F* across, F* to) {
  const Operand<const F> from(x, s.maps * s.height * s.width);
  Operand<F> out(to, s.maps * s.used_rows * s.used_columns);
  for (std::int64_t map = 0; map < s.maps; ++map) {
    Row<F> rows;  // [rows, used columns]
    for (std::int64_t i = 0; i < s.rows * s.used_columns; ++i) {
      const std::int64_t row = i / s.used_columns, column = i % s.used_columns;
      Counted<F> sum;
      for (std::int64_t j = 0; j < s.columns; ++j) {
        sum += from[(map * s.height + row) * s.width + j] * across[column * s.columns + j];
      }
      rows.push_back(sum);
    }
    for (std::int64_t i = 0; i < s.used_rows * s.used_columns; ++i) {
      const std::int64_t row = i / s.used_columns, column = i % s.used_columns;
      Counted<F> sum;
      for (std::int64_t j = 0; j < s.rows; ++j) {
        sum += down[row * s.rows + j] * rows[static_cast<std::size_t>(j * s.used_columns + column)];
      }
      out.store(map * s.used_rows * s.used_columns + i, sum);
    }
  }
}

template <class F>
void spectral_whitened_norm(const F* gradients, std::int64_t batch, std::int64_t pairs,
                            std::int64_t taps, const double* matrix, std::int64_t rank,
                            double* squares) {
  const Operand<const F> from(gradients, batch * pairs * taps);
  const Operand<const double> m(matrix, rank * taps);
  Operand<double> out(squares, batch);
  const Row<double> rows = loaded<double>(m, 0, rank * taps);
  const Counted<double> error = gamma(taps + 8) * sqrt(square_of(rows.data(), rank * taps));
  for (std::int64_t b = 0; b < batch; ++b) {
    Counted<double> total, plain;
    for (std::int64_t pair = 0; pair < pairs; ++pair) {
      const Row<double> f = loaded<double>(from, (b * pairs + pair) * taps, taps);
      for (const Counted<double>& value : f) plain += value * value;
      for (std::int64_t r = 0; r < rank; ++r) {
        const Counted<double> y = dot(rows.data() + r * taps, f.data(), taps);
        total += y * y;
      }
    }
    const Counted<double> norm = sqrt(total) + error * sqrt(plain);
    out.store(b, norm * norm * (1 + 0x1p-42));
  }
}

template <class F>
void circulant_wide(const F* x, std::int64_t batch, std::int64_t per_sample, double* to,
                    double* squares) {
  const Operand<const F> from(x, batch * per_sample);
  for (std::int64_t b = 0; b < batch; ++b) {
    const Row<double> row = loaded<double>(from, b * per_sample, per_sample);
    squares[b] = square_of(row.data(), per_sample).value;
    for (const Counted<double>& value : row) *to++ = value.value;
  }
}

template <class F>
void circulant_used(const F* x, const F* factors, bool scale, std::int64_t batch,
                    std::int64_t per_sample, F* to) {
  const Operand<const F> from(x, batch * per_sample);
  const Operand<const F> weights(factors, batch);
  for (std::int64_t b = 0; b < batch; ++b) {
    Counted<F> factor(F{1});
    if (scale) {
      factor = weights[b];
      if (factor == F{0}) continue;
    } else if (factors != nullptr && factors[b] == 0) {
      continue;
    }
    for (std::int64_t i = b * per_sample; i < (b + 1) * per_sample; ++i) {
      *to++ = scale ? (factor * from[i]).value : from.raw(i);
    }
  }
}

void circulant_squares(const double* x, const double* g, const Circulant& s, CirculantRoute route,
                       const double* weights, const double* x_squares, const double* g_squares,
                       double rounding, double transforming, double* squares) {
  const std::int64_t bins = s.block / 2 + 1;
  Operand<double> out(squares, s.batch);
  for (std::int64_t b = 0; b < s.batch; ++b) {
    Counted<double> square;
    for (std::int64_t k = 0; k < bins; ++k) {
      const auto xs = [&](std::int64_t t, std::int64_t j) {
        return complex_at<double>(x, ((b * s.positions + t) * s.inputs + j) * bins + k);
      };
      const auto gs = [&](std::int64_t t, std::int64_t i) {
        return complex_at<double>(g, ((b * s.positions + t) * s.outputs + i) * bins + k);
      };
      Counted<double> pairs;
      if (route == CirculantRoute::kRankOne) {
        Counted<double> x_power, g_power;
        for (std::int64_t j = 0; j < s.inputs; ++j) x_power += power(xs(0, j));
        for (std::int64_t i = 0; i < s.outputs; ++i) g_power += power(gs(0, i));
        pairs = x_power * g_power;
      } else if (route == CirculantRoute::kPositions) {
        for (std::int64_t t = 0; t < s.positions; ++t) {
          for (std::int64_t other = 0; other < s.positions; ++other) {
            Complex<double> u, v;
            for (std::int64_t i = 0; i < s.outputs; ++i) add_product(gs(t, i), gs(other, i), u);
            for (std::int64_t j = 0; j < s.inputs; ++j) add_product(xs(other, j), xs(t, j), v);
            pairs += u.re * v.re - u.im * v.im;
          }
        }
        pairs = larger(pairs, Counted<double>());
      } else {
        for (std::int64_t i = 0; i < s.outputs; ++i) {
          for (std::int64_t j = 0; j < s.inputs; ++j) {
            Complex<double> entry;
            for (std::int64_t t = 0; t < s.positions; ++t) add_product(gs(t, i), xs(t, j), entry);
            pairs += power(entry);
          }
        }
      }
      square += pairs * weights[k];
    }
    const Counted<double> sizes =
        sqrt(Counted<double>(x_squares[b])) * sqrt(Counted<double>(g_squares[b]));
    Counted<double> norm;
    if (route == CirculantRoute::kPositions) {  // the square itself is what is rounded
      const double root = std::sqrt(static_cast<double>(s.block));
      norm = sqrt(square + 2 * root * rounding * (sizes * sizes)) + transforming * sizes;
    } else {
      norm = sqrt(square) + (rounding + transforming) * sizes;
    }
    out.store(b, norm * norm * (1 + 0x1p-42));
  }
}

template <class F>
void circulant_products(const F* x, const F* g, const Circulant& s, const F* gains, F* out) {
  const std::int64_t bins = s.block / 2 + 1;
  for (std::int64_t i = 0; i < s.batch * s.outputs * s.inputs * bins; ++i) {
    const std::int64_t k = i % bins, column = i / bins % s.inputs;
    const std::int64_t row = i / bins / s.inputs % s.outputs, b = i / bins / s.inputs / s.outputs;
    Complex<F> total;
    for (std::int64_t t = b * s.positions; t < (b + 1) * s.positions; ++t) {
      add_product(complex_at<F>(g, (t * s.outputs + row) * bins + k),
                  complex_at<F>(x, (t * s.inputs + column) * bins + k), total);
    }
    if (gains != nullptr) total = {total.re * gains[k], total.im * gains[k]};
    out[2 * i] = total.re.value, out[2 * i + 1] = total.im.value;
  }
}

template <class F>
void circulant_keep(const F* made, std::int64_t batch, std::int64_t entries, F* grads,
                    double* squares) {
  Operand<F> kept(grads, batch * entries);
  Operand<double> out(squares, batch);
  for (std::int64_t b = 0; b < batch; ++b) {
    Counted<double> square;
    for (std::int64_t i = b * entries; i < (b + 1) * entries; ++i) {
      kept.store(i, made[i]);
      const Counted<double> wide{Counted<F>(made[i])};
      square += wide * wide;
    }
    out.store(b, square);
  }
}

template <class F>
void circulant_add(const F* made, std::int64_t entries, F* out) {
  Operand<F> total(out, entries);
  for (std::int64_t i = 0; i < entries; ++i) total.store(i, Counted<F>(total[i]) + made[i]);
}

#define DPK_COUNTED(F)                                                                            \
  template void spectral_place(const F*, const Placement&, F*);                                   \
  template void spectral_take(const F*, const Placement&, F*);                                    \
  template void spectral_gain(F*, std::int64_t, std::int64_t, const F*);                          \
  template void spectral_powers(const F*, std::int64_t, std::int64_t, std::int64_t, std::int64_t, \
                                bool, double*);                                                   \
  template void spectral_gather(const F*, std::int64_t, std::int64_t, std::int64_t, bool,         \
                                std::int64_t, const std::int64_t*, const unsigned char*, F*);     \
  template void spectral_bins_sum(const F*, const F*, const F*, const BinsSum&, const F*,         \
                                  const F*, F*);                                                  \
  template void spectral_separable(const F*, const Separable&, const F*, const F*, F*);           \
  template void spectral_whitened_norm(const F*, std::int64_t, std::int64_t, std::int64_t,        \
                                       const double*, std::int64_t, double*);                     \
  template void circulant_wide(const F*, std::int64_t, std::int64_t, double*, double*);           \
  template void circulant_used(const F*, const F*, bool, std::int64_t, std::int64_t, F*);         \
  template void circulant_products(const F*, const F*, const Circulant&, const F*, F*);           \
  template void circulant_keep(const F*, std::int64_t, std::int64_t, F*, double*);                \
  template void circulant_add(const F*, std::int64_t, F*);
DPK_COUNTED(float)
DPK_COUNTED(double)
#undef DPK_COUNTED

}  // namespace dpkern::counted
