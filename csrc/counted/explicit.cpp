#include "counted/factor.h"
#include "counted/kernels.h"

namespace dpkern::counted {

template <class F>
void explicit_norm(const std::vector<cpu::Explicit<F>>& parts, std::int64_t batch,
                   double* squares) {
  std::vector<Operand<const F>> rows;
  for (const auto& part : parts) rows.emplace_back(part.rows, batch * part.columns);
  Operand<double> out(squares, batch);
  for (std::int64_t b = 0; b < batch; ++b) {
    Total<double> total;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const std::int64_t columns = parts[i].columns;
      total.add(
          power_sum([&](std::int64_t j) { return wide(rows[i][b * columns + j]); }, columns, 2));
    }
    out.store(b, total.total());
  }
}

template <class F>
void contract(const std::vector<cpu::Explicit<F>>& parts, const F* factors, std::int64_t batch) {
  const Operand<const F> weights(factors, batch);
  for (const auto& part : parts) {
    if (part.columns == 0) continue;
    const Operand<const F> rows(part.rows, batch * part.columns);
    Operand<F> out(part.out, part.columns);
    for (std::int64_t b = 0; b < batch; ++b) {
      const Counted<F> weight = weights[b];
      if (weight == F{0}) continue;
      for (std::int64_t j = 0; j < part.columns; ++j) {
        out.store(j, out[j] + weight * rows[b * part.columns + j]);
      }
    }
  }
}

template <class F>
void clip_factors(const std::vector<const double*>& squares, std::int64_t batch,
                  const ClipRule& rule, double* norms, F* factors) {
  using Double = Counted<double>;
  std::vector<Operand<const double>> parts;
  for (const double* part : squares) parts.emplace_back(part, batch);
  Operand<double> norm_of(norms, batch);
  Operand<F> factor_of(factors, batch);
  for (std::int64_t b = 0; b < batch; ++b) {
    Total<double> square;
    for (const auto& part : parts) square.add(part[b]);
    const Double norm = sqrt(square.total()) * rule.scale;
    Double factor{};
    if (isfinite(norm)) factor = clip_factor(norm, Double(rule.max_norm), rule.automatic);
    norm_of.store(b, norm);
    factor_of.store(b, round_down<F>(factor * rule.scale));
  }
}

template void explicit_norm(const std::vector<cpu::Explicit<float>>&, std::int64_t, double*);
template void explicit_norm(const std::vector<cpu::Explicit<double>>&, std::int64_t, double*);
template void contract(const std::vector<cpu::Explicit<float>>&, const float*, std::int64_t);
template void contract(const std::vector<cpu::Explicit<double>>&, const double*, std::int64_t);
template void clip_factors(const std::vector<const double*>&, std::int64_t, const ClipRule&,
                           double*, float*);
template void clip_factors(const std::vector<const double*>&, std::int64_t, const ClipRule&,
                           double*, double*);

}  // namespace dpkern::counted
