#pragma once
// What the binding files share: addresses as integers, and one function per file that adds its ops.

#include <pybind11/pybind11.h>

#include <cstdint>

#include "core/abi.h"

namespace dpkern::bindings {

template <class T>
T* pointer(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// A stream travels as (32 key bytes, n0, n1, rounds).
Stream stream_of(const pybind11::tuple& packed);

void add_ghost_dense(pybind11::module_& m);
void add_ghost_conv(pybind11::module_& m);
void add_project(pybind11::module_& m);
void add_symbols(pybind11::module_& m);
void add_spectral(pybind11::module_& m);
void add_cuda(pybind11::module_& m);  // with CUDA kernels, and for the emulator

}  // namespace dpkern::bindings
