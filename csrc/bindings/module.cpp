// dpkern._C: raw pointers, sizes and codes in, results out. No logic; checks are made in Python.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "cpu/clip.h"
#include "cpu/isa.h"
#include "cpu/noise.h"
#include "cpu/update.h"

namespace py = pybind11;
using namespace dpkern;
using bindings::pointer;
using bindings::stream_of;

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

void add_noise_integer(std::uintptr_t x, bool wide, const py::tuple& stream, int law,
                       std::uint64_t first, std::int64_t n, int threads) {
  const Stream s = stream_of(stream);
  const auto distribution = static_cast<Distribution>(law);
  py::gil_scoped_release release;
  if (wide) {
    cpu::add_noise_integer(s, distribution, first, n, pointer<std::int64_t>(x), threads);
  } else {
    cpu::add_noise_integer(s, distribution, first, n, pointer<std::int32_t>(x), threads);
  }
}

std::int64_t add_noise_float(std::uintptr_t x, bool wide, const py::tuple& stream,
                             const py::tuple& rounding, int law, std::uint64_t first,
                             std::int64_t n, double scale, int threads) {
  const Stream s = stream_of(stream);
  const Stream r = stream_of(rounding);
  const auto distribution = static_cast<Distribution>(law);
  py::gil_scoped_release release;
  return wide ? cpu::add_noise_float(s, r, distribution, first, n, scale, pointer<double>(x),
                                     threads)
              : cpu::add_noise_float(s, r, distribution, first, n, scale, pointer<float>(x),
                                     threads);
}

using Addresses = std::vector<std::uintptr_t>;
using Integers = std::vector<std::int64_t>;
using Numbers = std::vector<double>;

void clip_sum(std::int64_t rows, int p, int style, int arithmetic, int type,
              const Addresses& gradients, const Addresses& sums, const Integers& columns,
              const Numbers& max_norms, const Numbers& per_units, const Integers& unit_bounds,
              std::uintptr_t norms, int threads) {
  std::vector<cpu::ClipItem> items(gradients.size());
  for (std::size_t i = 0; i < items.size(); ++i) {
    items[i] = {pointer<const void>(gradients.at(i)),
                pointer<void>(sums.at(i)),
                columns.at(i),
                max_norms.at(i),
                per_units.at(i),
                unit_bounds.at(i)};
  }
  const ClipPlan plan{rows, p, static_cast<Style>(style), static_cast<Arithmetic>(arithmetic)};
  py::gil_scoped_release release;
  cpu::clip_sum(plan, static_cast<GradType>(type), items, pointer<double>(norms), threads);
}

// rule = (kind, lr, weight_decay, decoupled, momentum, dampening, nesterov, first_step, beta1,
// beta2, eps, bias1, bias2); noise = None or (law, stream, rounding stream or None).
std::int64_t update_step(const py::tuple& rule, const py::object& noise, int sum_type, bool wide,
                         double gradient_scale, const Addresses& params, const Addresses& sums,
                         const Addresses& state1, const Addresses& state2, const Integers& sizes,
                         const Integers& positions, const Numbers& scales, int threads) {
  const Rule r{static_cast<RuleKind>(rule[0].cast<int>()),
               rule[1].cast<double>(),
               rule[2].cast<double>(),
               rule[3].cast<bool>(),
               rule[4].cast<double>(),
               rule[5].cast<double>(),
               rule[6].cast<bool>(),
               rule[7].cast<bool>(),
               rule[8].cast<double>(),
               rule[9].cast<double>(),
               rule[10].cast<double>(),
               rule[11].cast<double>(),
               rule[12].cast<double>()};
  cpu::UpdateNoise n{};
  n.on = !noise.is_none();
  if (n.on) {
    const py::tuple packed = noise.cast<py::tuple>();
    n.law = static_cast<Distribution>(packed[0].cast<int>());
    n.stream = stream_of(packed[1].cast<py::tuple>());
    n.rounding = packed[2].is_none() ? n.stream : stream_of(packed[2].cast<py::tuple>());
  }
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
  m.def("add_noise_integer", &add_noise_integer);
  m.def("add_noise_float", &add_noise_float);
  m.def("clip_sum", &clip_sum);
  m.def("update_step", &update_step);
  bindings::add_ghost_dense(m);
  bindings::add_ghost_conv(m);
  bindings::add_project(m);
  bindings::add_symbols(m);
  bindings::add_spectral(m);
#if DPKERN_CUDA
  py::module_ cuda = m.def_submodule("cuda", "The CUDA launchers.");
  bindings::add_cuda(cuda);
#endif
}
