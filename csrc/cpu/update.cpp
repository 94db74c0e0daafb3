// Noise, division by the public batch size and the optimizer rule in one pass over the parameters.

#include <atomic>
#include <cmath>

#include "core/lattice.h"
#include "core/optimizer.h"
#include "cpu/isa.h"
#include "cpu/noise.h"
#include "cpu/ops.h"
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

// Pointer `i` of a list, `index` elements further; null where the list is empty or ends before.
template <class T>
T* at(const std::vector<T*>& list, std::size_t i, std::int64_t index) {
  return i < list.size() ? list[i] + index : nullptr;
}

// One tile of tensor `i`: its gradient into a buffer in the first-level cache, then the rule.
template <class T>
std::int64_t update_tile(const UpdateTensors<T>& call, const RuleNumbers& rule, std::size_t i,
                         const TilePart& part, NoiseTiles& tiles) {
  alignas(64) T gradient[kTile];
  std::int64_t nonfinite = 0;
  const void* const sum = call.sums[i];
  if (!call.noise.on) {
    nonfinite = gradient_without_noise(static_cast<const T*>(sum) + part.index,
                                       static_cast<T>(call.gradient_scale), part.count, gradient);
  } else {
    const std::int32_t* noise = tiles.draws(part);
    const double scale = call.scales[i];
    const T step = static_cast<T>(scale / 64 * call.gradient_scale);
    if (call.sums_kind == Summed::kInt32) {
      gradient_of_integers(static_cast<const std::int32_t*>(sum) + part.index, noise, step,
                           part.count, gradient);
    } else if (call.sums_kind == Summed::kInt64) {
      gradient_of_integers(static_cast<const std::int64_t*>(sum) + part.index, noise, step,
                           part.count, gradient);
    } else {
      nonfinite = gradient_of_floats(static_cast<const T*>(sum) + part.index, tiles.rounding(part),
                                     noise, Lattice<T>(scale), step, part.count, gradient);
    }
  }
  T* const param = call.params[i] + part.index;
  T* const state1 = at(call.buffers, i, part.index);
  T* const state2 = at(call.buffers, call.params.size() + i, part.index);
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

std::int64_t tiles_of(std::int64_t size) { return (size + kTile - 1) / kTile; }

}  // namespace

// gradient = gradient_scale * (noisy sum). Returns the number of sums that were not finite (each
// counts as zero).
template <class T>
std::int64_t update_tensors(const UpdateTensors<T>& call, int threads) {
  std::int64_t tiles = 0;
  for (const std::int64_t size : call.P) tiles += tiles_of(size);
  std::atomic<std::int64_t> nonfinite{0};
  const RuleNumbers numbers = numbers_of(call.rule);
  const UpdateNoise& noise = call.noise;
  // All tensors end to end, in pieces of 512 elements; a thread takes a contiguous share.
  parallel_for(tiles, kGrain, threads, [&](std::int64_t begin, std::int64_t end) {
    std::int64_t mine = 0;
    NoiseTiles drawn(noise.stream, noise.law, noise.rounding, noise.draws);
    std::int64_t before = 0;
    for (std::size_t i = 0; i < call.P.size(); ++i) {
      const std::int64_t size = call.P[i];
      const std::int64_t from = std::max<std::int64_t>(begin - before, 0);
      const std::int64_t to = std::min(end - before, tiles_of(size));
      before += tiles_of(size);
      if (from >= to) continue;
      const auto first = noise.on ? static_cast<std::uint64_t>(call.positions[i]) : 0;
      for_tiles(first, from * kTile, std::min(to * kTile, size),
                [&](const TilePart& part) { mine += update_tile(call, numbers, i, part, drawn); });
    }
    nonfinite += mine;
  });
  return nonfinite;
}

template std::int64_t update_tensors(const UpdateTensors<float>&, int);
template std::int64_t update_tensors(const UpdateTensors<double>&, int);

}  // namespace dpkern::cpu
