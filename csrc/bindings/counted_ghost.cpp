// Bindings of the counted ghost kernels of layers and of the matrix product.

#include "bindings/bindings.h"
#include "bindings/counted.h"
#include "counted/ghost.h"

namespace py = pybind11;

namespace dpkern::bindings {
namespace {

using Address = std::uintptr_t;
using Size = std::int64_t;

template <class F>
py::tuple linear_norm(Address a, Address g, Size batch, Size positions, Size inputs, Size outputs,
                      int route, Address squares) {
  return counted([&] {
    counted::linear_norm(pointer<const F>(a), pointer<const F>(g),
                         {batch, positions, inputs, outputs}, static_cast<counted::Route>(route),
                         pointer<double>(squares));
  });
}

template <class F>
py::tuple linear_gradient(Address a, Address g, Size batch, Size positions, Size inputs,
                          Size outputs, Address grads, Address squares) {
  return counted([&] {
    counted::linear_gradient(pointer<const F>(a), pointer<const F>(g),
                             {batch, positions, inputs, outputs}, pointer<F>(grads),
                             pointer<double>(squares));
  });
}

template <class F>
py::tuple linear_sum(Address a, Address g, Size batch, Size positions, Size inputs, Size outputs,
                     Address factors, Address out) {
  return counted([&] {
    counted::linear_sum(pointer<const F>(a), pointer<const F>(g),
                        {batch, positions, inputs, outputs}, pointer<const F>(factors),
                        pointer<F>(out));
  });
}

// sizes: batch, in, out, groups, then three each of input, output, kernel, stride, padding,
// dilation.
counted::ConvSizes conv_sizes(const std::vector<Size>& sizes) {
  counted::ConvSizes s{sizes.at(0), sizes.at(1), sizes.at(2), sizes.at(3), {}, {}, {}, {}, {}, {}};
  Size* const fields[] = {s.input, s.output, s.kernel, s.stride, s.padding, s.dilation};
  for (std::size_t i = 0; i < 18; ++i) fields[i / 3][i % 3] = sizes.at(4 + i);
  return s;
}

template <class F>
py::tuple conv_norm(const std::vector<Size>& sizes, bool gram, Address x, Address g,
                    Address squares) {
  const auto s = conv_sizes(sizes);
  return counted([&] {
    auto* const run = gram ? &counted::conv_gram_norm<F> : &counted::conv_norm<F>;
    run(s, pointer<const F>(x), pointer<const F>(g), pointer<double>(squares));
  });
}

template <class F>
py::tuple conv_gradient(const std::vector<Size>& sizes, Address x, Address g, Address grads,
                        Address squares) {
  const auto s = conv_sizes(sizes);
  return counted([&] {
    counted::conv_gradient(s, pointer<const F>(x), pointer<const F>(g), pointer<F>(grads),
                           pointer<double>(squares));
  });
}

template <class F>
py::tuple conv_sum(const std::vector<Size>& sizes, Address x, Address g, Address factors,
                   Address out) {
  const auto s = conv_sizes(sizes);
  return counted([&] {
    counted::conv_sum(s, pointer<const F>(x), pointer<const F>(g), pointer<const F>(factors),
                      pointer<F>(out));
  });
}

// padding: None or the id that is ignored.
counted::EmbeddingSizes embedding_sizes(Size batch, Size positions, Size columns,
                                        const py::object& padding) {
  const bool has = !padding.is_none();
  return {batch, positions, columns, has, has ? padding.cast<Size>() : 0};
}

template <class F>
py::tuple embedding_norm(Address ids, Address g, Size batch, Size positions, Size columns,
                         const py::object& padding, Address squares) {
  const auto sizes = embedding_sizes(batch, positions, columns, padding);
  return counted([&] {
    counted::embedding_norm(pointer<const Size>(ids), pointer<const F>(g), sizes,
                            pointer<double>(squares));
  });
}

template <class F>
py::tuple embedding_sum(Address ids, Address g, Size batch, Size positions, Size columns,
                        const py::object& padding, Address factors, Size table, Address out) {
  const auto sizes = embedding_sizes(batch, positions, columns, padding);
  return counted([&] {
    counted::embedding_sum(pointer<const Size>(ids), pointer<const F>(g), sizes,
                           pointer<const F>(factors), table, pointer<F>(out));
  });
}

template <class F>
py::tuple tied_cross(Address ids, Address e, Size batch, Size positions, Size columns,
                     const py::object& padding, Address a, Address g, Size rows, Size vocabulary,
                     Address products) {
  const auto sizes = embedding_sizes(batch, positions, columns, padding);
  return counted([&] {
    counted::tied_cross(pointer<const Size>(ids), pointer<const F>(e), pointer<const F>(a),
                        pointer<const F>(g), sizes, rows, vocabulary, pointer<double>(products));
  });
}

template <class F>
py::tuple layer_norm_backward(bool centred, Address g, Address x, Address mean, Address rstd,
                              Address weight, Address dx, Address dweight, Address dbias,
                              Size batch, Size rows, Size columns) {
  const counted::LayerNormOperands<F> norm{centred,
                                           pointer<const F>(g),
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
  return counted([&] { counted::layer_norm_backward(norm); });
}

template <class F>
py::tuple group_norm_backward(Address g, Address x, Address mean, Address rstd, Address weight,
                              Address dx, Address dweight, Address dbias, Size batch, Size groups,
                              Size channels, Size places) {
  const counted::GroupNormOperands<F> norm{pointer<const F>(g),
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
  return counted([&] { counted::group_norm_backward(norm); });
}

template <class F>
py::tuple matmul(Address x, Address w, Address bias, Size rows, Size inner, Size columns,
                 bool transposed, Address out) {
  return counted([&] {
    counted::matmul(pointer<const F>(x), pointer<const F>(w), pointer<const F>(bias), rows, inner,
                    columns, transposed, pointer<F>(out));
  });
}

// Every kernel by its name and type: linear_norm_float32.
template <class F>
void add(py::module_& m, const std::string& type) {
  const auto name = [&](const char* stem) { return stem + type; };
  m.def(name("linear_norm").c_str(), &linear_norm<F>);
  m.def(name("linear_gradient").c_str(), &linear_gradient<F>);
  m.def(name("linear_sum").c_str(), &linear_sum<F>);
  m.def(name("conv_norm").c_str(), &conv_norm<F>);
  m.def(name("conv_gradient").c_str(), &conv_gradient<F>);
  m.def(name("conv_sum").c_str(), &conv_sum<F>);
  m.def(name("embedding_norm").c_str(), &embedding_norm<F>);
  m.def(name("embedding_sum").c_str(), &embedding_sum<F>);
  m.def(name("tied_cross").c_str(), &tied_cross<F>);
  m.def(name("layer_norm_backward").c_str(), &layer_norm_backward<F>);
  m.def(name("group_norm_backward").c_str(), &group_norm_backward<F>);
  m.def(name("matmul").c_str(), &matmul<F>);
}

}  // namespace

void add_counted_ghost(py::module_& m) {
  add<float>(m, "_float32");
  add<double>(m, "_float64");
}

}  // namespace dpkern::bindings
