// Bindings of the ghost kernels for linear, embedding and normalisation layers.

#include "bindings/bindings.h"
#include "cpu/ghost_linear.h"

namespace py = pybind11;

namespace dpkern::bindings {
namespace {

using Address = std::uintptr_t;

void linear_norm(bool wide, Address a, Address g, std::int64_t batch, std::int64_t positions,
                 std::int64_t inputs, std::int64_t outputs, int route, Address squares,
                 int threads) {
  const cpu::LinearShape shape{batch, positions, inputs, outputs};
  const auto r = static_cast<cpu::NormRoute>(route);
  py::gil_scoped_release release;
  auto* const to = pointer<double>(squares);
  if (wide) {
    cpu::linear_norm(pointer<const double>(a), pointer<const double>(g), shape, r, to, threads);
  } else {
    cpu::linear_norm(pointer<const float>(a), pointer<const float>(g), shape, r, to, threads);
  }
}

void linear_gradient(bool wide, Address a, Address g, std::int64_t batch, std::int64_t positions,
                     std::int64_t inputs, std::int64_t outputs, Address grads, Address squares,
                     int threads) {
  const cpu::LinearShape shape{batch, positions, inputs, outputs};
  py::gil_scoped_release release;
  auto* const to = pointer<double>(squares);
  if (wide) {
    cpu::linear_gradient(pointer<const double>(a), pointer<const double>(g), shape,
                         pointer<double>(grads), to, threads);
  } else {
    cpu::linear_gradient(pointer<const float>(a), pointer<const float>(g), shape,
                         pointer<float>(grads), to, threads);
  }
}

}  // namespace

void add_ghost_dense(py::module_& m) {
  m.def("linear_norm", &linear_norm);
  m.def("linear_gradient", &linear_gradient);
}

}  // namespace dpkern::bindings
