// The device itself: how many there are, what an error means, kernels loaded ahead.

#include <cuda_runtime.h>

#include "cuda/launch.h"
#include "cuda/preload.h"

namespace dpkern::cuda {

Error device_count(int* count) {
  const cudaError_t error = cudaGetDeviceCount(count);
  if (error == cudaSuccess) return error;
  *count = 0;
  cudaGetLastError();  // or the next launch reports it as its own
  return error;
}

const char* error_text(Error error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

Error preload() {
  for (const auto load : {&preload_noise, &preload_update, &preload_clip, &preload_coef,
                          &preload_coef_features, &preload_explicit, &preload_symbols}) {
    if (const Error error = load(); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace dpkern::cuda
