// Noise, division by the public batch size and the optimizer rule in one pass over the parameters.

#include <atomic>
#include <cmath>
#include <vector>

#include "core/lattice.h"
#include "core/optimizer.h"
#include "cpu/isa.h"
#include "cpu/noise.h"
#include "cpu/ops.h"
#include "cpu/pair_map.h"
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

// The rule on `count` elements of tensor `i` from `index` on.
template <class T>
void apply_rule(const UpdateTensors<T>& call, const RuleNumbers& rule, std::size_t i,
                std::int64_t index, int count, const T* gradient) {
  T* const param = call.params[i] + index;
  T* const state1 = at(call.buffers, i, index);
  T* const state2 = at(call.buffers, call.params.size() + i, index);
  switch (rule.form) {
    case RuleForm::kPlain:
      return apply_rule(plain_sgd<T>(rule), gradient, count, param, state1, state2);
    case RuleForm::kMomentum:
      return apply_rule(momentum<T>(rule), gradient, count, param, state1, state2);
    case RuleForm::kNesterov:
      return apply_rule(nesterov<T>(rule), gradient, count, param, state1, state2);
    case RuleForm::kAdam:
      return apply_rule(adam<T>(rule), gradient, count, param, state1, state2);
  }
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
  apply_rule(call, rule, i, part.index, part.count, gradient);
  return nonfinite;
}

// coordinates[k] = the released coordinate in its own unit, rounded to the sums' type before and
// after the noise, as sums that are noised alone.
template <class T>
std::int64_t noise_coordinates(const std::uint32_t* bits, const std::int32_t* noise,
                               const Lattice<T>& lattice, int count, double* coordinates) {
  std::int64_t nonfinite = 0;
  versioned([&]() DPK_INLINE {
    const int n = count;
    const Lattice<T> grid = lattice;
    std::int32_t bad = 0;
    for (int i = 0; i < n; ++i) {
      const T units = grid.units(static_cast<T>(coordinates[i]));
      const bool finite = std::isfinite(units);
      bad += finite ? 0 : 1;
      const T released = release_float(finite ? units : T{0}, bits[i], noise[i]) * grid.cell;
      coordinates[i] = static_cast<double>(released);
    }
    nonfinite = bad;
  });
  return nonfinite;
}

// coordinates[k] = the released count, without its unit.
template <class Sum>
void noise_counts(const Sum* sum, const std::int32_t* noise, int count, double* coordinates) {
  versioned([&]() DPK_INLINE {
    const int n = count;
    for (int i = 0; i < n; ++i) {
      coordinates[i] = static_cast<double>(release_integer(sum[i], noise[i]));
    }
  });
}

template <class T>
void widen(const T* from, std::int64_t count, double* to) {
  versioned([&]() DPK_INLINE {
    const std::int64_t n = count;
    for (std::int64_t i = 0; i < n; ++i) to[i] = static_cast<double>(from[i]);
  });
}

// to = factor from, scaled in double and rounded once.
template <class T>
void narrow(const double* from, double factor, int count, T* to) {
  versioned([&]() DPK_INLINE {
    const int n = count;
    const double scale = factor;
    for (int i = 0; i < n; ++i) to[i] = static_cast<T>(from[i] * scale);
  });
}

// A tensor that is noised in the coordinates of its channel pairs, kTile pairs at a time: their
// coordinates fill whole noise tiles, so none is drawn twice.
template <class T>
class MappedTensor {
 public:
  MappedTensor(const UpdateTensors<T>& call, const RuleNumbers& rule, std::size_t i)
      : call_(call),
        rule_(rule),
        i_(i),
        rank_(call.maps[i].rank),
        taps_(call.maps[i].taps),
        pairs_(call.P[i] / taps_),
        coordinates_(call.maps[i].signal == nullptr),
        integers_(call.sums_kind <= Summed::kInt64),
        factor_(call.gradient_scale * (integers_ ? call.scales[i] / 64 : 1.0)),
        back_(call.maps[i].back, taps_, rank_) {
    if (!coordinates_) signal_ = PairMatrix(call.maps[i].signal, rank_, taps_);
  }

  // Units [begin, end) of kTile pairs.
  std::int64_t update(std::int64_t begin, std::int64_t end, NoiseTiles& tiles) const {
    std::vector<double> taps(static_cast<std::size_t>(kTile * taps_ + PairMatrix::kPadded));
    std::vector<double> coordinates(static_cast<std::size_t>(kTile * rank_ + PairMatrix::kPadded));
    std::int64_t nonfinite = 0;
    for (std::int64_t unit = begin; unit < end; ++unit) {
      const std::int64_t first = unit * kTile,
                         count = std::min<std::int64_t>(kTile, pairs_ - first);
      nonfinite += update_unit(first, count, tiles, taps.data(), coordinates.data());
    }
    return nonfinite;
  }

 private:
  std::int64_t update_unit(std::int64_t first, std::int64_t count, NoiseTiles& tiles, double* taps,
                           double* coordinates) const {
    const double scale = call_.scales[i_];
    const Lattice<T> lattice(scale);
    if (!integers_) {
      const T* const sum = static_cast<const T*>(call_.sums[i_]);
      if (coordinates_) {
        widen(sum + first * rank_, count * rank_, coordinates);
      } else {
        widen(sum + first * taps_, count * taps_, taps);
        signal_.multiply(taps, count, coordinates);
      }
    }
    std::int64_t nonfinite = 0;
    for_tiles(static_cast<std::uint64_t>(call_.positions[i_] + first * rank_), 0, count * rank_,
              [&](const TilePart& part) {
                const std::int32_t* const noise = tiles.draws(part);
                double* const here = coordinates + part.index;
                const std::int64_t index = first * rank_ + part.index;
                if (call_.sums_kind == Summed::kInt32) {
                  noise_counts(static_cast<const std::int32_t*>(call_.sums[i_]) + index, noise,
                               part.count, here);
                } else if (call_.sums_kind == Summed::kInt64) {
                  noise_counts(static_cast<const std::int64_t*>(call_.sums[i_]) + index, noise,
                               part.count, here);
                } else {
                  nonfinite +=
                      noise_coordinates(tiles.rounding(part), noise, lattice, part.count, here);
                }
              });
    back_.multiply(coordinates, count, taps);
    alignas(64) T gradient[kTile];
    for (std::int64_t index = 0; index < count * taps_; index += kTile) {
      const auto size = static_cast<int>(std::min<std::int64_t>(kTile, count * taps_ - index));
      narrow(taps + index, factor_, size, gradient);
      apply_rule(call_, rule_, i_, first * taps_ + index, size, gradient);
    }
    return nonfinite;
  }

  const UpdateTensors<T>& call_;
  const RuleNumbers& rule_;
  std::size_t i_;
  std::int64_t rank_, taps_, pairs_;
  bool coordinates_, integers_;  // what the sum holds
  double factor_;
  PairMatrix signal_, back_;
};

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
      if (!call.maps.empty() && call.maps[i].rank > 0) {
        // A unit has as many tiles as a pair has taps, and goes to whoever has its first one.
        const std::int64_t taps = call.maps[i].taps, units = tiles_of(size / taps);
        const MappedTensor<T> mapped(call, numbers, i);
        mine +=
            mapped.update((from + taps - 1) / taps, std::min(units, (to + taps - 1) / taps), drawn);
        continue;
      }
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
