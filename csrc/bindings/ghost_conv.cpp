// Bindings of the ghost kernels for convolution layers.

#include "cpu/ghost_conv.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <vector>

#include "bindings/bindings.h"

namespace py = pybind11;

namespace dpkern::bindings {
namespace {

// batch, in channels, out channels, groups, then height and width of input, output, kernel, stride,
// padding and dilation.
cpu::ConvPlan plan_of(const std::vector<std::int64_t>& sizes) {
  const auto size = [&](std::size_t i) { return cpu::ConvSize{sizes.at(i), sizes.at(i + 1)}; };
  return {sizes.at(0), sizes.at(1), sizes.at(2), sizes.at(3), size(4),
          size(6),     size(8),     size(10),    size(12),    size(14)};
}

void conv_gradient(const std::vector<std::int64_t>& sizes, bool wide, std::uintptr_t x,
                   std::uintptr_t g, std::uintptr_t gradients, std::uintptr_t squares,
                   int threads) {
  const cpu::ConvPlan plan = plan_of(sizes);
  py::gil_scoped_release release;
  if (wide) {
    cpu::conv_gradient(plan, pointer<const double>(x), pointer<const double>(g),
                       pointer<double>(gradients), pointer<double>(squares), threads);
  } else {
    cpu::conv_gradient(plan, pointer<const float>(x), pointer<const float>(g),
                       pointer<float>(gradients), pointer<double>(squares), threads);
  }
}

template <class T>
void run_norm(const cpu::ConvPlan& plan, bool gram, std::uintptr_t x, std::uintptr_t g,
              double* squares, int threads) {
  const auto run = gram ? &cpu::conv_gram_norm<T> : &cpu::conv_norm<T>;
  run(plan, pointer<const T>(x), pointer<const T>(g), squares, threads);
}

void conv_norm(const std::vector<std::int64_t>& sizes, bool wide, bool gram, std::uintptr_t x,
               std::uintptr_t g, std::uintptr_t squares, int threads) {
  const cpu::ConvPlan plan = plan_of(sizes);
  py::gil_scoped_release release;
  const auto run = wide ? &run_norm<double> : &run_norm<float>;
  run(plan, gram, x, g, pointer<double>(squares), threads);
}

void conv_sum(const std::vector<std::int64_t>& sizes, bool wide, std::uintptr_t x, std::uintptr_t g,
              std::uintptr_t factors, std::uintptr_t total, int threads) {
  const cpu::ConvPlan plan = plan_of(sizes);
  py::gil_scoped_release release;
  if (wide) {
    cpu::conv_sum(plan, pointer<const double>(x), pointer<const double>(g),
                  pointer<const double>(factors), pointer<double>(total), threads);
  } else {
    cpu::conv_sum(plan, pointer<const float>(x), pointer<const float>(g),
                  pointer<const float>(factors), pointer<float>(total), threads);
  }
}

}  // namespace

void add_ghost_conv(py::module_& m) {
  m.def("conv_layout", [](const std::vector<std::int64_t>& sizes, bool wide) {
    return static_cast<int>(cpu::conv_layout(plan_of(sizes), wide));
  });
  m.def("conv_gradient", &conv_gradient);
  m.def("conv_norm", &conv_norm);
  m.def("conv_sum", &conv_sum);
}

}  // namespace dpkern::bindings
