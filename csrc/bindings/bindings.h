#pragma once
// What the binding files share: addresses as integers, and one function per file that adds its ops.

#include <pybind11/pybind11.h>

#include <cstdint>
#include <cstring>
#include <string_view>
#include <vector>

#include "core/layouts.h"
#include "cpu/clip.h"
#include "cpu/update.h"

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

// A struct of core/layouts.h travels as its bytes.
template <class T>
T from_bytes(const pybind11::bytes& bytes) {
  const auto content = static_cast<std::string_view>(bytes);
  if (content.size() != sizeof(T)) throw pybind11::value_error("a struct of another layout");
  T made;
  std::memcpy(&made, content.data(), sizeof(T));
  return made;
}

// A stream travels as (32 key bytes, n0, n1, rounds).
Stream stream_of(const pybind11::tuple& packed);

using Addresses = std::vector<std::uintptr_t>;
using Integers = std::vector<std::int64_t>;
using Numbers = std::vector<double>;

// One item per tensor.
std::vector<cpu::ClipItem> clip_items_of(const Addresses& gradients, const Addresses& sums,
                                         const Integers& columns, const Numbers& max_norms,
                                         const Numbers& per_units, const Integers& unit_bounds);

// A rule travels as (kind, lr, weight_decay, decoupled, momentum, dampening, nesterov, first_step,
// beta1, beta2, eps, bias1, bias2).
Rule rule_of(const pybind11::tuple& packed);

// Noise travels as None or (law, stream, rounding stream or None).
cpu::UpdateNoise update_noise_of(const pybind11::object& noise);
std::vector<cpu::UpdateItem> update_items_of(const Addresses& params, const Addresses& sums,
                                             const Addresses& state1, const Addresses& state2,
                                             const Integers& sizes, const Integers& positions,
                                             const Numbers& scales);

void add_coef(pybind11::module_& m);
void add_counted(pybind11::module_& m);
void add_counted_coef(pybind11::module_& m);
void add_ops(pybind11::module_& m);  // generated: the kernels that have signatures in Python
void add_cuda(pybind11::module_& m);  // with CUDA kernels, and for the emulator

}  // namespace dpkern::bindings
