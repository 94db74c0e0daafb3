// Norms, products and weighted sums of block-circulant layers: blocks are transformed on the chip,
// by sums with cosines and sines, and no spectrum is ever in memory. With c and s the cosine and
// sine sums of a block, its transform is c - i s; the conjugate of one times another is
//
//   (a_c b_c + a_s b_s) + i (a_s b_c - a_c b_s).
//
// docs/spectral.md proves the norm's bound. The host lays tables out (_launch_circulant.py).

#include "cuda/block.cuh"

namespace dpkern::cuda {

// The sum over blocks j = first, first + step, .. of the power of frequency k.
template <class T>
__device__ __forceinline__ double power_of_blocks(const CirculantNorm& call, const T* blocks,
                                                  std::int64_t count, int first, int step, int k) {
  double power = 0;
  for (std::int64_t j = first; j < count; j += step) {
    const T* const block = blocks + j * call.block;
    double cosine = 0, sine = 0;
    int at = 0;
    for (int u = 0; u < call.block; ++u) {
      const double x = static_cast<double>(block[u]);
      cosine = ::fma(x, call.turns[at], cosine);
      sine = ::fma(x, call.turns[call.block + at], sine);
      at += k;
      if (at >= call.block) at -= call.block;
    }
    power = ::fma(cosine, cosine, ::fma(sine, sine, power));
  }
  return power;
}

template <class T>
__device__ __forceinline__ double square_of(const T* numbers, std::int64_t count) {
  double square = 0;
  for (std::int64_t i = threadIdx.x; i < count; i += kCirculantNormThreads) {
    const double x = static_cast<double>(numbers[i]);
    square = ::fma(x, x, square);
  }
  return square;
}

// squares[b] = sum over frequencies of weights P_x P_g, raised by what rounding can hide. Threads
// have a frequency each; if there are few, teams of them share the blocks.
template <class T>
__global__ void __launch_bounds__(kCirculantNormThreads)
    circulant_norm_kernel(CirculantNorm call, const T* x, const T* g, double* squares) {
  typedef BlockTotals<kCirculantNormThreads> Totals;
  __shared__ double room[Totals::kCount];
  __shared__ double x_powers[kCirculantNormThreads], g_powers[kCirculantNormThreads];
  const int thread = static_cast<int>(threadIdx.x);
  const int lanes = call.bins < kCirculantNormThreads ? call.bins : kCirculantNormThreads;
  const int teams = kCirculantNormThreads / lanes, team = thread / lanes, lane = thread % lanes;
  const T* const xs = x + blockIdx.x * call.ins * call.block;
  const T* const gs = g + blockIdx.x * call.outs * call.block;
  double total = 0;
  for (int first = 0; first < call.bins; first += lanes) {
    const int k = first + lane;
    const bool any = team < teams && k < call.bins;
    x_powers[thread] = any ? power_of_blocks(call, xs, call.ins, team, teams, k) : 0;
    g_powers[thread] = any ? power_of_blocks(call, gs, call.outs, team, teams, k) : 0;
    __syncthreads();
    if (team == 0 && k < call.bins) {
      double of_x = 0, of_g = 0;
      for (int i = 0; i < teams; ++i) {
        of_x += x_powers[i * lanes + lane];
        of_g += g_powers[i * lanes + lane];
      }
      total = ::fma(call.weights[k], of_x * of_g, total);
    }
    __syncthreads();
  }
  total = Totals::sum(total, room);
  const double x_square = Totals::sum(square_of(xs, call.ins * call.block), room);
  const double g_square = Totals::sum(square_of(gs, call.outs * call.block), room);
  if (thread == 0) squares[blockIdx.x] = ::fma(call.error * x_square, g_square, total);
}

// out[split, row, column, u] = sum over a split's terms of factors times the block whose transform
// is conj(a^) b^, or a^ b^ if the sign is -1. A thread has one row and column, and kCirculantBins
// frequencies of them at a time; the transforms of a few terms are shared by all threads.
template <class T>
__global__ void __launch_bounds__(kCirculantThreads)
    circulant_pairs_kernel(CirculantPairs call, const T* a, const T* b, const T* factors, T* out) {
  constexpr int kOperand = kCirculantStep * kCirculantBins * kCirculantTile;
  __shared__ T cosines[kCirculantBlock], sines[kCirculantBlock];
  __shared__ T bins[2][2][kOperand];  // of a and b, cosine and sine sums [term][frequency][place]
  const int thread = static_cast<int>(threadIdx.x);
  const int row = thread / kCirculantTile, column = thread % kCirculantTile;
  const std::int64_t across = (call.columns + kCirculantTile - 1) / kCirculantTile;
  const std::int64_t first_row = blockIdx.x / across * kCirculantTile;
  const std::int64_t first_column = blockIdx.x % across * kCirculantTile;
  const std::int64_t begin = call.terms * blockIdx.y / gridDim.y,
                     end = call.terms * (blockIdx.y + 1) / gridDim.y;
  const bool used = first_row + row < call.rows && first_column + column < call.columns;
  T* const to = out + blockIdx.y * call.split_stride + (first_row + row) * call.row_stride +
                (first_column + column) * call.column_stride;
  const T* const turns = static_cast<const T*>(call.turns);
  const T* const weights = static_cast<const T*>(call.weights);
  for (int i = thread; i < call.block; i += kCirculantThreads) {
    cosines[i] = turns[i];
    sines[i] = turns[call.block + i];
  }
  for (int first = 0; first < call.bins; first += kCirculantBins) {
    T re[kCirculantBins] = {}, im[kCirculantBins] = {};
    for (std::int64_t term = begin; term < end; term += kCirculantStep) {
      __syncthreads();
      for (int item = thread; item < 2 * kOperand; item += kCirculantThreads) {
        const bool second = item >= kOperand;
        const int in_operand = second ? item - kOperand : item;
        const std::int64_t place =
            (second ? first_column : first_row) + in_operand % kCirculantTile;
        const int k = first + in_operand / kCirculantTile % kCirculantBins;
        const std::int64_t at_term = term + in_operand / (kCirculantTile * kCirculantBins);
        T cosine = 0, sine = 0;
        if (at_term < end && k < call.bins && place < (second ? call.columns : call.rows)) {
          const T factor = factors == nullptr ? T{1} : factors[at_term / call.positions];
          const T* const from = second ? b + at_term * call.b_term + place * call.b_place
                                       : a + at_term * call.a_term + place * call.a_place;
          int at = 0;
          // 0 * inf would not vanish.
          for (int u = 0; factor != 0 && u < call.block; ++u) {
            const T x = from[u];
            cosine = fused(x, cosines[at], cosine);
            sine = fused(x, sines[at], sine);
            at += k;
            if (at >= call.block) at -= call.block;
          }
          if (!second) {
            cosine *= factor;
            sine *= call.sign < 0 ? -factor : factor;
          }
        }
        bins[second ? 1 : 0][0][in_operand] = cosine;
        bins[second ? 1 : 0][1][in_operand] = sine;
      }
      __syncthreads();
      DPK_NO_UNROLL
      for (int step = 0; step < kCirculantStep; ++step) {
        DPK_UNROLL
        for (int i = 0; i < kCirculantBins; ++i) {
          const int at = (step * kCirculantBins + i) * kCirculantTile;
          const T ac = bins[0][0][at + row], as = bins[0][1][at + row];
          const T bc = bins[1][0][at + column], bs = bins[1][1][at + column];
          re[i] = fused(ac, bc, fused(as, bs, re[i]));
          im[i] = fused(as, bc, fused(-ac, bs, im[i]));
        }
      }
    }
    DPK_UNROLL
    for (int i = 0; i < kCirculantBins; ++i) {
      const T weight = first + i < call.bins ? weights[first + i] : T{0};
      re[i] = first + i < call.bins ? re[i] * weight : T{0};
      im[i] = first + i < call.bins ? im[i] * weight : T{0};
    }
    for (int u = 0; used && u < call.block; ++u) {
      T sum = first == 0 ? T{0} : to[u];
      DPK_UNROLL
      for (int i = 0; i < kCirculantBins; ++i) {
        const int at = (first + i) * u % call.block;
        sum = fused(re[i], cosines[at], fused(-im[i], sines[at], sum));
      }
      to[u] = sum;
    }
  }
}

}  // namespace dpkern::cuda
