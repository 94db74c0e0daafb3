// Per-sample gradients that exist anyway: their norms, clip factors and weighted sums.

#include "core/clip_factor.h"
#include "cuda/rows.cuh"

namespace dpkern::cuda {

constexpr int kFactorThreads = 128;

// squares[row] = sum of the row's partial powers, by one warp, in a fixed order.
__global__ void __launch_bounds__(kFactorThreads)
    square_kernel(const double* partial, std::int64_t chunks, std::int64_t batch, double* squares) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t row =
      blockIdx.x * static_cast<std::int64_t>(kFactorThreads / 32) + threadIdx.x / 32;
  if (row >= batch) return;
  double sum = 0;
  for (std::int64_t chunk = lane; chunk < chunks; chunk += 32) sum += partial[row * chunks + chunk];
  sum = warp_sum(sum);
  if (lane == 0) squares[row] = sum;
}

template <class F>
__global__ void __launch_bounds__(kFactorThreads)
    clip_factors_kernel(const double* const* squares, std::int64_t count, std::int64_t batch,
                        ClipRule rule, double* norms, F* factors) {
  const std::int64_t b = blockIdx.x * static_cast<std::int64_t>(kFactorThreads) + threadIdx.x;
  if (b >= batch) return;
  double square = 0;
  for (std::int64_t k = 0; k < count; ++k) square += squares[k][b];
  const double norm = std::sqrt(square) * rule.scale;
  const double factor =
      std::isfinite(norm) ? clip_factor(norm, rule.max_norm, rule.automatic) : 0.0;
  norms[b] = norm;
  factors[b] = round_down<F>(factor * rule.scale);
}

}  // namespace dpkern::cuda

#if !defined(__CUDACC_RTC__)
#include "cuda/launch.h"
#include "cuda/preload.h"

namespace dpkern::cuda {
namespace {

Rows rows_of(const RowTable& table, std::int64_t batch) {
  return {table.tasks, table.count, table.chunks, table.columns, batch};
}

template <class F>
Error contract_of(const Rows& all, const void* factors, void* workspace, CudaStream cuda) {
  const Factors<F> weights{static_cast<const F*>(factors), 1, 0};
  const std::int64_t splits = splits_of(all);
  F* const partial = static_cast<F*>(workspace);
  const dim3 grid(blocks_of(all.chunks * kBlocksPerChunk, 1), static_cast<unsigned int>(splits));
  DPK_LAUNCH((sum_kernel<F, F, F>), grid, kRowThreads, cuda, all, weights, partial, Powers{});
  if (splits > 1) {
    DPK_LAUNCH_FLAT(combine_kernel<F>, blocks_of(all.chunks, 1), kRowThreads, cuda, all, splits,
                    partial);
  }
  return cudaGetLastError();
}

}  // namespace

std::int64_t explicit_norm_workspace(const RowTable& table, std::int64_t batch) {
  return batch * table.chunks * static_cast<std::int64_t>(sizeof(double));
}

Error explicit_norm(const RowTable& table, bool wide, std::int64_t batch, double* squares,
                    void* workspace, CudaStream cuda) {
  if (batch == 0) return cudaSuccess;
  const Rows all = rows_of(table, batch);
  double* const partial = static_cast<double*>(workspace);
  if (table.chunks > 0) {
    const unsigned int grid = blocks_of(batch * table.chunks, 1);
    if (wide) {
      DPK_LAUNCH(power_kernel<double>, grid, kRowThreads, cuda, all, 2, partial);
    } else {
      DPK_LAUNCH(power_kernel<float>, grid, kRowThreads, cuda, all, 2, partial);
    }
    if (const Error error = cudaGetLastError(); error != cudaSuccess) return error;
  }
  DPK_LAUNCH(square_kernel, blocks_of(batch, kFactorThreads / 32), kFactorThreads, cuda, partial,
             table.chunks, batch, squares);
  return cudaGetLastError();
}

Error clip_factors(const double* const* squares, std::int64_t count, std::int64_t batch,
                   const ClipRule& rule, bool wide, double* norms, void* factors, CudaStream cuda) {
  if (batch == 0) return cudaSuccess;
  const unsigned int grid = blocks_of(batch, kFactorThreads);
  if (wide) {
    DPK_LAUNCH_FLAT(clip_factors_kernel<double>, grid, kFactorThreads, cuda, squares, count, batch,
                    rule, norms, static_cast<double*>(factors));
  } else {
    DPK_LAUNCH_FLAT(clip_factors_kernel<float>, grid, kFactorThreads, cuda, squares, count, batch,
                    rule, norms, static_cast<float*>(factors));
  }
  return cudaGetLastError();
}

std::int64_t contract_workspace(const RowTable& table, bool wide, std::int64_t batch) {
  const std::int64_t splits = splits_of(rows_of(table, batch));
  if (splits == 1) return 0;
  return splits * table.columns * static_cast<std::int64_t>(wide ? sizeof(double) : sizeof(float));
}

Error contract(const RowTable& table, const void* factors, bool wide, std::int64_t batch,
               void* workspace, CudaStream cuda) {
  if (batch == 0 || table.chunks == 0) return cudaSuccess;
  const Rows all = rows_of(table, batch);
  return wide ? contract_of<double>(all, factors, workspace, cuda)
              : contract_of<float>(all, factors, workspace, cuda);
}

Error preload_explicit() {
  return load_kernels(power_kernel<float>, power_kernel<double>, square_kernel,
                      clip_factors_kernel<float>, clip_factors_kernel<double>,
                      sum_kernel<float, float, float>, sum_kernel<double, double, double>,
                      combine_kernel<float>, combine_kernel<double>);
}

}  // namespace dpkern::cuda
#endif
