// Norms, products and weighted sums of block-circulant layers: blocks are transformed on the chip,
// by sums with cosines and sines, and no spectrum is ever in memory. With c and s the cosine and
// sine sums of a block, its transform is c - i s; the conjugate of one times another is
//
//   (a_c b_c + a_s b_s) + i (a_s b_c - a_c b_s).
//
// docs/spectral.md proves the norm's bound. The host lays tables out (_launch_circulant.py).

#include "cuda/block.cuh"

namespace dpkern::cuda {

constexpr int kCirculantPerMultiprocessor = 3;  // blocks: 80 registers a thread

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

// Blocks of an operand, one for each of its terms and places. Strides count numbers.
template <class V>
struct Blocks {
  const V* at;
  std::int64_t term, place, places;
};

// Transforms of a few terms of 16 rows and 16 columns, and sums over terms of their products. A
// thread has one row and column, and kCirculantBins frequencies of them at a time.
template <class T, int kLargest>
struct PairTile {
  static constexpr int kOperand = kCirculantStep * kCirculantBins * kCirculantTile;
  T cosines[kLargest], sines[kLargest];
  T bins[2][2][kOperand];  // of rows and columns, cosine and sine sums [term][frequency][place]

  __device__ __forceinline__ void load(const T* turns, int block) {
    for (int i = static_cast<int>(threadIdx.x); i < block; i += kCirculantThreads) {
      cosines[i] = turns[i];
      sines[i] = turns[block + i];
    }
  }
  // The transform of one block at frequency k.
  template <class V>
  __device__ __forceinline__ void transform(const V* from, int block, int k, T& cosine, T& sine) {
    int at = 0;
    for (int u = 0; u < block; ++u) {
      const T x = static_cast<T>(from[u]);
      cosine = fused(x, cosines[at], cosine);
      sine = fused(x, sines[at], sine);
      at += k;
      if (at >= block) at -= block;
    }
  }
  // re + i im += the sum over the terms begin .. end - 1 of conj(a^) b^ at the frequencies from
  // `first` on, times their factors, or of a^ b^ if the sign is -1.
  template <class V>
  __device__ __forceinline__ void add(const Blocks<V>& a, std::int64_t first_row,
                                      const Blocks<V>& b, std::int64_t first_column,
                                      std::int64_t begin, std::int64_t end, int first, int block,
                                      int sign, const V* factors, std::int64_t positions, T* re,
                                      T* im) {
    const int thread = static_cast<int>(threadIdx.x);
    const int row = thread / kCirculantTile, column = thread % kCirculantTile;
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
        if (at_term < end && 2 * k <= block && place < (second ? b.places : a.places)) {
          const T factor = factors == nullptr ? T{1} : static_cast<T>(factors[at_term / positions]);
          if (factor != 0) {  // 0 * inf would not vanish
            const V* const from = second ? b.at + at_term * b.term + place * b.place
                                         : a.at + at_term * a.term + place * a.place;
            transform(from, block, k, cosine, sine);
          }
          if (!second) {
            cosine *= factor;
            sine *= sign < 0 ? -factor : factor;
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
  }
};

// out[split, row, column, u] = sum over a split's terms of factors times the block whose transform
// is conj(a^) b^, or a^ b^ if the sign is -1. Each thread leads its pair back.
template <class T>
__global__ void __launch_bounds__(kCirculantThreads, kCirculantPerMultiprocessor)
    circulant_pairs_kernel(CirculantPairs call, const T* a, const T* b, const T* factors, T* out) {
  __shared__ PairTile<T, kCirculantBlock> tile;
  const int thread = static_cast<int>(threadIdx.x);
  const std::int64_t across = (call.columns + kCirculantTile - 1) / kCirculantTile;
  const std::int64_t first_row = blockIdx.x / across * kCirculantTile;
  const std::int64_t first_column = blockIdx.x % across * kCirculantTile;
  const std::int64_t row = first_row + thread / kCirculantTile,
                     column = first_column + thread % kCirculantTile;
  const std::int64_t begin = call.terms * blockIdx.y / gridDim.y,
                     end = call.terms * (blockIdx.y + 1) / gridDim.y;
  const bool used = row < call.rows && column < call.columns;
  T* const to =
      out + blockIdx.y * call.split_stride + row * call.row_stride + column * call.column_stride;
  const T* const weights = static_cast<const T*>(call.weights);
  const Blocks<T> rows{a, call.a_term, call.a_place, call.rows},
      columns{b, call.b_term, call.b_place, call.columns};
  tile.load(static_cast<const T*>(call.turns), call.block);
  for (int first = 0; first < call.bins; first += kCirculantBins) {
    T re[kCirculantBins] = {}, im[kCirculantBins] = {};
    tile.add(rows, first_row, columns, first_column, begin, end, first, call.block, call.sign,
             factors, call.positions, re, im);
    DPK_UNROLL
    for (int i = 0; i < kCirculantBins; ++i) {
      const T weight = first + i < call.bins ? weights[first + i] : T{0};
      re[i] = first + i < call.bins ? re[i] * weight : T{0};
      im[i] = first + i < call.bins ? im[i] * weight : T{0};
    }
    // Entries u and block - u have the same products.
    int start = 0;  // first u mod block
    for (int u = 0; used && 2 * u <= call.block; ++u) {
      T even = 0, odd = 0;
      int at = start;
      DPK_UNROLL
      for (int i = 0; i < kCirculantBins; ++i) {
        even = fused(re[i], tile.cosines[at], even);
        odd = fused(im[i], tile.sines[at], odd);
        at += u;
        if (at >= call.block) at -= call.block;
      }
      to[u] = (first == 0 ? T{0} : to[u]) + (even - odd);
      if (u > 0 && 2 * u < call.block) {
        T& mirrored = to[call.block - u];
        mirrored = (first == 0 ? T{0} : mirrored) + (even + odd);
      }
      start += first;
      if (start >= call.block) start -= call.block;
    }
  }
}

// partial[sample, tile] = a tile's share of the sum over frequencies of weights | M |^2, where
// M[i, j] = sum over positions t of conj(g^[t, i]) x^[t, j]: of pairs i, j themselves, or of pairs
// of positions t, s by Re(G(t, s) conj X(t, s)) with G(t, s) = sum over i of conj(g^[t, i]) g^[s,
// i].
template <class V>
__global__ void __launch_bounds__(kCirculantThreads)
    circulant_positions_kernel(CirculantPositions call, const V* x, const V* g, double* partial) {
  typedef BlockTotals<kCirculantThreads> Totals;
  __shared__ PairTile<double, kCirculantNormBlock> tile;
  __shared__ double room[Totals::kCount];
  const std::int64_t sample = blockIdx.x / call.tiles, piece = blockIdx.x % call.tiles;
  const std::int64_t first_row = piece / call.across * kCirculantTile,
                     first_column = piece % call.across * kCirculantTile;
  const std::int64_t x_position = call.ins * call.block, g_position = call.outs * call.block;
  const V* const xs = x + sample * call.positions * x_position;
  const V* const gs = g + sample * call.positions * g_position;
  const bool grams = call.grams != 0;
  if (grams && first_row > first_column) {  // the pairs t, s count for s, t
    if (threadIdx.x == 0) partial[blockIdx.x] = 0;
    return;
  }
  double total = 0;
  tile.load(call.turns, call.block);
  for (int first = 0; first < call.bins; first += kCirculantBins) {
    double re[kCirculantBins] = {}, im[kCirculantBins] = {};
    double x_re[kCirculantBins] = {}, x_im[kCirculantBins] = {};
    if (grams) {
      const Blocks<V> of_g{gs, call.block, g_position, call.positions},
          of_x{xs, call.block, x_position, call.positions};
      tile.add(of_g, first_row, of_g, first_column, 0, call.outs, first, call.block, 1,
               static_cast<const V*>(nullptr), 1, re, im);
      tile.add(of_x, first_row, of_x, first_column, 0, call.ins, first, call.block, 1,
               static_cast<const V*>(nullptr), 1, x_re, x_im);
    } else {
      const Blocks<V> of_g{gs, g_position, call.block, call.outs},
          of_x{xs, x_position, call.block, call.ins};
      tile.add(of_g, first_row, of_x, first_column, 0, call.positions, first, call.block, 1,
               static_cast<const V*>(nullptr), 1, re, im);
    }
    DPK_UNROLL
    for (int i = 0; i < kCirculantBins; ++i) {
      if (first + i >= call.bins) continue;
      const double product =
          grams ? ::fma(re[i], x_re[i], im[i] * x_im[i]) : ::fma(re[i], re[i], im[i] * im[i]);
      total = ::fma(call.weights[first + i], product, total);
    }
  }
  total = Totals::sum(total, room);
  const double times = grams && first_row < first_column ? 2 : 1;
  if (threadIdx.x == 0) partial[blockIdx.x] = times * total;
}

// squares[b] = the square that a sample's shares add up to, raised by what rounding can hide.
template <class V>
__global__ void __launch_bounds__(kCirculantNormThreads)
    circulant_above_kernel(CirculantPositions call, const V* x, const V* g, const double* partial,
                           double* squares) {
  typedef BlockTotals<kCirculantNormThreads> Totals;
  __shared__ double room[Totals::kCount];
  const std::int64_t sample = blockIdx.x;
  const std::int64_t x_count = call.positions * call.ins * call.block,
                     g_count = call.positions * call.outs * call.block;
  double mine = 0;
  for (std::int64_t i = threadIdx.x; i < call.tiles; i += kCirculantNormThreads) {
    mine += partial[sample * call.tiles + i];
  }
  const double total = Totals::sum(mine, room);
  const double x_square = Totals::sum(square_of(x + sample * x_count, x_count), room);
  const double g_square = Totals::sum(square_of(g + sample * g_count, g_count), room);
  if (threadIdx.x == 0) {
    const double sizes = std::sqrt(x_square) * std::sqrt(g_square);
    const double square = ::fma(call.square_error * sizes, sizes, total);
    const double norm = ::fma(call.norm_error, sizes, std::sqrt(square < 0 ? 0.0 : square));
    squares[sample] = norm * norm * call.spare;
  }
}

}  // namespace dpkern::cuda
