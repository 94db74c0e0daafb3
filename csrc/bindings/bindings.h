#pragma once
// What the binding files share: addresses as integers, and one function per file that adds its ops.

#include <pybind11/pybind11.h>

#include <cstdint>

namespace dpkern::bindings {

template <class T>
T* pointer(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

void add_ghost_dense(pybind11::module_& m);
void add_ghost_conv(pybind11::module_& m);
void add_spectral(pybind11::module_& m);
void add_cuda(pybind11::module_& m);  // with CUDA kernels, and for the emulator

}  // namespace dpkern::bindings
