// Bindings of the counted kernels: arguments as those of the kernels.

#include "bindings/counted.h"

#include "bindings/bindings.h"
#include "counted/coef.h"
#include "counted/kernels.h"

namespace py = pybind11;

namespace dpkern::bindings {
namespace {

using Address = std::uintptr_t;
using Size = std::int64_t;

// body(zero of the type): 0 = float, 1 = double.
template <class F>
auto by_type(bool wide, const F& body) {
  return wide ? body(double{}) : body(float{});
}

py::tuple keystream(Address out, const py::bytes& stream, std::uint64_t first_block, Size blocks) {
  const Stream s = from_bytes<Stream>(stream);
  return counted([&] { counted::keystream(s, first_block, blocks, pointer<std::uint32_t>(out)); });
}

py::tuple lattice_draws(Address out, const py::bytes& stream, int law, std::uint64_t first,
                        Size n) {
  const Stream s = from_bytes<Stream>(stream);
  return counted([&] {
    counted::lattice_draws(s, static_cast<Distribution>(law), first, n, pointer<std::int32_t>(out));
  });
}

py::tuple source_draws(Address out, const py::bytes& draws, std::uint64_t first, Size n) {
  const Draws made = from_bytes<Draws>(draws);
  return counted([&] { counted::source_draws(made, first, n, pointer<std::int32_t>(out)); });
}

py::tuple rounding_bits(Address out, const py::bytes& stream, std::uint64_t first, Size n) {
  const Stream s = from_bytes<Stream>(stream);
  return counted([&] { counted::rounding_bits(s, first, n, pointer<std::int16_t>(out)); });
}

py::tuple add_noise_integer(Address x, bool wide, const py::bytes& noise, std::uint64_t first,
                            Size n) {
  const auto made = from_bytes<UpdateNoise>(noise);
  return counted([&] {
    if (wide) {
      counted::add_noise_integer(made, first, n, pointer<std::int64_t>(x));
    } else {
      counted::add_noise_integer(made, first, n, pointer<std::int32_t>(x));
    }
  });
}

// scales: an address of one scale per coordinate (of float64 if `wide_scales`), or 0.
py::tuple add_noise_float(Address x, bool wide, const py::bytes& noise, std::uint64_t first, Size n,
                          double scale, Address scales, bool wide_scales) {
  const auto made = from_bytes<UpdateNoise>(noise);
  return counted([&] {
    by_type(wide, [&](auto zero) {
      by_type(wide_scales, [&](auto scale_zero) {
        using T = decltype(zero);
        using R = decltype(scale_zero);
        counted::add_noise_float(made, first, n, scale, pointer<const R>(scales), pointer<T>(x));
      });
    });
  });
}

py::tuple update_tensors(bool wide, const Addresses& params, const Addresses& sums, int sums_kind,
                         const Addresses& buffers, const Integers& positions,
                         const std::vector<double>& scales, const py::bytes& rule,
                         const py::bytes& noise, const py::bytes& maps, double gradient_scale,
                         const Integers& sizes) {
  return counted([&] {
    return by_type(wide, [&](auto zero) {
      using T = decltype(zero);
      return counted::update_tensors(cpu::UpdateTensors<T>{
          pointers<T>(params), pointers<const void>(sums), static_cast<cpu::Summed>(sums_kind),
          pointers<T>(buffers), positions, scales, from_bytes<Rule>(rule),
          from_bytes<UpdateNoise>(noise), list_from_bytes<PairMap>(maps), gradient_scale, sizes});
    });
  });
}

py::tuple perturb(bool wide, Address targets, int form, const py::bytes& noise, Address linear,
                  Address quadratic, Size rows, Size columns) {
  return counted([&] {
    by_type(wide, [&](auto zero) {
      using T = decltype(zero);
      counted::perturb(cpu::Perturb<T>{pointer<const T>(targets), static_cast<CoefForm>(form),
                                       from_bytes<CoefNoise>(noise), pointer<T>(linear),
                                       pointer<T>(quadratic), rows, columns});
    });
  });
}

py::tuple quadratic(bool wide, Address z, Address targets, int form, const py::bytes& noise,
                    Address shift, Address loss, Address dz, Size rows, Size columns) {
  return counted([&] {
    by_type(wide, [&](auto zero) {
      using T = decltype(zero);
      counted::quadratic(cpu::Quadratic<T>{pointer<const T>(z), pointer<const T>(targets),
                                           static_cast<CoefForm>(form),
                                           from_bytes<CoefNoise>(noise), pointer<const T>(shift),
                                           pointer<double>(loss), pointer<T>(dz), rows, columns});
    });
  });
}

// tensors, numbers, sizes: in the order of cpu::Descend.
py::tuple descend(bool wide, const Addresses& tensors, int form, const std::vector<double>& numbers,
                  const std::vector<Size>& sizes) {
  return counted([&] {
    by_type(wide, [&](auto zero) {
      using T = decltype(zero);
      counted::descend(cpu::Descend<T>{pointer<T>(tensors[0]),
                                       pointer<T>(tensors[1]),
                                       pointer<std::int32_t>(tensors[2]),
                                       pointer<const T>(tensors[3]),
                                       pointer<const T>(tensors[4]),
                                       pointer<const std::int64_t>(tensors[5]),
                                       static_cast<CoefForm>(form),
                                       numbers[0],
                                       numbers[1],
                                       numbers[2],
                                       pointer<const T>(tensors[6]),
                                       pointer<const std::int32_t>(tensors[7]),
                                       pointer<const std::int16_t>(tensors[8]),
                                       numbers[3],
                                       numbers[4],
                                       sizes[0],
                                       sizes[1],
                                       sizes[2],
                                       sizes[3],
                                       sizes[4],
                                       sizes[5],
                                       sizes[6],
                                       sizes[7]});
    });
  });
}

py::tuple clip_factors(bool wide, const Addresses& squares, Size batch, double max_norm,
                       double scale, bool automatic, Address norms, Address factors) {
  std::vector<const double*> parts;
  for (const Address part : squares) parts.push_back(pointer<const double>(part));
  return counted([&] {
    by_type(wide, [&](auto zero) {
      counted::clip_factors(parts, batch, {max_norm, scale, automatic}, pointer<double>(norms),
                            pointer<decltype(zero)>(factors));
    });
  });
}

// type: 0 = uint8, 1 = int32, 2 = int64.
py::tuple randomize_symbols(int type, const py::bytes& stream, std::uint64_t first,
                            std::uint32_t categories, std::uint64_t keep, Address x, Size n,
                            Address out) {
  const Stream s = from_bytes<Stream>(stream);
  const ResponseParams response = make_response_params(categories, keep);
  const auto run = [&](auto zero) {
    using T = decltype(zero);
    counted::randomize(s, first, response, pointer<const T>(x), n, pointer<T>(out));
  };
  return counted([&] {
    if (type == 0) return run(std::uint8_t{});
    if (type == 1) return run(std::int32_t{});
    run(std::int64_t{});
  });
}

}  // namespace

void add_counted(py::module_& m) {
  m.def("open_cipher", [](bool open) { cipher_is_open = open; });
  m.def("keystream", &keystream);
  m.def("lattice_draws", &lattice_draws);
  m.def("rounding_bits", &rounding_bits);
  m.def("source_draws", &source_draws);
  m.def("add_noise_integer", &add_noise_integer);
  m.def("add_noise_float", &add_noise_float);
  m.def("update_tensors", &update_tensors);
  m.def("perturb", &perturb);
  m.def("quadratic", &quadratic);
  m.def("descend", &descend);
  m.def("clip_factors", &clip_factors);
  m.def("randomize_symbols", &randomize_symbols);
}

}  // namespace dpkern::bindings
