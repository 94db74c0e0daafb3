// The normalised inputs and scaled gradients are made twice, for the means and for dx, as in the
// kernels; without a weight nothing is scaled.

#include <algorithm>

#include "counted/ghost.h"
#include "counted/plain.h"

namespace dpkern::counted {
namespace {

// One row or channel of a normalisation: its entries, and what they are normalised with.
template <class F>
struct Line {
  Row<F> g, x;
  Counted<F> mean, rstd;
  bool centred;

  Counted<F> normal(std::size_t i) const { return centred ? (x[i] - mean) * rstd : x[i] * rstd; }
};

// g weight, or g.
template <class F>
Counted<F> scaled(Counted<F> g, const Operand<const F>* weight, std::int64_t i) {
  return weight == nullptr ? g : g * (*weight)[i];
}

// rstd (h - mean(h) - xhat mean(h xhat)).
template <class F>
Counted<F> gradient(const Line<F>& line, std::size_t i, Counted<F> h, Counted<F> h_mean,
                    Counted<F> hx_mean) {
  const Counted<F> centred = line.centred ? h - h_mean : h;
  return (centred - line.normal(i) * hx_mean) * line.rstd;
}

}  // namespace

template <class F>
void layer_norm_backward(const LayerNormOperands<F>& norm) {
  const bool centred = norm.centred;
  const std::int64_t n = norm.columns, lines = norm.batch * norm.rows;
  const Operand<const F> gs(norm.g, lines * n), xs(norm.x, lines * n);
  const Operand<const F> means(norm.mean, lines), rstds(norm.rstd, lines), scale(norm.weight, n);
  const Operand<const F>* const weight = norm.weight == nullptr ? nullptr : &scale;
  Operand<F> dx(norm.dx, lines * n), dweights(norm.dweight, norm.batch * n);
  Operand<F> dbiases(norm.dbias, norm.batch * n);
  const F count = static_cast<F>(n);
  for (std::int64_t b = 0; b < norm.batch; ++b) {
    Row<F> dweight = zeros<F>(n), dbias = zeros<F>(n);
    for (std::int64_t row = b * norm.rows; row < (b + 1) * norm.rows; ++row) {
      const Line<F> line{loaded<F>(gs, row * n, n), loaded<F>(xs, row * n, n),
                         centred ? Counted<F>(means[row]) : Counted<F>(), rstds[row], centred};
      Counted<F> h_sum, hx_sum;
      for (std::int64_t c = 0; c < n; ++c) {
        const auto i = static_cast<std::size_t>(c);
        const Counted<F> normal = line.normal(i), h = scaled(line.g[i], weight, c);
        hx_sum += h * normal;
        dweight[i] += line.g[i] * normal;
        if (centred) h_sum += h, dbias[i] += line.g[i];
      }
      const Counted<F> h_mean = centred ? h_sum / count : h_sum, hx_mean = hx_sum / count;
      for (std::int64_t c = 0; c < n; ++c) {
        const auto i = static_cast<std::size_t>(c);
        dx.store(row * n + c, gradient(line, i, scaled(line.g[i], weight, c), h_mean, hx_mean));
      }
    }
    for (std::int64_t c = 0; c < n; ++c) {
      dweights.store(b * n + c, dweight[static_cast<std::size_t>(c)]);
      if (centred) dbiases.store(b * n + c, dbias[static_cast<std::size_t>(c)]);
    }
  }
}

template <class F>
void group_norm_backward(const GroupNormOperands<F>& norm) {
  const std::int64_t n = norm.places, sets = norm.batch * norm.groups;
  const std::int64_t maps = sets * norm.channels;
  const Operand<const F> gs(norm.g, maps * n), xs(norm.x, maps * n);
  const Operand<const F> means(norm.mean, sets), rstds(norm.rstd, sets);
  const Operand<const F> scale(norm.weight, norm.groups * norm.channels);
  const Operand<const F>* const weight = norm.weight == nullptr ? nullptr : &scale;
  Operand<F> dx(norm.dx, maps * n), dweight(norm.dweight, maps), dbias(norm.dbias, maps);
  const F count = static_cast<F>(std::max<std::int64_t>(1, norm.channels * n));
  for (std::int64_t set = 0; set < sets; ++set) {
    const std::int64_t first = set * norm.channels;
    const std::int64_t place = set % norm.groups * norm.channels;
    std::vector<Line<F>> lines;
    Counted<F> h_total, hx_total;
    for (std::int64_t c = 0; c < norm.channels; ++c) {
      lines.push_back({loaded<F>(gs, (first + c) * n, n), loaded<F>(xs, (first + c) * n, n),
                       means[set], rstds[set], true});
      Counted<F> g_sum, gx_sum;
      for (std::size_t i = 0; i < lines.back().g.size(); ++i) {
        g_sum += lines.back().g[i];
        gx_sum += lines.back().g[i] * lines.back().normal(i);
      }
      dbias.store(first + c, g_sum);
      dweight.store(first + c, gx_sum);
      h_total += scaled(g_sum, weight, place + c);
      hx_total += scaled(gx_sum, weight, place + c);
    }
    const Counted<F> h_mean = h_total / count, hx_mean = hx_total / count;
    for (std::int64_t c = 0; c < norm.channels; ++c) {
      const Line<F>& line = lines[static_cast<std::size_t>(c)];
      for (std::size_t i = 0; i < line.g.size(); ++i) {
        const Counted<F> h = scaled(line.g[i], weight, place + c);
        dx.store((first + c) * n + static_cast<std::int64_t>(i),
                 gradient(line, i, h, h_mean, hx_mean));
      }
    }
  }
}

template void layer_norm_backward(const LayerNormOperands<float>&);
template void layer_norm_backward(const LayerNormOperands<double>&);
template void group_norm_backward(const GroupNormOperands<float>&);
template void group_norm_backward(const GroupNormOperands<double>&);

}  // namespace dpkern::counted
