// Bindings of polynomial losses.

#include "cpu/coef.h"

#include "bindings/bindings.h"
#include "bindings/counted.h"
#include "counted/coef.h"

namespace py = pybind11;

namespace dpkern::bindings {
namespace {

using Address = std::uintptr_t;
using Size = std::int64_t;

// A release travels as None or (stream, rounding stream, linear, quadratic, scale, scales or 0,
// scales are float64, first, how many, values or 0, rounding bits or 0).
struct Release {
  cpu::CoefNoise noise;
  counted::Draws ahead;
};

Release release_of(const py::object& packed) {
  Release release{};
  release.noise.scale = 1;
  if (packed.is_none()) return release;
  const py::tuple given = packed.cast<py::tuple>();
  counted::Draws& ahead = release.ahead;
  ahead.first = given[7].cast<std::uint64_t>();
  ahead.size = given[8].cast<Size>();
  ahead.values = pointer<const std::int32_t>(given[9].cast<Address>());
  ahead.rounding = pointer<const std::int16_t>(given[10].cast<Address>());
  release.noise = {true,
                   stream_of(given[0].cast<py::tuple>()),
                   stream_of(given[1].cast<py::tuple>()),
                   {ahead.values, ahead.rounding, ahead.first},
                   given[2].cast<std::uint64_t>(),
                   given[3].cast<std::uint64_t>(),
                   given[4].cast<double>(),
                   pointer<const void>(given[5].cast<Address>()),
                   given[6].cast<bool>()};
  return release;
}

template <class F>
auto by_type(bool wide, const F& body) {
  return wide ? body(double{}) : body(float{});
}

bool perturb(bool wide, int form, const py::object& noise, Size rows, Size columns, Address targets,
             Address linear, Address quadratic, int threads) {
  const Release release = release_of(noise);
  py::gil_scoped_release unlocked;
  return by_type(wide, [&](auto zero) {
    using T = decltype(zero);
    return cpu::perturb(static_cast<CoefForm>(form), release.noise, rows, columns,
                        pointer<const T>(targets), pointer<T>(linear), pointer<T>(quadratic),
                        threads);
  });
}

bool quadratic_loss(bool wide, int form, const py::object& noise, Size rows, Size columns,
                    Address z, Address targets, Address shift, Address loss, Address dz,
                    int threads) {
  const Release release = release_of(noise);
  py::gil_scoped_release unlocked;
  return by_type(wide, [&](auto zero) {
    using T = decltype(zero);
    return cpu::quadratic_loss(static_cast<CoefForm>(form), release.noise, rows, columns,
                               pointer<const T>(z), pointer<const T>(targets),
                               pointer<const T>(shift), pointer<double>(loss), pointer<T>(dz),
                               threads);
  });
}

void expanded_loss(bool wide, const py::object& noise, Size records, Size classes, Size width,
                   Address hidden, Address targets, Address weights, Address loss, Address dweights,
                   Address dhidden, int threads) {
  const Release release = release_of(noise);
  py::gil_scoped_release unlocked;
  by_type(wide, [&](auto zero) {
    using T = decltype(zero);
    cpu::expanded_loss(release.noise, records, classes, width, pointer<const T>(hidden),
                       pointer<const T>(targets), pointer<const T>(weights), pointer<double>(loss),
                       pointer<T>(dweights), pointer<T>(dhidden), threads);
  });
}

py::tuple counted_perturb(bool wide, int form, const py::object& noise, Size rows, Size columns,
                          Address targets, Address linear, Address quadratic) {
  const Release release = release_of(noise);
  return counted([&] {
    by_type(wide, [&](auto zero) {
      using T = decltype(zero);
      counted::perturb(static_cast<CoefForm>(form), release.noise, release.ahead, rows, columns,
                       pointer<const T>(targets), pointer<T>(linear), pointer<T>(quadratic));
    });
  });
}

py::tuple counted_quadratic_loss(bool wide, int form, const py::object& noise, Size rows,
                                 Size columns, Address z, Address targets, Address shift,
                                 Address loss, Address dz) {
  const Release release = release_of(noise);
  return counted([&] {
    by_type(wide, [&](auto zero) {
      using T = decltype(zero);
      counted::quadratic_loss(static_cast<CoefForm>(form), release.noise, release.ahead, rows,
                              columns, pointer<const T>(z), pointer<const T>(targets),
                              pointer<const T>(shift), pointer<double>(loss), pointer<T>(dz));
    });
  });
}

}  // namespace

void add_coef(py::module_& m) {
  m.def("coef_perturb", &perturb);
  m.def("coef_quadratic", &quadratic_loss);
  m.def("coef_expanded", &expanded_loss);
}

void add_counted_coef(py::module_& m) {
  m.def("coef_perturb", &counted_perturb);
  m.def("coef_quadratic", &counted_quadratic_loss);
}

}  // namespace dpkern::bindings
