// Bindings of the counted spectral kernels.

#include "bindings/bindings.h"
#include "bindings/counted.h"
#include "counted/spectral.h"

namespace py = pybind11;

namespace dpkern::bindings {
namespace {

using Address = std::uintptr_t;
using Size = std::int64_t;
using Sizes = std::vector<Size>;

// In the order of the struct's fields.
counted::Placement placement_of(const Sizes& s) {
  return {s.at(0), s.at(1), s.at(2), s.at(3), s.at(4), s.at(5),
          s.at(6), s.at(7), s.at(8), s.at(9), s.at(10)};
}

template <class F>
py::tuple place(Address from, const Sizes& sizes, Address grids) {
  const auto p = placement_of(sizes);
  return counted([&] { counted::spectral_place(pointer<const F>(from), p, pointer<F>(grids)); });
}

template <class F>
py::tuple take(Address grids, const Sizes& sizes, Address to) {
  const auto p = placement_of(sizes);
  return counted([&] { counted::spectral_take(pointer<const F>(grids), p, pointer<F>(to)); });
}

template <class F>
py::tuple gain(Address spectra, Size count, Size bins, Address gains) {
  return counted(
      [&] { counted::spectral_gain(pointer<F>(spectra), count, bins, pointer<const F>(gains)); });
}

template <class F>
py::tuple powers(Address spectra, Size batch, Size groups, Size channels, Size bins, bool real,
                 Address out) {
  return counted([&] {
    counted::spectral_powers(pointer<const F>(spectra), batch, groups, channels, bins, real,
                             pointer<double>(out));
  });
}

py::tuple squares(Address x_powers, Address g_powers, Size batch, Size groups, Size x_bins,
                  Size g_bins, bool constant, Address index, Address factors, Address x_weights,
                  Address g_weights, double error, double share, Address out) {
  const counted::SpectralBins bins{batch,
                                   groups,
                                   x_bins,
                                   g_bins,
                                   constant,
                                   pointer<const Size>(index),
                                   pointer<const double>(factors),
                                   pointer<const double>(x_weights),
                                   pointer<const double>(g_weights),
                                   error,
                                   share};
  return counted([&] {
    counted::spectral_squares(bins, pointer<const double>(x_powers),
                              pointer<const double>(g_powers), pointer<double>(out));
  });
}

template <class F>
py::tuple gather(Address spectra, Size batch, Size channels, Size bins, bool real, Size kept,
                 Address at, Address turned, Address out) {
  return counted([&] {
    counted::spectral_gather(pointer<const F>(spectra), batch, channels, bins, real, kept,
                             pointer<const Size>(at), pointer<const unsigned char>(turned),
                             pointer<F>(out));
  });
}

// sizes: kept, batch, groups, inputs, outputs, taps.
template <class F>
py::tuple bins_sum(Address x_bins, Address g_bins, Address factors, const Sizes& s, Address cosines,
                   Address sines, Address out) {
  const counted::BinsSum sizes{s.at(0), s.at(1), s.at(2), s.at(3), s.at(4), s.at(5)};
  return counted([&] {
    counted::spectral_bins_sum(pointer<const F>(x_bins), pointer<const F>(g_bins),
                               pointer<const F>(factors), sizes, pointer<const F>(cosines),
                               pointer<const F>(sines), pointer<F>(out));
  });
}

// sizes: maps, height, width, rows, columns, used rows, used columns.
template <class F>
py::tuple separable(Address x, const Sizes& s, Address down, Address across, Address to) {
  const counted::Separable sizes{s.at(0), s.at(1), s.at(2), s.at(3), s.at(4), s.at(5), s.at(6)};
  return counted([&] {
    counted::spectral_separable(pointer<const F>(x), sizes, pointer<const F>(down),
                                pointer<const F>(across), pointer<F>(to));
  });
}

template <class F>
py::tuple whitened_norm(Address gradients, Size batch, Size pairs, Size taps, Address matrix,
                        Size rank, Address out) {
  return counted([&] {
    counted::spectral_whitened_norm(pointer<const F>(gradients), batch, pairs, taps,
                                    pointer<const double>(matrix), rank, pointer<double>(out));
  });
}

template <class F>
py::tuple circulant_wide(Address x, Size batch, Size per_sample, Address to, Address out) {
  return counted([&] {
    counted::circulant_wide(pointer<const F>(x), batch, per_sample, pointer<double>(to),
                            pointer<double>(out));
  });
}

template <class F>
py::tuple circulant_used(Address x, Address factors, bool scale, Size batch, Size per_sample,
                         Address to) {
  return counted([&] {
    counted::circulant_used(pointer<const F>(x), pointer<const F>(factors), scale, batch,
                            per_sample, pointer<F>(to));
  });
}

// sizes: batch, positions, inputs, outputs, block.
counted::Circulant circulant_of(const Sizes& s) {
  return {s.at(0), s.at(1), s.at(2), s.at(3), s.at(4)};
}

py::tuple circulant_squares(Address x, Address g, const Sizes& sizes, int route, Address weights,
                            Address x_squares, Address g_squares, double rounding,
                            double transforming, Address out) {
  const auto s = circulant_of(sizes);
  return counted([&] {
    counted::circulant_squares(pointer<const double>(x), pointer<const double>(g), s,
                               static_cast<counted::CirculantRoute>(route),
                               pointer<const double>(weights), pointer<const double>(x_squares),
                               pointer<const double>(g_squares), rounding, transforming,
                               pointer<double>(out));
  });
}

template <class F>
py::tuple circulant_products(Address x, Address g, const Sizes& sizes, Address gains, Address out) {
  const auto s = circulant_of(sizes);
  return counted([&] {
    counted::circulant_products(pointer<const F>(x), pointer<const F>(g), s,
                                pointer<const F>(gains), pointer<F>(out));
  });
}

template <class F>
py::tuple circulant_keep(Address made, Size batch, Size entries, Address grads, Address out) {
  return counted([&] {
    counted::circulant_keep(pointer<const F>(made), batch, entries, pointer<F>(grads),
                            pointer<double>(out));
  });
}

template <class F>
py::tuple circulant_add(Address made, Size entries, Address out) {
  return counted([&] { counted::circulant_add(pointer<const F>(made), entries, pointer<F>(out)); });
}

template <class F>
void add(py::module_& m, const std::string& type) {
  const auto name = [&](const char* stem) { return stem + type; };
  m.def(name("spectral_place").c_str(), &place<F>);
  m.def(name("spectral_take").c_str(), &take<F>);
  m.def(name("spectral_gain").c_str(), &gain<F>);
  m.def(name("spectral_powers").c_str(), &powers<F>);
  m.def(name("spectral_gather").c_str(), &gather<F>);
  m.def(name("spectral_bins_sum").c_str(), &bins_sum<F>);
  m.def(name("spectral_separable").c_str(), &separable<F>);
  m.def(name("whitened_norm").c_str(), &whitened_norm<F>);
  m.def(name("circulant_wide").c_str(), &circulant_wide<F>);
  m.def(name("circulant_used").c_str(), &circulant_used<F>);
  m.def(name("circulant_products").c_str(), &circulant_products<F>);
  m.def(name("circulant_keep").c_str(), &circulant_keep<F>);
  m.def(name("circulant_add").c_str(), &circulant_add<F>);
}

}  // namespace

void add_counted_spectral(py::module_& m) {
  m.def("spectral_squares", &squares);
  m.def("circulant_squares", &circulant_squares);
  add<float>(m, "_float32");
  add<double>(m, "_float64");
}

}  // namespace dpkern::bindings
