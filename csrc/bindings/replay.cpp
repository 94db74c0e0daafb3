// The calls of a step whose structure is known: norms as gradients arrive, factors and sums of all
// parameters at its close. dpkern/engine/program has checked the operands and holds their memory.

#include "bindings/replay.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <cmath>
#include <cstring>

#include "bindings/bindings.h"
#include "cpu/explicit.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/transpose.h"

namespace py = pybind11;

namespace dpkern::bindings {
namespace {

// A linear layer's use. Addresses of operands are those of the step at hand.
template <class F>
struct Layer {
  std::int64_t positions, inputs, outputs;
  double* squares;
  F* rows;       // its per-sample gradients, if they are kept; else null
  F* bias_rows;  // where those of its bias are summed over positions; else null
  int bias;      // the bias' place among explicit gradients, if they are the operand; else -1
  int group;     // its clip group
  std::int64_t out;
  bool integer_operands;  // whether exact sums round them first
  const F* a = nullptr;
  const F* g = nullptr;
};

// A clip group: what its norm is made of, and the explicit gradients that it scales.
template <class F>
struct Group {
  std::vector<std::size_t> squares;  // numbers of its squared norms, added up in this order
  std::vector<std::size_t> rows;     // places of its explicit gradients
  std::size_t fresh = 0;             // how many of them, the first, have no norm before the close
  std::vector<const double*> norms;  // addresses of the squared norms in the step at hand
  std::vector<const F*> values;      // and of the explicit gradients
  Integers sizes, outs;
};

template <class F>
class ReplayedStep final : public Taker {
 public:
  // exact: clip in integers, which are summed in int32 (docs/exact.md).
  explicit ReplayedStep(bool exact) : exact_(exact) {}

  // Gradients that are written out: addresses, sizes of one sample's, and where their sums begin
  // in the memory of all sums.
  void set_explicit(const Addresses& rows, Integers sizes, Integers outs) {
    rows_.clear();
    for (const std::uintptr_t address : rows) rows_.push_back(pointer<const F>(address));
    sizes_ = std::move(sizes), outs_ = std::move(outs);
  }
  void set_squares(const Addresses& squares) {
    squares_.clear();
    for (const std::uintptr_t address : squares) squares_.push_back(pointer<double>(address));
  }
  // The groups: numbers of squared norms, of which the last are those of `fresh` explicit gradients
  // if there are any, which the close takes; places of explicit gradients, `fresh` ones first.
  void set_groups(const std::vector<std::vector<std::size_t>>& squares,
                  const std::vector<std::vector<std::size_t>>& rows,
                  const std::vector<std::size_t>& fresh) {
    groups_.assign(squares.size(), {});
    for (std::size_t k = 0; k < groups_.size(); ++k) {
      Group<F>& group = groups_[k];
      group.squares = squares[k], group.rows = rows[k], group.fresh = fresh[k];
      for (const std::size_t place : group.rows) {
        group.sizes.push_back(sizes_.at(place)), group.outs.push_back(outs_.at(place));
      }
    }
  }
  // Squared norms that another kernel has written.
  void set_square(std::size_t number, std::uintptr_t address) {
    squares_.at(number) = pointer<double>(address);
  }
  // An explicit gradient that lies elsewhere in the step at hand.
  void set_rows(std::size_t place, std::uintptr_t address) {
    rows_.at(place) = pointer<const F>(address);
  }
  void set_layer(std::size_t index, std::int64_t positions, std::int64_t inputs,
                 std::int64_t outputs, std::uintptr_t squares, std::uintptr_t rows,
                 std::uintptr_t bias_rows, int bias, int group, std::int64_t out,
                 bool integer_operands) {
    if (index >= layers_.size()) layers_.resize(index + 1);
    layers_[index] = {positions,
                      inputs,
                      outputs,
                      pointer<double>(squares),
                      pointer<F>(rows),
                      pointer<F>(bias_rows),
                      bias,
                      group,
                      out,
                      integer_operands};
  }

  // The samples of the run that begins.
  void begin(std::int64_t batch, int threads) { batch_ = batch, threads_ = threads; }

  // Operands of a layer have arrived, both contiguous: take norms while they are in the cache.
  void take(std::size_t index, std::uintptr_t input, std::uintptr_t gradient) override {
    Layer<F>& layer = layers_.at(index);
    layer.a = pointer<const F>(input), layer.g = pointer<const F>(gradient);
    const std::int64_t T = layer.positions, d = layer.inputs, p = layer.outputs;
    if (layer.bias >= 0) rows_.at(static_cast<std::size_t>(layer.bias)) = layer.g;
    const py::gil_scoped_release unlocked;
    if (layer.rows != nullptr) {
      cpu::linear_gradient<F>({layer.a, layer.g, layer.rows, layer.squares, batch_, T, d, p},
                              threads_);
      if (layer.bias_rows != nullptr) {
        cpu::sum_positions<F>(layer.g, batch_, T, p, layer.bias_rows, threads_);
      }
    } else if (T == 1) {
      cpu::linear_norm<F>(
          {layer.a, layer.g, cpu::LinearRoute::kAuto, layer.squares, batch_, T, d, p}, threads_);
    } else {
      take_samples(layer);
    }
  }

  // Factors of all samples and weighted sums of what is held here, one clip group after another.
  // bounds, scales: of each group's norms, and from captured gradients to those that are clipped.
  // factored: by group, whether integers of one position are products of vectors of integers.
  // first, last: the samples that are summed, of which 32 bits may not hold more.
  // Factors [groups, room] and norms [groups, room] are written where they are told, of all samples
  // with the first ones; sums over all that their memory holds.
  // Returns: how many of the first `records` samples have a norm that is not finite.
  std::int64_t close(const std::vector<double>& bounds, const std::vector<double>& scales,
                     bool automatic, const std::vector<bool>& factored, std::int64_t records,
                     std::int64_t room, std::uintptr_t factors_address,
                     std::uintptr_t norms_address, std::int64_t first, std::int64_t last,
                     std::uintptr_t sums_address, std::size_t sums_bytes) {
    F* const factors = pointer<F>(factors_address);
    const py::gil_scoped_release unlocked;
    std::memset(pointer<void>(sums_address), 0, sums_bytes);
    std::int64_t lost = 0;
    if (first == 0) {
      double* const norms = pointer<double>(norms_address);
      lost = set_factors(bounds, scales, automatic, records, room, factors, norms);
    }
    for (std::size_t k = 0; k < groups_.size(); ++k) {
      const F* const own = factors + static_cast<std::int64_t>(k) * room;
      if (exact_) {
        add_integers(k, own, factored.at(k), first, last, pointer<std::int32_t>(sums_address));
      } else {
        add_floats(k, own, pointer<F>(sums_address));
      }
    }
    return lost;
  }

  // Whether all numbers of a piece of memory are finite.
  bool is_finite(std::uintptr_t address, std::int64_t count) const {
    constexpr std::int64_t kGrain = 1 << 15;
    const F* const from = pointer<const F>(address);
    std::atomic<bool> finite{true};
    const py::gil_scoped_release unlocked;
    cpu::parallel_for(count, kGrain, threads_, [&](std::int64_t begin, std::int64_t end) {
      F zeros[8] = {};
      std::int64_t i = begin;
      for (; i + 8 <= end; i += 8) {
        for (int k = 0; k < 8; ++k) zeros[k] += from[i + k] * 0;  // NaN where it is not finite
      }
      for (; i < end; ++i) zeros[0] += from[i] * 0;
      for (const F zero : zeros) {
        if (zero != 0) finite = false;
      }
    });
    return finite;
  }

 private:
  template <class Sum>
  static std::vector<Sum*> outs_from(const Integers& outs, Sum* sums) {
    std::vector<Sum*> found;
    for (const std::int64_t out : outs) found.push_back(sums + out);
    return found;
  }

  // Where the group's norms and explicit gradients lie now.
  void look_up(Group<F>& group) const {
    group.norms.clear(), group.values.clear();
    for (const std::size_t number : group.squares) group.norms.push_back(squares_.at(number));
    for (const std::size_t place : group.rows) group.values.push_back(rows_.at(place));
  }

  void take_fresh(const Group<F>& group) const {
    const auto count = static_cast<std::ptrdiff_t>(group.fresh);
    const std::vector<const F*> values(group.values.begin(), group.values.begin() + count);
    const Integers sizes(group.sizes.begin(), group.sizes.begin() + count);
    cpu::explicit_norm<F>({values, squares_.at(group.squares.back()), batch_, sizes}, threads_);
  }

  // Factors and norms of all samples, and how many records were lost.
  std::int64_t set_factors(const std::vector<double>& bounds, const std::vector<double>& scales,
                           bool automatic, std::int64_t records, std::int64_t room, F* factors,
                           double* norms) {
    for (std::size_t k = 0; k < groups_.size(); ++k) {
      Group<F>& group = groups_[k];
      look_up(group);
      if (group.fresh != 0) take_fresh(group);
      const std::int64_t start = static_cast<std::int64_t>(k) * room;
      cpu::clip_factors<F>({group.norms, bounds.at(k), scales.at(k), automatic, factors + start,
                            norms + start, batch_},
                           threads_);
    }
    return drop_lost(factors, norms, records, room);
  }

  // Count the samples with a norm that is not finite; they are dropped from every group.
  std::int64_t drop_lost(F* factors, const double* norms, std::int64_t records,
                         std::int64_t room) const {
    const auto groups = static_cast<std::int64_t>(groups_.size());
    std::int64_t lost = 0;
    for (std::int64_t b = 0; b < batch_; ++b) {
      bool finite = true;
      for (std::int64_t k = 0; k < groups; ++k) finite &= std::isfinite(norms[k * room + b]);
      if (finite) continue;
      for (std::int64_t k = 0; k < groups; ++k) factors[k * room + b] = 0;
      lost += b < records ? 1 : 0;
    }
    return lost;
  }

  // Whether the close adds this layer's sum for the group.
  static bool sums(const Layer<F>& layer, std::size_t group) {
    return layer.squares != nullptr && layer.rows == nullptr &&
           layer.group == static_cast<int>(group);
  }

  void add_floats(std::size_t k, const F* factors, F* sums_begin) const {
    const Group<F>& group = groups_[k];
    if (!group.values.empty()) {
      cpu::contract<F>(
          {group.values, factors, outs_from(group.outs, sums_begin), batch_, group.sizes},
          threads_);
    }
    for (const Layer<F>& layer : layers_) {
      if (!sums(layer, k)) continue;
      cpu::linear_sum<F>({layer.a, layer.g, factors, sums_begin + layer.out, batch_,
                          layer.positions, layer.inputs, layer.outputs},
                         threads_);
    }
  }

  // The integers of samples from `first` to `last`.
  void add_integers(std::size_t k, const F* factors, bool factored, std::int64_t first,
                    std::int64_t last, std::int32_t* sums_begin) const {
    const Group<F>& group = groups_[k];
    if (!group.values.empty()) {
      std::vector<const F*> values = group.values;
      for (std::size_t i = 0; i < values.size(); ++i) values[i] += first * group.sizes[i];
      cpu::explicit_integer_sum<F>(
          {values, factors + first, outs_from(group.outs, sums_begin), last - first, group.sizes},
          threads_);
    }
    for (const Layer<F>& layer : layers_) {
      if (!sums(layer, k)) continue;
      auto rounding = cpu::LinearRounding::kTruncate;
      if (layer.positions == 1 && factored) rounding = cpu::LinearRounding::kFactors;
      if (layer.integer_operands) rounding = cpu::LinearRounding::kOperands;
      const std::int64_t skipped = first * layer.positions;
      cpu::linear_integer_sum<F>(
          {layer.a + skipped * layer.inputs, layer.g + skipped * layer.outputs, factors + first,
           sums_begin + layer.out, rounding, last - first, layer.positions, layer.inputs,
           layer.outputs},
          threads_);
    }
  }

  // Squared norms of several positions' gradients, and sums of a bias', sample by sample while it
  // is in the cache. Numbers that become integers were summed in F: their norm counts the rounding.
  void take_samples(const Layer<F>& layer) const {
    const std::int64_t T = layer.positions, d = layer.inputs, p = layer.outputs;
    const auto route = cpu::LinearRoute::kAuto;
    cpu::parallel_for(batch_, 1, threads_, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t b = begin; b < end; ++b) {
        const F *const a = layer.a + b * T * d, *const g = layer.g + b * T * p;
        double* const square = layer.squares + b;
        if (exact_ && layer.integer_operands) {
          cpu::linear_integer_norm<F>({a, g, square, 1, T, d, p}, 1);
        } else {
          double error = 0;
          if (exact_) cpu::linear_sum_error<F>({a, g, &error, 1, T, d, p}, 1);
          cpu::linear_norm<F>({a, g, route, square, 1, T, d, p}, 1);
          if (exact_) {
            const double norm = std::sqrt(*square) + error;
            *square = norm * norm * (1 + 0x1p-40);
          }
        }
        if (layer.bias_rows != nullptr) {
          cpu::sum_positions<F>(g, 1, T, p, layer.bias_rows + b * p, 1);
        }
      }
    });
  }

  std::vector<const F*> rows_;
  std::vector<double*> squares_;
  Integers sizes_, outs_;
  std::vector<Group<F>> groups_;
  std::vector<Layer<F>> layers_;
  std::int64_t batch_ = 0;
  int threads_ = 1;
  bool exact_;
};

// What steps do to operands beside the kernels of ops.
template <class F>
void add_operands(py::module_& m, const char* sum_positions, const char* transpose_each) {
  m.def(sum_positions, [](std::uintptr_t g, std::uintptr_t out, std::int64_t batch,
                          std::int64_t positions, std::int64_t outputs, int threads) {
    const py::gil_scoped_release unlocked;
    cpu::sum_positions<F>(pointer<const F>(g), batch, positions, outputs, pointer<F>(out), threads);
  });
  m.def(transpose_each, [](std::uintptr_t from, std::uintptr_t to, std::int64_t count,
                           std::int64_t rows, std::int64_t columns, int threads) {
    const py::gil_scoped_release unlocked;
    cpu::transpose_each<F>(pointer<const F>(from), count, rows, columns, pointer<F>(to), threads);
  });
}

template <class F>
void add_step(py::module_& m, const char* name) {
  using Step = ReplayedStep<F>;
  py::class_<Step>(m, name)
      .def(py::init<bool>(), py::arg("exact"))
      .def("set_explicit", &Step::set_explicit)
      .def("set_squares", &Step::set_squares)
      .def("set_groups", &Step::set_groups)
      .def("set_square", &Step::set_square)
      .def("set_rows", &Step::set_rows)
      .def("set_layer", &Step::set_layer)
      .def("begin", &Step::begin)
      .def("take", &Step::take)
      .def_property_readonly(
          "taker",
          [](Step& step) { return reinterpret_cast<std::uintptr_t>(static_cast<Taker*>(&step)); })
      .def("close", &Step::close)
      .def("is_finite", &Step::is_finite);
}

}  // namespace

void add_replay(py::module_& m) {
  add_operands<float>(m, "sum_positions_float32", "transpose_each_float32");
  add_operands<double>(m, "sum_positions_float64", "transpose_each_float64");
  add_step<float>(m, "ReplayedStep_float32");
  add_step<double>(m, "ReplayedStep_float64");
}

}  // namespace dpkern::bindings
