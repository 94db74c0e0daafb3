#pragma once
// What the binding files share: addresses as integers, and one function per file that adds its ops.

#include <pybind11/pybind11.h>

#include <cstdint>
#include <cstring>
#include <string_view>
#include <vector>

#include "core/layouts.h"

namespace dpkern::bindings {

template <class T>
T* pointer(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// A list of addresses, for kernels that take lists of tensors.
template <class T>
std::vector<T*> pointers(const std::vector<std::uintptr_t>& addresses) {
  std::vector<T*> made;
  made.reserve(addresses.size());
  for (const std::uintptr_t address : addresses) made.push_back(pointer<T>(address));
  return made;
}

// A struct of core/layouts.h travels as its bytes; no bytes: zeros.
template <class T>
T from_bytes(std::string_view content) {
  T made{};
  if (content.empty()) return made;
  if (content.size() != sizeof(T)) throw pybind11::value_error("a struct of another layout");
  std::memcpy(&made, content.data(), sizeof(T));
  return made;
}

// A list of structs.
template <class T>
std::vector<T> list_from_bytes(std::string_view content) {
  if (content.size() % sizeof(T) != 0) throw pybind11::value_error("structs of another layout");
  std::vector<T> made(content.size() / sizeof(T));
  if (!made.empty()) std::memcpy(made.data(), content.data(), content.size());
  return made;
}

// What declarations name lives as long as the process.
inline PyObject* kept(const pybind11::handle& object) { return object.inc_ref().ptr(); }

using Addresses = std::vector<std::uintptr_t>;
using Integers = std::vector<std::int64_t>;

void add_calls(pybind11::module_& m);
void add_guards(pybind11::module_& m);
void add_counted(pybind11::module_& m);
void add_ops(pybind11::module_& m);  // generated: the kernels that have signatures in Python
void add_pass_look(pybind11::module_& m);
void add_replay(pybind11::module_& m);
void add_rows(pybind11::module_& m);
void add_step_looks(pybind11::module_& m);
void add_unchanged(pybind11::module_& m);
void add_uses(pybind11::module_& m);
void add_cuda(pybind11::module_& m);  // with CUDA kernels, and for the emulator

}  // namespace dpkern::bindings
