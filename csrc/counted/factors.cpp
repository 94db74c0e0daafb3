#include "counted/factor.h"
#include "counted/kernels.h"

namespace dpkern::counted {

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

template void clip_factors(const std::vector<const double*>&, std::int64_t, const ClipRule&,
                           double*, float*);
template void clip_factors(const std::vector<const double*>&, std::int64_t, const ClipRule&,
                           double*, double*);

}  // namespace dpkern::counted
