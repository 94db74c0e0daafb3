#pragma once
// Counted kernels, of ops whose arithmetic is in the core's templates alone: these run here on
// counted scalars, in loops written plainly. Results equal the kernels' of csrc/cpu; what they took
// is in core/counted.h's `current`.

#include <vector>

#include "core/layouts.h"
#include "cpu/explicit.h"
#include "cpu/symbols.h"
#include "cpu/update.h"

namespace dpkern::counted {

void keystream(const Stream& stream, std::uint64_t first_block, std::int64_t blocks,
               std::uint32_t* out);
void lattice_draws(const Stream& stream, Distribution law, std::uint64_t first, std::int64_t n,
                   std::int32_t* out);
void rounding_bits(const Stream& stream, std::uint64_t first, std::int64_t n, std::int16_t* out);

// T = int32_t or int64_t.
template <class T>
void add_noise_integer(const Stream& stream, Distribution law, std::uint64_t first, std::int64_t n,
                       T* x);

// T, R = float or double; `scales`: one per coordinate, or null: `scale` for all.
template <class T, class R>
void add_noise_float(const Stream& stream, const Stream& rounding, Distribution law,
                     std::uint64_t first, std::int64_t n, double scale, const R* scales, T* x);

// Draws made ahead; values null: the streams make them.
struct Draws {
  std::uint64_t first;  // position of the first
  std::int64_t size;
  const std::int32_t* values;
  const std::int16_t* rounding;  // null: the stream makes them
};

// Returns how many sums were not finite. T = float or double.
template <class T>
std::int64_t update_step(const Rule& rule, const cpu::UpdateNoise& noise, const Draws& ahead,
                         SumType sum_type, double gradient_scale,
                         const std::vector<cpu::UpdateItem>& items);

template <class F>
void clip_factors(const std::vector<const double*>& squares, std::int64_t batch,
                  const ClipRule& rule, double* norms, F* factors);

template <class T>
void randomize(const Stream& stream, std::uint64_t first, const Lies& lies, const T* x,
               std::int64_t n, T* out);

}  // namespace dpkern::counted
