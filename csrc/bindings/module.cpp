// dpkern._C: raw pointers, sizes and codes in, results out. No logic; checks are made in Python.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/bindings.h"
#include "cpu/isa.h"
#include "cpu/noise.h"

namespace py = pybind11;
using namespace dpkern;
using bindings::Addresses;
using bindings::clip_items_of;
using bindings::Integers;
using bindings::Numbers;
using bindings::pointer;
using bindings::rule_of;
using bindings::stream_of;
using bindings::update_items_of;
using bindings::update_noise_of;

Stream bindings::stream_of(const py::tuple& packed) {
  Stream stream{};
  const std::string key = packed[0].cast<std::string>();
  if (key.size() != sizeof(stream.key)) throw py::value_error("a key has 32 bytes");
  std::memcpy(stream.key, key.data(), sizeof(stream.key));
  stream.n0 = packed[1].cast<std::uint32_t>();
  stream.n1 = packed[2].cast<std::uint32_t>();
  stream.rounds = packed[3].cast<int>();
  return stream;
}

std::vector<cpu::ClipItem> bindings::clip_items_of(const Addresses& gradients,
                                                   const Addresses& sums, const Integers& columns,
                                                   const Numbers& max_norms,
                                                   const Numbers& per_units,
                                                   const Integers& unit_bounds) {
  std::vector<cpu::ClipItem> items(gradients.size());
  for (std::size_t i = 0; i < items.size(); ++i) {
    items[i] = {pointer<const void>(gradients.at(i)),
                pointer<void>(sums.at(i)),
                columns.at(i),
                max_norms.at(i),
                per_units.at(i),
                unit_bounds.at(i)};
  }
  return items;
}

Rule bindings::rule_of(const py::tuple& packed) {
  return {static_cast<RuleKind>(packed[0].cast<int>()),
          packed[1].cast<double>(),
          packed[2].cast<double>(),
          packed[3].cast<bool>(),
          packed[4].cast<double>(),
          packed[5].cast<double>(),
          packed[6].cast<bool>(),
          packed[7].cast<bool>(),
          packed[8].cast<double>(),
          packed[9].cast<double>(),
          packed[10].cast<double>(),
          packed[11].cast<double>(),
          packed[12].cast<double>()};
}

namespace {

// (values, rounding bits or 0, position of the first).
using Made = std::tuple<std::uintptr_t, std::uintptr_t, std::uint64_t>;

cpu::Ahead ahead_of(const Made& made) {
  const auto [values, rounding, first] = made;
  return {pointer<const std::int32_t>(values), pointer<const std::int16_t>(rounding), first};
}

}  // namespace

// noise = None or (law, stream, rounding stream or None[, made ahead]).
cpu::UpdateNoise bindings::update_noise_of(const py::object& noise) {
  cpu::UpdateNoise n{};
  n.on = !noise.is_none();
  if (!n.on) return n;
  const py::tuple packed = noise.cast<py::tuple>();
  n.law = static_cast<Distribution>(packed[0].cast<int>());
  n.stream = stream_of(packed[1].cast<py::tuple>());
  n.rounding = packed[2].is_none() ? n.stream : stream_of(packed[2].cast<py::tuple>());
  if (packed.size() > 3) n.ahead = ahead_of(packed[3].cast<Made>());
  return n;
}

std::vector<cpu::UpdateItem> bindings::update_items_of(
    const Addresses& params, const Addresses& sums, const Addresses& state1,
    const Addresses& state2, const Integers& sizes, const Integers& positions,
    const Numbers& scales) {
  std::vector<cpu::UpdateItem> items(params.size());
  for (std::size_t i = 0; i < items.size(); ++i) {
    items[i] = {pointer<void>(params[i]),
                pointer<const void>(sums.at(i)),
                pointer<void>(state1.at(i)),
                pointer<void>(state2.at(i)),
                sizes.at(i),
                static_cast<std::uint64_t>(positions.at(i)),
                scales.at(i)};
  }
  return items;
}

namespace {

py::dict build_config() {
  py::dict config;
  config["version"] = DPKERN_VERSION;
#if defined(_OPENMP)
  config["openmp"] = true;
#else
  config["openmp"] = false;
#endif
  config["cuda"] = DPKERN_CUDA != 0;
  config["cuda_reason"] = DPKERN_CUDA_REASON;
  config["cuda_archs"] = DPKERN_CUDA_ARCHS;
  config["compiler"] = __VERSION__;
  config["detected_isa"] = static_cast<int>(cpu::detected_isa());
  return config;
}

void keystream(std::uintptr_t out, const py::tuple& stream, std::uint64_t first_block,
               std::int64_t blocks, int threads) {
  const Stream s = stream_of(stream);
  py::gil_scoped_release release;
  cpu::keystream(s, first_block, blocks, pointer<std::uint32_t>(out), threads);
}

void lattice_draws(std::uintptr_t out, const py::tuple& stream, int law, std::uint64_t first,
                   std::int64_t n, int threads) {
  const Stream s = stream_of(stream);
  py::gil_scoped_release release;
  cpu::lattice_draws(s, static_cast<Distribution>(law), first, n, pointer<std::int32_t>(out),
                     threads);
}

void rounding_draws(std::uintptr_t out, const py::tuple& stream, std::uint64_t first,
                    std::int64_t n, int threads) {
  const Stream s = stream_of(stream);
  py::gil_scoped_release release;
  cpu::rounding_draws(s, first, n, pointer<std::int16_t>(out), threads);
}

void add_noise_integer(std::uintptr_t x, bool wide, const py::tuple& stream, int law,
                       const Made& made, std::uint64_t first, std::int64_t n, int threads) {
  const Stream s = stream_of(stream);
  const cpu::Ahead ahead = ahead_of(made);
  const auto distribution = static_cast<Distribution>(law);
  py::gil_scoped_release release;
  if (wide) {
    cpu::add_noise_integer(s, distribution, ahead, first, n, pointer<std::int64_t>(x), threads);
  } else {
    cpu::add_noise_integer(s, distribution, ahead, first, n, pointer<std::int32_t>(x), threads);
  }
}

std::int64_t add_noise_float(std::uintptr_t x, bool wide, const py::tuple& stream,
                             const py::tuple& rounding, int law, const Made& made,
                             std::uint64_t first, std::int64_t n, double scale, int threads) {
  const Stream s = stream_of(stream);
  const cpu::Ahead ahead = ahead_of(made);
  const Stream r = stream_of(rounding);
  const auto distribution = static_cast<Distribution>(law);
  py::gil_scoped_release release;
  return wide ? cpu::add_noise_float(s, r, distribution, ahead, first, n, scale, pointer<double>(x),
                                     threads)
              : cpu::add_noise_float(s, r, distribution, ahead, first, n, scale, pointer<float>(x),
                                     threads);
}

void clip_sum(std::int64_t rows, int p, int style, int arithmetic, int type,
              const Addresses& gradients, const Addresses& sums, const Integers& columns,
              const Numbers& max_norms, const Numbers& per_units, const Integers& unit_bounds,
              std::uintptr_t norms, int threads) {
  const auto items = clip_items_of(gradients, sums, columns, max_norms, per_units, unit_bounds);
  const ClipPlan plan{rows, p, static_cast<Style>(style), static_cast<Arithmetic>(arithmetic)};
  py::gil_scoped_release release;
  cpu::clip_sum(plan, static_cast<GradType>(type), items, pointer<double>(norms), threads);
}

std::int64_t update_step(const py::tuple& rule, const py::object& noise, int sum_type, bool wide,
                         double gradient_scale, const Addresses& params, const Addresses& sums,
                         const Addresses& state1, const Addresses& state2, const Integers& sizes,
                         const Integers& positions, const Numbers& scales, int threads) {
  const Rule r = rule_of(rule);
  const cpu::UpdateNoise n = update_noise_of(noise);
  const auto items = update_items_of(params, sums, state1, state2, sizes, positions, scales);
  py::gil_scoped_release release;
  const auto type = static_cast<SumType>(sum_type);
  return wide ? cpu::update_step<double>(r, n, type, gradient_scale, items, threads)
              : cpu::update_step<float>(r, n, type, gradient_scale, items, threads);
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "dpkern's compiled kernels; use dpkern.ops, which checks its arguments.";
  m.def("build_config", &build_config);
  m.def("isa", [] { return static_cast<int>(cpu::isa()); });
  m.def("use_isa", [](int isa) { return cpu::use_isa(static_cast<cpu::Isa>(isa)); });
  m.def("is_intel", &cpu::is_intel);
  m.def("keystream", &keystream);
  m.def("lattice_draws", &lattice_draws);
  m.def("rounding_draws", &rounding_draws);
  m.def("add_noise_integer", &add_noise_integer);
  m.def("add_noise_float", &add_noise_float);
  m.def("clip_sum", &clip_sum);
  m.def("update_step", &update_step);
  bindings::add_ops(m);
  bindings::add_ghost_conv(m);
  bindings::add_project(m);
  bindings::add_coef(m);
  bindings::add_symbols(m);
  bindings::add_spectral(m);
  py::module_ counted = m.def_submodule("counted", "The counted kernels.");
  bindings::add_counted(counted);
  bindings::add_counted_coef(counted);
#if DPKERN_CUDA
  py::module_ cuda = m.def_submodule("cuda", "The device kernels.");
  bindings::add_cuda(cuda);
#endif
}
