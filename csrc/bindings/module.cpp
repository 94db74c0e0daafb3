// dpkern._C: the generated bindings of kernels, and what this build is.

#include <pybind11/pybind11.h>

#include "bindings/bindings.h"
#include "cpu/isa.h"

namespace py = pybind11;
using namespace dpkern;

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

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "dpkern's compiled kernels; use dpkern.ops, which checks its arguments.";
  m.def("build_config", &build_config);
  m.def("isa", [] { return static_cast<int>(cpu::isa()); });
  m.def("use_isa", [](int isa) { return cpu::use_isa(static_cast<cpu::Isa>(isa)); });
  m.def("is_intel", &cpu::is_intel);
  bindings::add_ops(m);
  bindings::add_calls(m);
  bindings::add_guards(m);
  bindings::add_pass_look(m);
  bindings::add_replay(m);
  bindings::add_rows(m);
  bindings::add_step_looks(m);
  bindings::add_unchanged(m);
  bindings::add_uses(m);
  py::module_ counted = m.def_submodule("counted", "The counted kernels.");
  bindings::add_counted(counted);
#if DPKERN_CUDA
  py::module_ cuda = m.def_submodule("cuda", "The device kernels.");
  bindings::add_cuda(cuda);
#endif
}
