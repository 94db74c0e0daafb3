#include "cpu/update.h"

#include <cmath>

#include "core/lattice.h"
#include "core/optimizer.h"
#include "cpu/isa.h"
#include "cpu/parallel.h"
#include "cpu/tiles.h"

namespace dpkern::cpu {
namespace {

constexpr std::int64_t kGrain = 16;  // tiles worth a thread

// gradient[i] = release(sum[i], noise[i]) * step, `step` holding the cell and the batch size.
template <class T, class Sum>
void gradient_of_integers(const Sum* sum, const std::int32_t* noise, T step, int count, T* out) {
  versioned([&]() DPK_INLINE {
    const int n = count;
    const T factor = step;
    for (int i = 0; i < n; ++i) out[i] = static_cast<T>(release_integer(sum[i], noise[i])) * factor;
  });
}

template <class T>
std::int64_t gradient_of_floats(const T* sum, const std::uint32_t* bits, const std::int32_t* noise,
                                const Lattice<T>& lattice, T step, int count, T* out) {
  std::int64_t nonfinite = 0;
  versioned([&]() DPK_INLINE {
    const int n = count;
    const T factor = step;
    const Lattice<T> grid = lattice;
    std::int32_t bad = 0;
    for (int i = 0; i < n; ++i) {
      const T units = grid.units(sum[i]);
      const bool finite = std::isfinite(units);
      bad += finite ? 0 : 1;
      out[i] = release_float(finite ? units : T{0}, bits[i], noise[i]) * factor;
    }
    nonfinite = bad;
  });
  return nonfinite;
}

template <class T>
std::int64_t gradient_without_noise(const T* sum, T step, int count, T* out) {
  std::int64_t nonfinite = 0;
  versioned([&]() DPK_INLINE {
    const int n = count;
    const T factor = step;
    std::int32_t bad = 0;
    for (int i = 0; i < n; ++i) {
      const bool finite = std::isfinite(sum[i]);
      bad += finite ? 0 : 1;
      out[i] = finite ? sum[i] * factor : T{0};
    }
    nonfinite = bad;
  });
  return nonfinite;
}

template <class Rule, class T>
void apply_rule(const Rule& rule, const T* gradient, int count, T* param, T* state1, T* state2) {
  versioned([&]() DPK_INLINE {
    const int n = count;
    const Rule r = rule;
    T none{};
    for (int i = 0; i < n; ++i) {
      apply(r, gradient[i], param[i], Rule::kStates > 0 ? state1[i] : none,
            Rule::kStates > 1 ? state2[i] : none);
    }
  });
}

// One tile of one tensor: its gradient into a buffer in the first-level cache, then the rule.
template <class T>
std::int64_t update_tile(const RuleNumbers& rule, const UpdateNoise& noise, SumType sum_type,
                         double gradient_scale, const UpdateItem& item, const TilePart& part,
                         NoiseTiles& tiles) {
  alignas(64) T gradient[kTile];
  std::int64_t nonfinite = 0;
  if (!noise.on) {
    nonfinite = gradient_without_noise(static_cast<const T*>(item.sum) + part.index,
                                       static_cast<T>(gradient_scale), part.count, gradient);
  } else {
    const std::int32_t* noise_here = tiles.draws(part);
    const T step = static_cast<T>(item.scale / 64 * gradient_scale);
    if (sum_type == SumType::kInt32) {
      gradient_of_integers(static_cast<const std::int32_t*>(item.sum) + part.index, noise_here,
                           step, part.count, gradient);
    } else if (sum_type == SumType::kInt64) {
      gradient_of_integers(static_cast<const std::int64_t*>(item.sum) + part.index, noise_here,
                           step, part.count, gradient);
    } else {
      nonfinite =
          gradient_of_floats(static_cast<const T*>(item.sum) + part.index, tiles.rounding(part),
                             noise_here, Lattice<T>(item.scale), step, part.count, gradient);
    }
  }
  T* param = static_cast<T*>(item.param) + part.index;
  T* state1 = item.state1 == nullptr ? nullptr : static_cast<T*>(item.state1) + part.index;
  T* state2 = item.state2 == nullptr ? nullptr : static_cast<T*>(item.state2) + part.index;
  switch (rule.form) {
    case RuleForm::kPlain:
      apply_rule(plain_sgd<T>(rule), gradient, part.count, param, state1, state2);
      break;
    case RuleForm::kMomentum:
      apply_rule(momentum<T>(rule), gradient, part.count, param, state1, state2);
      break;
    case RuleForm::kNesterov:
      apply_rule(nesterov<T>(rule), gradient, part.count, param, state1, state2);
      break;
    case RuleForm::kAdam:
      apply_rule(adam<T>(rule), gradient, part.count, param, state1, state2);
      break;
  }
  return nonfinite;
}

std::int64_t tiles_of(const UpdateItem& item) { return (item.size + kTile - 1) / kTile; }

}  // namespace

template <class T>
std::int64_t update_step(const Rule& rule, const UpdateNoise& noise, SumType sum_type,
                         double gradient_scale, const std::vector<UpdateItem>& items, int threads) {
  std::int64_t tiles = 0;
  for (const UpdateItem& item : items) tiles += tiles_of(item);
  std::int64_t nonfinite = 0;
  const RuleNumbers numbers = numbers_of(rule);
  // All tensors end to end, in pieces of 512 elements; a thread takes a contiguous share.
  parallel_for(tiles, kGrain, threads, [&](std::int64_t begin, std::int64_t end) {
    std::int64_t mine = 0;
    NoiseTiles drawn(noise.stream, noise.law, noise.rounding, noise.ahead);
    std::int64_t before = 0;
    for (const UpdateItem& item : items) {
      const std::int64_t from = std::max<std::int64_t>(begin - before, 0);
      const std::int64_t to = std::min(end - before, tiles_of(item));
      before += tiles_of(item);
      if (from >= to) continue;
      for_tiles(item.first_position, from * kTile, std::min(to * kTile, item.size),
                [&](const TilePart& part) {
                  mine +=
                      update_tile<T>(numbers, noise, sum_type, gradient_scale, item, part, drawn);
                });
    }
    __atomic_fetch_add(&nonfinite, mine, __ATOMIC_RELAXED);
  });
  return nonfinite;
}

template std::int64_t update_step<float>(const Rule&, const UpdateNoise&, SumType, double,
                                         const std::vector<UpdateItem>&, int);
template std::int64_t update_step<double>(const Rule&, const UpdateNoise&, SumType, double,
                                          const std::vector<UpdateItem>&, int);

}  // namespace dpkern::cpu
