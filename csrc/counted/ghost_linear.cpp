#include "counted/ghost.h"
#include "counted/plain.h"

namespace dpkern::counted {
namespace {

// One sample, in double.
struct Sample {
  Row<double> a, g;
  std::int64_t positions, inputs, outputs;

  const Counted<double>* a_row(std::int64_t t) const { return a.data() + t * inputs; }
  const Counted<double>* g_row(std::int64_t t) const { return g.data() + t * outputs; }
};

Counted<double> rank_one(const Sample& s) {
  const double slack = 1 + gamma(s.inputs + s.outputs + 4);
  return square_of(s.a.data(), s.inputs) * square_of(s.g.data(), s.outputs) * slack;
}

// sum over pairs of positions of u v with u = <a_t, a_t'>, v = <g_t, g_t'>, and what bounds its
// rounding: sum |a_t| |a_t'| |v| + |g_t| |g_t'| |u|. Pairs off the diagonal count twice.
Counted<double> gram(const Sample& s) {
  Row<double> a_norms, g_norms;
  Counted<double> diagonal, rest, diagonal_error, rest_error, products;
  const auto pair = [&](std::int64_t t, std::int64_t other, Counted<double> u, Counted<double> v,
                        Counted<double>& square, Counted<double>& error) {
    const auto i = static_cast<std::size_t>(t), j = static_cast<std::size_t>(other);
    square += u * v;
    error += a_norms[i] * a_norms[j] * fabs(v) + g_norms[i] * g_norms[j] * fabs(u);
  };
  for (std::int64_t t = 0; t < s.positions; ++t) {
    const Counted<double> u = square_of(s.a_row(t), s.inputs);
    const Counted<double> v = square_of(s.g_row(t), s.outputs);
    a_norms.push_back(sqrt(u)), g_norms.push_back(sqrt(v));
    products += a_norms.back() * g_norms.back();
    pair(t, t, u, v, diagonal, diagonal_error);
    for (std::int64_t other = 0; other < t; ++other) {
      pair(t, other, dot(s.a_row(t), s.a_row(other), s.inputs),
           dot(s.g_row(t), s.g_row(other), s.outputs), rest, rest_error);
    }
  }
  const Counted<double> square = diagonal + 2.0 * rest;
  const Counted<double> error = diagonal_error + 2.0 * rest_error;
  const double slack = gamma(s.inputs + s.outputs + 16);
  const double second = slack * slack + gamma(s.positions * s.positions + 64);
  return square + (slack * error + second * products * products);
}

Counted<double> direct(const Sample& s) {
  Counted<double> square, absolute;
  for (std::int64_t o = 0; o < s.outputs; ++o) {
    for (std::int64_t i = 0; i < s.inputs; ++i) {
      Counted<double> entry;
      for (std::int64_t t = 0; t < s.positions; ++t) entry += s.g_row(t)[o] * s.a_row(t)[i];
      square += entry * entry;
    }
  }
  for (std::int64_t t = 0; t < s.positions; ++t) {
    absolute += sqrt(square_of(s.a_row(t), s.inputs)) * sqrt(square_of(s.g_row(t), s.outputs));
  }
  const std::int64_t terms = 2 * (s.positions + s.inputs + s.outputs) + 8;
  const Counted<double> norm = sqrt(square) + gamma(terms) * absolute;
  return norm * norm * (1 + gamma(s.inputs * s.outputs + 16));
}

}  // namespace

template <class F>
void linear_norm(const F* a, const F* g, const LinearSizes& sizes, Route route, double* squares) {
  const std::int64_t a_size = sizes.positions * sizes.inputs;
  const std::int64_t g_size = sizes.positions * sizes.outputs;
  const Operand<const F> as(a, sizes.batch * a_size), gs(g, sizes.batch * g_size);
  Operand<double> out(squares, sizes.batch);
  for (std::int64_t b = 0; b < sizes.batch; ++b) {
    const Sample s{loaded<double>(as, b * a_size, a_size), loaded<double>(gs, b * g_size, g_size),
                   sizes.positions, sizes.inputs, sizes.outputs};
    out.store(b, route == Route::kRankOne ? rank_one(s)
                 : route == Route::kGram  ? gram(s)
                                          : direct(s));
  }
}

template <class F>
void linear_gradient(const F* a, const F* g, const LinearSizes& sizes, F* grads, double* squares) {
  const std::int64_t a_size = sizes.positions * sizes.inputs;
  const std::int64_t g_size = sizes.positions * sizes.outputs;
  const std::int64_t entries = sizes.inputs * sizes.outputs;
  const Operand<const F> as(a, sizes.batch * a_size), gs(g, sizes.batch * g_size);
  Operand<F> kept(grads, sizes.batch * entries);
  Operand<double> out(squares, sizes.batch);
  for (std::int64_t b = 0; b < sizes.batch; ++b) {
    const Row<F> rows = loaded<F>(as, b * a_size, a_size), outs = loaded<F>(gs, b * g_size, g_size);
    Counted<double> square;
    for (std::int64_t e = 0; e < entries; ++e) {
      Counted<F> entry;
      for (std::int64_t t = 0; t < sizes.positions; ++t) {
        entry += outs[static_cast<std::size_t>(t * sizes.outputs + e / sizes.inputs)] *
                 rows[static_cast<std::size_t>(t * sizes.inputs + e % sizes.inputs)];
      }
      kept.store(b * entries + e, entry);
      const Counted<double> wide(entry);
      square += wide * wide;
    }
    out.store(b, square * (1 + gamma(entries + 4)));
  }
}

template <class F>
void linear_sum(const F* a, const F* g, const LinearSizes& sizes, const F* factors, F* out) {
  const std::int64_t a_size = sizes.positions * sizes.inputs;
  const std::int64_t g_size = sizes.positions * sizes.outputs;
  const std::int64_t entries = sizes.inputs * sizes.outputs;
  const Operand<const F> as(a, sizes.batch * a_size), gs(g, sizes.batch * g_size);
  const Operand<const F> weights(factors, sizes.batch);
  Operand<F> total(out, entries);
  Row<F> sums = zeros<F>(entries);
  bool any = false;
  for (std::int64_t b = 0; b < sizes.batch; ++b) {
    const Counted<F> factor = weights[b];
    if (factor == F{0}) continue;
    any = true;
    const Row<F> rows = loaded<F>(as, b * a_size, a_size);
    Row<F> outs = loaded<F>(gs, b * g_size, g_size);
    for (Counted<F>& value : outs) value *= factor;
    for (std::int64_t e = 0; e < entries; ++e) {
      for (std::int64_t t = 0; t < sizes.positions; ++t) {
        sums[static_cast<std::size_t>(e)] +=
            outs[static_cast<std::size_t>(t * sizes.outputs + e / sizes.inputs)] *
            rows[static_cast<std::size_t>(t * sizes.inputs + e % sizes.inputs)];
      }
    }
  }
  for (std::int64_t e = 0; any && e < entries; ++e) {
    total.store(e, Counted<F>(total[e]) + sums[static_cast<std::size_t>(e)]);
  }
}

template <class F>
void matmul(const F* x, const F* w, const F* bias, std::int64_t rows, std::int64_t inner,
            std::int64_t columns, bool transposed, F* out) {
  const Operand<const F> left(x, rows * inner), right(w, inner * columns);
  const Operand<const F> added(bias, bias == nullptr ? 0 : columns);
  Operand<F> result(out, rows * columns);
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < columns; ++c) {
      Counted<F> sum;
      for (std::int64_t k = 0; k < inner; ++k) {
        sum += left[r * inner + k] * right[transposed ? c * inner + k : k * columns + c];
      }
      result.store(r * columns + c, bias == nullptr ? sum : sum + added[c]);
    }
  }
}

#define DPK_COUNTED(F)                                                                         \
  template void linear_norm(const F*, const F*, const LinearSizes&, Route, double*);           \
  template void linear_gradient(const F*, const F*, const LinearSizes&, F*, double*);          \
  template void linear_sum(const F*, const F*, const LinearSizes&, const F*, F*);              \
  template void matmul(const F*, const F*, const F*, std::int64_t, std::int64_t, std::int64_t, \
                       bool, F*);
DPK_COUNTED(float)
DPK_COUNTED(double)
#undef DPK_COUNTED

}  // namespace dpkern::counted
