// Bindings of randomized response.

#include "cpu/symbols.h"

#include "bindings/bindings.h"

namespace py = pybind11;

namespace dpkern::bindings {
namespace {

template <class T>
void randomize(const Stream& stream, std::uint64_t first, const Lies& lies, std::uintptr_t x,
               std::int64_t n, std::uintptr_t out, int threads) {
  cpu::randomize(stream, first, lies, pointer<const T>(x), n, pointer<T>(out), threads);
}

// type: 0 = uint8, 1 = int32, 2 = int64.
void randomize_symbols(int type, const py::bytes& stream, std::uint64_t first,
                       std::uint32_t categories, std::uint64_t keep, std::uintptr_t x,
                       std::int64_t n, std::uintptr_t out, int threads) {
  const Stream s = from_bytes<Stream>(stream);
  const Lies lies = lies_of(categories, keep);
  py::gil_scoped_release release;
  if (type == 0) return randomize<std::uint8_t>(s, first, lies, x, n, out, threads);
  if (type == 1) return randomize<std::int32_t>(s, first, lies, x, n, out, threads);
  randomize<std::int64_t>(s, first, lies, x, n, out, threads);
}

}  // namespace

void add_symbols(py::module_& m) { m.def("randomize_symbols", &randomize_symbols); }

}  // namespace dpkern::bindings
