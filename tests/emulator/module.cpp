// _emulated: the device kernels on the CPU, and what only tests ask of them.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "cuda_runtime.h"

namespace py = pybind11;

PYBIND11_MODULE(_emulated, m) {
  m.doc() = "dpkern's CUDA kernels as C++ on the CPU, one fiber per thread; for tests.";
  dpkern::bindings::add_cuda(m);
  m.def("order", &emulator::order, py::arg("reverse"));
  m.def("shuffle", &emulator::shuffle, py::arg("seed"));
  m.def("poison", &emulator::poison, py::arg("regions"));
  m.def("fail_next", &emulator::fail_next, py::arg("error"));
  m.def("launches", [] { return emulator::machine().launches; });
}
