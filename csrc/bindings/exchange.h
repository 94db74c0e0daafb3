#pragma once
// Tensors seen without linking torch: the part of DLPack's C exchange API that is used. torch
// publishes it as Tensor.__dlpack_c_exchange_api__; dpkern/ops/backends/_direct.py tries it out
// before it is used.

#include <cstdint>

namespace dpkern::bindings {

// DLTensor. Shape and strides are the tensor's own memory, and live as long as they stay.
struct View {
  void* data;
  struct {
    std::int32_t type, index;
  } device;
  std::int32_t dims;
  struct {
    std::uint8_t code, bits;
    std::uint16_t lanes;
  } dtype;
  const std::int64_t* shape;
  const std::int64_t* strides;
  std::uint64_t offset;
};

constexpr std::int32_t kCpu = 1;      // DLPack's name of the device
constexpr std::uint8_t kComplex = 5;  // and of dtypes

// DLPackExchangeAPI, of which only one function is called.
struct Exchange {
  std::uint32_t major, minor;
  const Exchange* older;
  const void* allocate;
  const void* export_owned;
  const void* import_owned;
  int (*view)(void* tensor, View* into);  // not 0: a Python error is set
  const void* stream;
};

constexpr std::uint32_t kExchangeMajor = 1;

}  // namespace dpkern::bindings
