// Bindings of the kernels for linear, embedding and normalisation layers.

#include <pybind11/stl.h>

#include <vector>

#include "bindings/bindings.h"
#include "cpu/explicit.h"
#include "cpu/ghost_affine.h"
#include "cpu/ghost_embedding.h"
#include "cpu/ghost_linear.h"
#include "cpu/product.h"

namespace py = pybind11;

namespace dpkern::bindings {
namespace {

using Address = std::uintptr_t;
using Size = std::int64_t;

template <class F>
void linear_norm(Address a, Address g, Size batch, Size positions, Size inputs, Size outputs,
                 int route, Address squares, int threads) {
  py::gil_scoped_release release;
  cpu::linear_norm(pointer<const F>(a), pointer<const F>(g), {batch, positions, inputs, outputs},
                   static_cast<cpu::NormRoute>(route), pointer<double>(squares), threads);
}

template <class F>
void linear_gradient(Address a, Address g, Size batch, Size positions, Size inputs, Size outputs,
                     Address grads, Address squares, int threads) {
  py::gil_scoped_release release;
  cpu::linear_gradient(pointer<const F>(a), pointer<const F>(g),
                       {batch, positions, inputs, outputs}, pointer<F>(grads),
                       pointer<double>(squares), threads);
}

template <class F>
void linear_sum(Address a, Address g, Size batch, Size positions, Size inputs, Size outputs,
                Address factors, Address out, int threads) {
  py::gil_scoped_release release;
  cpu::linear_sum(pointer<const F>(a), pointer<const F>(g), pointer<const F>(factors),
                  {batch, positions, inputs, outputs}, pointer<F>(out), threads);
}

template <class F>
std::vector<cpu::Explicit<F>> parts_of(const Addresses& rows, const std::vector<Size>& columns) {
  std::vector<cpu::Explicit<F>> parts;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    parts.push_back({pointer<const F>(rows[i]), columns[i], nullptr});
  }
  return parts;
}

template <class F>
void explicit_norm(const Addresses& rows, const std::vector<Size>& columns, Size batch,
                   Address squares, int threads) {
  py::gil_scoped_release release;
  cpu::explicit_norm(parts_of<F>(rows, columns), batch, pointer<double>(squares), threads);
}

template <class F>
void contract(const Addresses& rows, const std::vector<Size>& columns, const Addresses& outs,
              Address factors, Size batch, int threads) {
  py::gil_scoped_release release;
  auto parts = parts_of<F>(rows, columns);
  for (std::size_t i = 0; i < outs.size(); ++i) parts[i].out = pointer<F>(outs[i]);
  cpu::contract(parts, pointer<const F>(factors), batch, threads);
}

template <class F>
void clip_factors(const Addresses& squares, Size batch, double max_norm, double scale,
                  bool automatic, Address norms, Address factors, int) {
  py::gil_scoped_release release;
  std::vector<const double*> parts;
  for (const Address part : squares) parts.push_back(pointer<const double>(part));
  cpu::clip_factors(parts, batch, {max_norm, scale, automatic}, pointer<double>(norms),
                    pointer<F>(factors));
}

template <class F>
void embedding_norm(Address ids, Address g, Size batch, Size positions, Size columns, Size padding,
                    Address squares, int threads) {
  py::gil_scoped_release release;
  cpu::embedding_norm(pointer<const Size>(ids), pointer<const F>(g),
                      {batch, positions, columns, padding}, pointer<double>(squares), threads);
}

template <class F>
void embedding_sum(Address ids, Address g, Size batch, Size positions, Size columns, Size padding,
                   Address factors, Address out, int threads) {
  py::gil_scoped_release release;
  cpu::embedding_sum(pointer<const Size>(ids), pointer<const F>(g), pointer<const F>(factors),
                     {batch, positions, columns, padding}, pointer<F>(out), threads);
}

template <class F>
void tied_cross(Address ids, Address e, Size batch, Size positions, Size columns, Size padding,
                Address a, Address g, Size rows, Size vocabulary, Address products, int threads) {
  py::gil_scoped_release release;
  cpu::tied_cross(pointer<const Size>(ids), pointer<const F>(e), pointer<const F>(a),
                  pointer<const F>(g), {batch, positions, columns, padding}, rows, vocabulary,
                  pointer<double>(products), threads);
}

template <class F>
void layer_norm_backward(Address g, Address x, Address mean, Address rstd, Address weight,
                         Address dx, Address dweight, Address dbias, Size batch, Size rows,
                         Size columns, int threads) {
  py::gil_scoped_release release;
  const cpu::LayerNorm<F> norm{pointer<const F>(g),
                               pointer<const F>(x),
                               pointer<const F>(mean),
                               pointer<const F>(rstd),
                               pointer<const F>(weight),
                               pointer<F>(dx),
                               pointer<F>(dweight),
                               pointer<F>(dbias),
                               batch,
                               rows,
                               columns};
  cpu::layer_norm_backward(norm, threads);
}

template <class F>
void group_norm_backward(Address g, Address x, Address mean, Address rstd, Address weight,
                         Address dx, Address dweight, Address dbias, Size batch, Size groups,
                         Size channels, Size places, int threads) {
  py::gil_scoped_release release;
  const cpu::GroupNorm<F> norm{pointer<const F>(g),
                               pointer<const F>(x),
                               pointer<const F>(mean),
                               pointer<const F>(rstd),
                               pointer<const F>(weight),
                               pointer<F>(dx),
                               pointer<F>(dweight),
                               pointer<F>(dbias),
                               batch,
                               groups,
                               channels,
                               places};
  cpu::group_norm_backward(norm, threads);
}

template <class F>
void matmul(Address x, Address w, Address bias, Size rows, Size inner, Size columns,
            bool transposed, Address out, int threads) {
  py::gil_scoped_release release;
  cpu::matmul(pointer<const F>(x), pointer<const F>(w), pointer<const F>(bias),
              {rows, inner, columns, transposed}, pointer<F>(out), threads);
}

// Every kernel by its name and type: linear_norm_float32.
template <class F>
void add(py::module_& m, const std::string& type) {
  const auto name = [&](const char* stem) { return stem + type; };
  m.def(name("linear_norm").c_str(), &linear_norm<F>);
  m.def(name("linear_gradient").c_str(), &linear_gradient<F>);
  m.def(name("linear_sum").c_str(), &linear_sum<F>);
  m.def(name("explicit_norm").c_str(), &explicit_norm<F>);
  m.def(name("contract").c_str(), &contract<F>);
  m.def(name("clip_factors").c_str(), &clip_factors<F>);
  m.def(name("embedding_norm").c_str(), &embedding_norm<F>);
  m.def(name("embedding_sum").c_str(), &embedding_sum<F>);
  m.def(name("tied_cross").c_str(), &tied_cross<F>);
  m.def(name("layer_norm_backward").c_str(), &layer_norm_backward<F>);
  m.def(name("group_norm_backward").c_str(), &group_norm_backward<F>);
  m.def(name("matmul").c_str(), &matmul<F>);
}

}  // namespace

void add_ghost_dense(py::module_& m) {
  add<float>(m, "_float32");
  add<double>(m, "_float64");
}

}  // namespace dpkern::bindings
