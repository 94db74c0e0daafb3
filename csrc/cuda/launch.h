#pragma once
// Launch of device kernels by their place in one list, which the build makes from the launch table
// in dpkern/ops/backends/_kernels.py. Host code without a CUDA header: a stream is an
// address, an error a number. Starting a kernel neither waits nor allocates.

#include <cstddef>
#include <string>
#include <vector>

namespace dpkern::cuda {

using Error = int;         // cudaError_t: 0 is success
using CudaStream = void*;  // cudaStream_t

struct Grid {
  unsigned int columns, rows, threads;  // blocks, and threads of each
};

// A parameter: its kind, p for pointers, f for floats, i for integers, s for structs, and its size.
struct Parameter {
  char kind;
  std::size_t size;
};

struct Kernel {
  std::string name;  // with its template arguments
  std::vector<Parameter> parameters;
  const void* function;
  Error (*start)(const void* function, const Grid& grid, void** arguments, CudaStream stream);
  Error (*load)(const void* function);  // into the current device
};

std::vector<Kernel>& kernels();

Error device_count(int* count);  // 0 and the reason if there is no driver
const char* error_text(Error error);

}  // namespace dpkern::cuda
