// The one binding of the device kernels: a kernel's place in the list, its grid, and its arguments
// as bytes. What they mean stands in dpkern/ops/backends/_kernels.py.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "cuda/digest.h"
#include "cuda/launch.h"

namespace py = pybind11;

namespace dpkern::bindings {
namespace {

// Of every kernel: its place and its parameters, such as "s44 i8 p8".
py::dict kernels() {
  py::dict all;
  std::size_t place = 0;
  for (const cuda::Kernel& kernel : cuda::kernels()) {
    std::string parameters;
    for (const cuda::Parameter& parameter : kernel.parameters) {
      parameters += (parameters.empty() ? "" : " ") + std::string(1, parameter.kind) +
                    std::to_string(parameter.size);
    }
    all[kernel.name.c_str()] = py::make_tuple(place++, parameters);
  }
  return all;
}

cuda::Error launch(std::size_t place, unsigned int columns, unsigned int rows, unsigned int threads,
                   std::vector<std::string> arguments, std::uintptr_t stream) {
  const cuda::Kernel& kernel = cuda::kernels().at(place);
  if (arguments.size() != kernel.parameters.size()) {
    throw py::value_error(kernel.name + ": another number of arguments");
  }
  std::vector<void*> addresses;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].size() != kernel.parameters[i].size) {
      throw py::value_error(kernel.name + ": an argument of another size");
    }
    addresses.push_back(arguments[i].data());
  }
  return kernel.start(kernel.function, {columns, rows, threads}, addresses.data(),
                      pointer<void>(stream));
}

// Every kernel into the current device: a recording may not load any.
cuda::Error preload() {
  for (const cuda::Kernel& kernel : cuda::kernels()) {
    if (const cuda::Error error = kernel.load(kernel.function); error != 0) return error;
  }
  return 0;
}

py::tuple device_count() {
  int count = 0;
  const cuda::Error error = cuda::device_count(&count);
  return py::make_tuple(count, error);
}

}  // namespace

void add_cuda(py::module_& m) {
  using Free = py::call_guard<py::gil_scoped_release>;
  m.attr("digest") = cuda::kDigest;
  m.def("kernels", &kernels);
  m.def("launch", &launch, Free());
  m.def("preload", &preload, Free());
  m.def("device_count", &device_count);
  m.def("error_text", &cuda::error_text);
}

}  // namespace dpkern::bindings
