// The update kernels against that of the CPU, bit for bit: noise from the stream, from draws made
// ahead, by the clock, and none.

#include <cmath>
#include <limits>
#include <random>
#include <type_traits>

#include "core/optimizer.h"
#include "cpu/noise.h"
#include "cpu/tiles.h"
#include "cpu/update.h"
#include "cuda.h"

namespace dpkern::test {
namespace {

constexpr double kScale = 3.0;
constexpr double kGradientScale = 1.0 / 64;

struct NamedRule {
  const char* name;
  Rule rule;
  int states;
};

std::vector<NamedRule> rules() {
  Rule sgd{};
  sgd.lr = 0.1;
  sgd.weight_decay = 0.01;
  Rule first = sgd;
  first.momentum = 0.9;
  first.dampening = 0.1;
  first.first_step = true;
  Rule momentum = first;
  momentum.first_step = false;
  Rule nesterov = momentum;
  nesterov.nesterov = true;
  nesterov.dampening = 0;
  Rule adam = sgd;
  adam.kind = RuleKind::kAdam;
  adam.beta1 = 0.9;
  adam.beta2 = 0.999;
  adam.eps = 1e-8;
  adam.bias1 = 1 - 0.9 * 0.9;
  adam.bias2 = 1 - 0.999 * 0.999;
  Rule adamw = adam;
  adamw.decoupled = true;
  return {{"SGD", sgd, 0},           {"first momentum", first, 1},
          {"momentum", momentum, 1}, {"Nesterov", nesterov, 1},
          {"Adam", adam, 2},         {"AdamW", adamw, 2}};
}

template <class T, class Sum>
struct Tensors {
  std::vector<std::uint64_t> first;  // noise positions
  std::vector<Shifted<T>> param, state1, state2;
  std::vector<Shifted<Sum>> sum;

  // Float sums lie where the rounding bits decide. `skip` = 0: every array begins where vectors
  // may.
  Tensors(const std::vector<std::int64_t>& sizes, std::uint64_t shift, std::size_t skip,
          const cpu::UpdateNoise& noise) {
    std::mt19937 random(5);
    std::normal_distribution<double> normal(0, 1);
    std::uint64_t position = shift;
    for (const std::int64_t size : sizes) {
      const auto values = [&](double scale) {
        std::vector<T> v(static_cast<std::size_t>(size));
        for (T& x : v) x = static_cast<T>(normal(random) * scale);
        return v;
      };
      first.push_back(position);
      param.emplace_back(values(1), skip);
      state1.emplace_back(values(1), 2 * skip);
      auto squares = values(1);
      for (T& x : squares) x = std::fabs(x);
      state2.emplace_back(squares, 3 * skip);
      std::vector<Sum> sums;
      for (const T x : values(1e6)) sums.push_back(static_cast<Sum>(x));
      if constexpr (!std::is_integral_v<Sum>) {
        std::vector<std::int32_t> draws(sums.size());
        cpu::lattice_draws(noise.stream, noise.law, position, size, draws.data(), 1);
        for (std::size_t i = 0; i < sums.size(); ++i) {
          sums[i] = static_cast<T>(at_cell_edge(draws[i], kScale));
        }
        if (size > 2) sums[2] = std::numeric_limits<T>::infinity();
      }
      sum.emplace_back(sums, skip);
      position += (static_cast<std::uint64_t>(size) + kTile - 1) / kTile * kTile;
    }
  }

  std::vector<T> values() const {
    std::vector<T> all;
    for (const auto* group : {&param, &state1, &state2}) {
      for (const Shifted<T>& tensor : *group) {
        for (const T x : tensor.values()) all.push_back(x);
      }
    }
    return all;
  }
};

template <class Sum>
constexpr SumType sum_type = std::is_floating_point_v<Sum> ? SumType::kFloat
                             : sizeof(Sum) == 4            ? SumType::kInt32
                                                           : SumType::kInt64;

bool aligned16(const void* address) { return reinterpret_cast<std::uintptr_t>(address) % 16 == 0; }

// Draws and rounding bits of all tensors, each tensor's from a multiple of 8 on.
struct Ahead {
  std::vector<std::int32_t> draws;
  std::vector<std::uint16_t> bits;
};

// The table and the plan as a caller makes them. Draws are made ahead by the kernels themselves.
template <class T, class Sum>
std::vector<UpdateTask> tasks_of(Tensors<T, Sum>& tensors, const NamedRule& named, UpdatePlan& plan,
                                 Ahead& ahead) {
  std::vector<UpdateTask> tasks;
  const cpu::Lattice<T> lattice(kScale);
  for (std::size_t i = 0; i < tensors.sum.size(); ++i) {
    UpdateTask task{};
    task.size = static_cast<std::int64_t>(tensors.sum[i].values().size());
    task.param = tensors.param[i].data();
    task.sum = tensors.sum[i].data();
    task.state1 = named.states > 0 ? tensors.state1[i].data() : nullptr;
    task.state2 = named.states > 1 ? tensors.state2[i].data() : nullptr;
    task.first_position = tensors.first[i];
    task.first_piece = plan.pieces;
    task.per_unit = static_cast<double>(lattice.per_unit);
    task.step = plan.noise == NoiseSource::kNone ? kGradientScale : kScale / 64 * kGradientScale;
    task.draws_at = static_cast<std::int64_t>(ahead.draws.size());
    task.aligned16 = aligned16(task.param) && aligned16(task.sum) && aligned16(task.state1) &&
                     aligned16(task.state2);
    if (plan.noise == NoiseSource::kStream) {
      if (task.size > 0) {
        const auto offset = static_cast<std::int64_t>(task.first_position % kTile);
        plan.pieces += (offset + task.size + kTile - 1) / kTile;
      }
    } else {
      plan.pieces += (task.size + kUpdatePiece - 1) / kUpdatePiece;
    }
    if (plan.noise == NoiseSource::kDraws) {
      const auto room = static_cast<std::size_t>(task.draws_at + (task.size + 7) / 8 * 8);
      ahead.draws.resize(room);
      ahead.bits.resize(room);
      check_launch(cuda::lattice_draws(plan.stream, plan.law, task.first_position, task.size,
                                       ahead.draws.data() + task.draws_at, nullptr),
                   "draws made ahead");
      check_launch(cuda::rounding_bits(plan.rounding, task.first_position, task.size,
                                       ahead.bits.data() + task.draws_at, nullptr),
                   "rounding bits made ahead");
    }
    tasks.push_back(task);
  }
  plan.tasks = static_cast<std::int64_t>(tasks.size());
  plan.draws = ahead.draws.data();
  plan.rounding_bits = ahead.bits.data();
  return tasks;
}

template <class T, class Sum>
std::int64_t run_on_cpu(Tensors<T, Sum>& tensors, const NamedRule& named,
                        const cpu::UpdateNoise& noise) {
  std::vector<cpu::UpdateItem> items;
  for (std::size_t i = 0; i < tensors.sum.size(); ++i) {
    items.push_back({tensors.param[i].data(), tensors.sum[i].data(),
                     named.states > 0 ? tensors.state1[i].data() : nullptr,
                     named.states > 1 ? tensors.state2[i].data() : nullptr,
                     static_cast<std::int64_t>(tensors.sum[i].values().size()), tensors.first[i],
                     noise.on ? kScale : 0.0});
  }
  return cpu::update_step<T>(named.rule, noise, sum_type<Sum>, kGradientScale, items, 1);
}

template <class T, class Sum>
std::int64_t compare(const NamedRule& named, NoiseSource source, Distribution law, bool by_clock) {
  const std::vector<std::vector<std::int64_t>> shapes = {
      {}, {1, 0}, {511, 0, 2, 513}, {0, 2100, 7, 0}};
  cpu::UpdateNoise noise{source != NoiseSource::kNone, law, counting_key(0x4a000000, 7, 20),
                         counting_key(0x01000000, 7, 20), cpu::Ahead{}};
  std::int64_t cases = 0;
  for (const auto& sizes : shapes) {
    for (const std::size_t skip : {0, 1}) {
      const std::uint64_t shift = 5 * skip;
      Tensors<T, Sum> want(sizes, shift, skip, noise);
      const std::int64_t bad = run_on_cpu(want, named, noise);
      in_both_orders([&](const std::string& order) {
        const std::string where = std::string("update, ") + named.name + ", source " +
                                  std::to_string(static_cast<int>(source)) + order;
        Tensors<T, Sum> got(sizes, shift, skip, noise);
        UpdatePlan plan{};
        plan.rule = numbers_of(named.rule);
        plan.stream = noise.stream;
        plan.rounding = noise.rounding;
        plan.noise = source;
        plan.law = law;
        plan.sum_type = sum_type<Sum>;
        plan.wide = sizeof(T) == 8 ? 1 : 0;
        UpdateClock clock{};
        if (by_clock) {  // as if begun at n1 = 0: the clock gives n1 and Adam's powers
          clock = {noise.stream.n1, 1 - named.rule.bias1, 1 - named.rule.bias2};
          plan.stream.n1 = plan.rounding.n1 = 0;
          plan.rule.root2 = plan.rule.step = std::numeric_limits<double>::quiet_NaN();
          plan.clock = &clock;
        }
        Ahead ahead;
        const auto tasks = tasks_of(got, named, plan, ahead);
        std::int64_t nonfinite = 100;
        check_launch(cuda::update_step(plan, tasks.data(), &nonfinite, nullptr), where);
        check_same(got.values(), want.values(), where);
        check(nonfinite == 100 + bad, where + ": sums that are not finite");
        ++cases;
      });
    }
  }
  return cases;
}

template <class T>
std::int64_t compare_type() {
  std::int64_t cases = 0;
  for (const NamedRule& named : rules()) {
    cases += compare<T, T>(named, NoiseSource::kNone, Distribution::kGaussian, false);
    for (const NoiseSource source : {NoiseSource::kStream, NoiseSource::kDraws}) {
      const bool adam = named.rule.kind == RuleKind::kAdam;
      const Distribution law = adam ? Distribution::kLaplace : Distribution::kGaussian;
      cases += compare<T, std::int32_t>(named, source, law, false);
      cases += compare<T, std::int64_t>(named, source, law, false);
      cases += compare<T, T>(named, source, law, false);
    }
    if (!named.rule.first_step) {  // the clock of these cases has passed the first step
      cases += compare<T, T>(named, NoiseSource::kStream, Distribution::kGaussian, true);
    }
  }
  return cases;
}

void check_clock() {
  UpdateClock clock{0, 0.9, 0.999};
  check_launch(cuda::advance(&clock, 0.9, 0.999, nullptr), "clock");
  check(clock.step == 1 && clock.beta1_power == 0.9 * 0.9 && clock.beta2_power == 0.999 * 0.999,
        "the clock's next step");
}

}  // namespace

std::int64_t test_cuda_update() {
  check_clock();
  return compare_type<float>() + compare_type<double>();
}

}  // namespace dpkern::test
