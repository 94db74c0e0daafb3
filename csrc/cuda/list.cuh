#pragma once
// Put the kernels of a source on the list of `launch.h`. Only generated files include this.

#include <cuda_runtime.h>

#include <type_traits>

#include "cuda/launch.h"

namespace dpkern::cuda {

template <class P>
Parameter parameter_of() {
  return {std::is_pointer_v<P>          ? 'p'
          : std::is_floating_point_v<P> ? 'f'
          : std::is_integral_v<P>       ? 'i'
                                        : 's',
          sizeof(P)};
}

template <class... P>
Error start_kernel(const void* function, const Grid& grid, void** arguments, CudaStream stream) {
  return cudaLaunchKernel(reinterpret_cast<void (*)(P...)>(const_cast<void*>(function)),
                          dim3(grid.columns, grid.rows), dim3(grid.threads), arguments, 0,
                          static_cast<cudaStream_t>(stream));
}

inline Error load_kernel(const void* function) {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, function);
}

template <class... P>
Kernel kernel_of(const char* name, void (*function)(P...)) {
  return {name,
          {parameter_of<P>()...},
          reinterpret_cast<const void*>(function),
          &start_kernel<P...>,
          &load_kernel};
}

inline bool list_kernels(const std::vector<Kernel>& more) {
  kernels().insert(kernels().end(), more.begin(), more.end());
  return true;
}

}  // namespace dpkern::cuda

#define DPK_KERNEL(...) kernel_of(#__VA_ARGS__, __VA_ARGS__)
