// Bindings of the spectral kernels.

#include "cpu/spectral.h"

#include <pybind11/pybind11.h>

#include "bindings/bindings.h"

namespace py = pybind11;

namespace dpkern::bindings {
namespace {

template <class T>
void powers(std::uintptr_t spectra, std::int64_t batch, std::int64_t groups, std::int64_t channels,
            std::int64_t bins, std::uintptr_t out, int threads) {
  py::gil_scoped_release release;
  cpu::spectral_powers(pointer<const T>(spectra), batch, groups, channels, bins,
                       pointer<double>(out), threads);
}

void squares(std::uintptr_t x_powers, std::uintptr_t g_powers, std::int64_t batch,
             std::int64_t groups, std::int64_t x_bins, std::int64_t g_bins, std::uintptr_t index,
             std::uintptr_t factors, std::uintptr_t x_weights, std::uintptr_t g_weights,
             double error, double share, std::uintptr_t out, int threads) {
  const cpu::SpectralGrid grid{x_bins,
                               g_bins,
                               pointer<const std::int64_t>(index),
                               pointer<const double>(factors),
                               pointer<const double>(x_weights),
                               pointer<const double>(g_weights),
                               error,
                               share};
  py::gil_scoped_release release;
  cpu::spectral_squares(grid, pointer<const double>(x_powers), pointer<const double>(g_powers),
                        batch, groups, pointer<double>(out), threads);
}

template <class T>
void gather(std::uintptr_t spectra, std::int64_t batch, std::int64_t channels, std::int64_t bins,
            std::uintptr_t kept, std::int64_t count, std::int64_t rows, std::int64_t row,
            std::uintptr_t out, int threads) {
  py::gil_scoped_release release;
  cpu::spectral_gather(pointer<const T>(spectra), batch, channels, bins,
                       pointer<const std::int64_t>(kept), count, rows, row, pointer<T>(out),
                       threads);
}

template <class T>
void whitened(std::uintptr_t gradients, std::int64_t batch, std::int64_t outer, std::int64_t taps,
              std::int64_t inner, std::uintptr_t matrix, std::int64_t rows, std::uintptr_t out,
              int threads) {
  py::gil_scoped_release release;
  cpu::whitened_norm(pointer<const T>(gradients), batch, outer, taps, inner,
                     pointer<const double>(matrix), rows, pointer<double>(out), threads);
}

}  // namespace

void add_spectral(py::module_& m) {
  m.def("spectral_powers_float32", &powers<float>);
  m.def("spectral_powers_float64", &powers<double>);
  m.def("spectral_squares", &squares);
  m.def("spectral_gather_float32", &gather<float>);
  m.def("spectral_gather_float64", &gather<double>);
  m.def("whitened_norm_float32", &whitened<float>);
  m.def("whitened_norm_float64", &whitened<double>);
}

}  // namespace dpkern::bindings
