#pragma once
// Every CUDA launcher. Host code without a CUDA header: a stream is an address, an error a number.
// Pointers are to device memory, unless they are `count` of device_count. A launcher neither waits
// nor allocates; its grid depends on sizes alone, so results never depend on the device.

#include "core/abi.h"
#include "core/clip_plan.h"
#include "core/coef_plan.h"
#include "core/lies.h"
#include "core/update_plan.h"

namespace dpkern::cuda {

using Error = int;         // cudaError_t: 0 is success
using CudaStream = void*;  // cudaStream_t

// runtime.cu
Error device_count(int* count);  // 0 and the reason if there is no driver
const char* error_text(Error error);
Error preload();  // every kernel into the current device: a recording may not load any

// noise.cu. out[0 .. 16 blocks) = keystream words in the order of RFC 8439.
Error keystream(const Stream& stream, std::uint64_t first_block, std::int64_t blocks,
                std::uint32_t* out, CudaStream cuda);
// x[i] = draw at position first + i.
Error lattice_draws(const Stream& stream, Distribution law, std::uint64_t first, std::int64_t n,
                    std::int32_t* x, CudaStream cuda);
// bits[i] = the 16 rounding bits of position first + i.
Error rounding_bits(const Stream& rounding, std::uint64_t first, std::int64_t n,
                    std::uint16_t* bits, CudaStream cuda);
// In place. Floats: `per_unit` and `cell` as numbers of x's type; *nonfinite += how many entries
// were not finite (each counts as zero). Integers read neither, nor `rounding`.
Error add_noise(const Stream& stream, const Stream& rounding, Distribution law, std::uint64_t first,
                std::int64_t n, NoisedType type, double per_unit, double cell, void* x,
                std::int64_t* nonfinite, CudaStream cuda);

// update.cu. *nonfinite += how many sums were not finite (each counts as zero).
Error update_step(const UpdatePlan& plan, const UpdateTask* tasks, std::int64_t* nonfinite,
                  CudaStream cuda);
// The clock of the next step.
Error advance(UpdateClock* clock, double beta1, double beta2, CudaStream cuda);

// symbols.cu. out[i] = the response to x[i], which takes words 2 (first + i) and 2 (first + i) + 1.
enum class SymbolType : int { kUint8 = 0, kInt32 = 1, kInt64 = 2 };
Error randomize_symbols(const Stream& stream, std::uint64_t first, const Lies& lies,
                        SymbolType type, const void* x, std::int64_t n, void* out, CudaStream cuda);

// coef.cu, of arrays of plan.rows x plan.columns. The loss of rows without columns is not written.
Error coef_perturb(const CoefPlan& plan, const void* targets, void* linear, void* quadratic,
                   CudaStream cuda);
// loss[row] = sum of w (a1 + a2 w), dz = a1 + 2 a2 w, with w = z + shift[row]; shift null: z.
Error coef_quadratic(const CoefPlan& plan, const void* z, const void* targets, const void* shift,
                     double* loss, void* dz, CudaStream cuda);

// coef_features.cu: plan.rows records, at most 3584 features. Nothing is written where one of the
// sizes is 0.
std::int64_t coef_expanded_workspace(std::int64_t records, std::int64_t classes,
                                     std::int64_t width);  // bytes
Error coef_expanded(const CoefPlan& plan, std::int64_t classes, std::int64_t width,
                    const void* hidden, const void* targets, const void* weights, double* loss,
                    void* dweights, void* dhidden, void* workspace, CudaStream cuda);

// A list of tensors: `tasks[0 .. count)`, `chunks` and `columns` the totals over all of them.
struct RowTable {
  const RowTask* tasks;
  std::int64_t count;
  std::int64_t chunks;
  std::int64_t columns;
};

// clip.cu. norms[row, task] in float64. Rows with a non-finite entry add nothing to the sums.
std::int64_t clip_workspace(const ClipPlan& plan, GradType type, const RowTable& table);  // bytes
Error clip_sum(const ClipPlan& plan, GradType type, const RowTable& table, const ClipBound* bounds,
               double* norms, void* workspace, CudaStream cuda);

// explicit.cu; `wide`: double instead of float.
// squares[b] = sum over all tasks of || rows[b] ||^2.
std::int64_t explicit_norm_workspace(const RowTable& table, std::int64_t batch);  // bytes
Error explicit_norm(const RowTable& table, bool wide, std::int64_t batch, double* squares,
                    void* workspace, CudaStream cuda);
// norms[b] = scale sqrt(sum_k squares[k][b]), squares[0 .. count), and the factor that clips the
// captured gradient, `scale` included, never rounded up; 0 where the norm is not finite.
Error clip_factors(const double* const* squares, std::int64_t count, std::int64_t batch,
                   const ClipRule& rule, bool wide, double* norms, void* factors, CudaStream cuda);
// sum += sum_b factors[b] rows[b] for every task; a factor of 0 drops its row.
std::int64_t contract_workspace(const RowTable& table, bool wide, std::int64_t batch);  // bytes
Error contract(const RowTable& table, const void* factors, bool wide, std::int64_t batch,
               void* workspace, CudaStream cuda);

}  // namespace dpkern::cuda
