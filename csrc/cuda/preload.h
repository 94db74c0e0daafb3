#pragma once
// Loads the kernels of each source into the current device; see launch.h.

namespace dpkern::cuda {

int preload_noise();
int preload_update();
int preload_clip();
int preload_coef();
int preload_coef_features();
int preload_explicit();
int preload_symbols();

// The first error of asking for each kernel.
template <class... Kernel>
int load_kernels(Kernel*... kernels) {
  cudaFuncAttributes attributes;
  int error = cudaSuccess;
  ((error = error == cudaSuccess ? cudaFuncGetAttributes(&attributes, kernels) : error), ...);
  return error;
}

}  // namespace dpkern::cuda
