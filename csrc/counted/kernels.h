#pragma once
// Counted kernels of ops with all arithmetic in the core's templates, which run here on counted
// scalars, in loops written plainly. Results equal those of csrc/cpu; the counts are in `current`
// of core/counted.h.

#include <vector>

#include "core/layouts.h"
#include "core/response.h"
#include "cpu/ops.h"

namespace dpkern::counted {

void keystream(const Stream& stream, std::uint64_t first_block, std::int64_t blocks,
               std::uint32_t* out);
void lattice_draws(const Stream& stream, Distribution law, std::uint64_t first, std::int64_t n,
                   std::int32_t* out);
void source_draws(const Draws& made, std::uint64_t first, std::int64_t n, std::int32_t* out);
void rounding_bits(const Stream& stream, std::uint64_t first, std::int64_t n, std::int16_t* out);

// T = int32_t or int64_t.
template <class T>
void add_noise_integer(const UpdateNoise& noise, std::uint64_t first, std::int64_t n, T* x);

// T, R = float or double; `scales`: one per coordinate, or null: `scale` for all.
template <class T, class R>
void add_noise_float(const UpdateNoise& noise, std::uint64_t first, std::int64_t n, double scale,
                     const R* scales, T* x);

// Returns how many sums were not finite. T = float or double.
template <class T>
std::int64_t update_tensors(const cpu::UpdateTensors<T>& call);

template <class F>
void clip_factors(const std::vector<const double*>& squares, std::int64_t batch,
                  const ClipRule& rule, double* norms, F* factors);

template <class T>
void randomize(const Stream& stream, std::uint64_t first, const ResponseParams& response,
               const T* x, std::int64_t n, T* out);

}  // namespace dpkern::counted
