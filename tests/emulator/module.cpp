// _emulated: the CUDA launchers on the CPU, and what only tests ask of them.

#include <dlfcn.h>
#include <pybind11/pybind11.h>

#include "bindings/bindings.h"
#include "cuda_runtime.h"

namespace py = pybind11;

namespace {

// The launches since recording began: the kernel's place in this module, grid, block, arguments.
py::list recorded() {
  py::list launches;
  for (const emulator::Launch& launch : emulator::machine().recorded) {
    Dl_info module;
    dladdr(launch.kernel, &module);
    py::list arguments;
    for (const std::string& bytes : launch.arguments) arguments.append(py::bytes(bytes));
    launches.append(py::make_tuple(
        static_cast<const char*>(launch.kernel) - static_cast<const char*>(module.dli_fbase),
        py::make_tuple(launch.grid.x, launch.grid.y, launch.grid.z), launch.block.x, arguments));
  }
  return launches;
}

void record(bool on) {
  emulator::machine().recording = on;
  emulator::machine().recorded.clear();
}

}  // namespace

PYBIND11_MODULE(_emulated, m) {
  m.doc() = "dpkern's CUDA kernels as C++ on the CPU, one fiber per thread; for tests.";
  dpkern::bindings::add_cuda(m);
  m.def("order", &emulator::order, py::arg("reverse"));
  m.def("fail_next", &emulator::fail_next, py::arg("error"));
  m.def("record", &record, py::arg("on"));
  m.def("recorded", &recorded);
  m.def("launches", [] { return emulator::machine().launches; });
}
