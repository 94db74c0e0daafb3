#pragma once
// How a counted execution comes back to Python.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <vector>

#include "core/counted.h"

namespace dpkern::bindings {

// run() counted: (its result, counts, counts by chance, flops, bytes read, bytes written), counts
// in the order of PRIMITIVES. The interpreter's lock is kept: the counters are global.
template <class F>
pybind11::tuple counted(const F& run) {
  Tally exact{};
  Tally chance{};
  pybind11::object result = pybind11::none();
  {
    const Counting counting(&exact);
    by_chance = &chance;
    if constexpr (std::is_void_v<decltype(run())>) {
      run();
    } else {
      result = pybind11::cast(run());
    }
    by_chance = nullptr;
  }
  const auto list = [](const Tally& tally) {
    return std::vector<std::int64_t>(tally.counts, tally.counts + kPrimitives);
  };
  return pybind11::make_tuple(result, list(exact), list(chance), exact.flops, exact.bytes_read,
                              exact.bytes_written);
}

}  // namespace dpkern::bindings
