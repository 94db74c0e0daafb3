// Bindings of projections.

#include "cpu/project.h"

#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "bindings/bindings.h"

namespace py = pybind11;

namespace dpkern::bindings {
namespace {

using Addresses = std::vector<std::uintptr_t>;
using Sizes = std::vector<std::int64_t>;

template <class F>
std::vector<cpu::Part<F>> parts_of(const Addresses& addresses, const Sizes& sizes) {
  std::vector<cpu::Part<F>> parts;
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    parts.push_back({pointer<F>(addresses[i]), sizes.at(i)});
  }
  return parts;
}

template <class F>
void project_ball(const Addresses& addresses, const Sizes& sizes, double radius, int threads) {
  py::gil_scoped_release release;
  cpu::project_ball(parts_of<F>(addresses, sizes), radius, threads);
}

template <class F>
void project_simplex(const Addresses& addresses, const Sizes& sizes, double total, int threads) {
  py::gil_scoped_release release;
  cpu::project_simplex(parts_of<F>(addresses, sizes), total, threads);
}

}  // namespace

void add_project(py::module_& m) {
  m.def("project_ball_float32", &project_ball<float>);
  m.def("project_ball_float64", &project_ball<double>);
  m.def("project_simplex_float32", &project_simplex<float>);
  m.def("project_simplex_float64", &project_simplex<double>);
}

}  // namespace dpkern::bindings
