#include "cpu/update.h"

#include <cmath>

#include "core/lattice.h"
#include "cpu/isa.h"
#include "cpu/noise.h"
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

template <class T>
void apply_sgd(const Rule& rule, const T* gradient, int count, T* param, T* buffer) {
  versioned([&]() DPK_INLINE {
    const int n = count;
    const T lr = static_cast<T>(rule.lr);
    const T decay = static_cast<T>(rule.weight_decay);
    const T momentum = static_cast<T>(rule.momentum);
    const T keep = rule.first_step ? T{0} : momentum;
    const T fresh = rule.first_step ? T{1} : static_cast<T>(1 - rule.dampening);
    if (buffer == nullptr) {
      for (int i = 0; i < n; ++i) param[i] -= lr * (gradient[i] + decay * param[i]);
    } else if (rule.nesterov) {
      for (int i = 0; i < n; ++i) {
        const T g = gradient[i] + decay * param[i];
        const T b = keep * buffer[i] + fresh * g;
        buffer[i] = b;
        param[i] -= lr * (g + momentum * b);
      }
    } else {
      for (int i = 0; i < n; ++i) {
        const T g = gradient[i] + decay * param[i];
        const T b = keep * buffer[i] + fresh * g;
        buffer[i] = b;
        param[i] -= lr * b;
      }
    }
  });
}

template <class T>
void apply_adam(const Rule& rule, const T* gradient, int count, T* param, T* mean, T* square) {
  versioned([&]() DPK_INLINE {
    const int n = count;
    const T shrink = static_cast<T>(rule.decoupled ? 1 - rule.lr * rule.weight_decay : 1);
    const T decay = static_cast<T>(rule.decoupled ? 0 : rule.weight_decay);
    const T fresh1 = static_cast<T>(1 - rule.beta1);
    const T keep2 = static_cast<T>(rule.beta2);
    const T fresh2 = static_cast<T>(1 - rule.beta2);
    const T eps = static_cast<T>(rule.eps);
    const T root2 = static_cast<T>(std::sqrt(rule.bias2));
    const T step = static_cast<T>(rule.lr / rule.bias1);
    for (int i = 0; i < n; ++i) {
      const T p = param[i] * shrink;
      const T g = gradient[i] + decay * param[i];
      const T m = mean[i] + fresh1 * (g - mean[i]);
      const T v = keep2 * square[i] + fresh2 * g * g;
      mean[i] = m;
      square[i] = v;
      param[i] = p - step * (m / (std::sqrt(v) / root2 + eps));
    }
  });
}

// One tile of one tensor: its gradient into a buffer in the first-level cache, then the rule.
template <class T>
std::int64_t update_tile(const Rule& rule, const UpdateNoise& noise, SumType sum_type,
                         double gradient_scale, const UpdateItem& item, const TilePart& part,
                         RoundingTiles& rounded) {
  alignas(64) T gradient[kTile];
  std::int64_t nonfinite = 0;
  if (!noise.on) {
    nonfinite = gradient_without_noise(static_cast<const T*>(item.sum) + part.index,
                                       static_cast<T>(gradient_scale), part.count, gradient);
  } else {
    alignas(64) std::int32_t draws[kTile];
    draw_tile(noise.stream, noise.law, part.tile, draws);
    const std::int32_t* noise_here = draws + part.offset;
    const T step = static_cast<T>(item.scale / 64 * gradient_scale);
    if (sum_type == SumType::kInt32) {
      gradient_of_integers(static_cast<const std::int32_t*>(item.sum) + part.index, noise_here,
                           step, part.count, gradient);
    } else if (sum_type == SumType::kInt64) {
      gradient_of_integers(static_cast<const std::int64_t*>(item.sum) + part.index, noise_here,
                           step, part.count, gradient);
    } else {
      alignas(64) std::uint32_t bits[kTile];
      rounded.bits(part.tile, bits);
      nonfinite =
          gradient_of_floats(static_cast<const T*>(item.sum) + part.index, bits + part.offset,
                             noise_here, Lattice<T>(item.scale), step, part.count, gradient);
    }
  }
  T* param = static_cast<T*>(item.param) + part.index;
  T* state1 = item.state1 == nullptr ? nullptr : static_cast<T*>(item.state1) + part.index;
  if (rule.kind == RuleKind::kSgd) {
    apply_sgd(rule, gradient, part.count, param, state1);
  } else {
    apply_adam(rule, gradient, part.count, param, state1,
               static_cast<T*>(item.state2) + part.index);
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
  // All tensors end to end, in pieces of 512 elements; a thread takes a contiguous share.
  parallel_for(tiles, kGrain, threads, [&](std::int64_t begin, std::int64_t end) {
    std::int64_t mine = 0;
    RoundingTiles rounded(noise.rounding);
    std::int64_t before = 0;
    for (const UpdateItem& item : items) {
      const std::int64_t from = std::max<std::int64_t>(begin - before, 0);
      const std::int64_t to = std::min(end - before, tiles_of(item));
      before += tiles_of(item);
      if (from >= to) continue;
      for_tiles(item.first_position, from * kTile, std::min(to * kTile, item.size),
                [&](const TilePart& part) {
                  mine +=
                      update_tile<T>(rule, noise, sum_type, gradient_scale, item, part, rounded);
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
