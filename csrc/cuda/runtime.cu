// The device itself: how many there are, what an error means, and the list of kernels.

#include <cuda_runtime.h>

#include "cuda/launch.h"

namespace dpkern::cuda {

Error device_count(int* count) {
  const cudaError_t error = cudaGetDeviceCount(count);
  if (error == cudaSuccess) return error;
  *count = 0;
  cudaGetLastError();  // or the next launch reports it as its own
  return error;
}

const char* error_text(Error error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

std::vector<Kernel>& kernels() {
  static std::vector<Kernel> all;
  return all;
}

}  // namespace dpkern::cuda
