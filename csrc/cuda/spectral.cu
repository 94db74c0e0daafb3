// Norms and sums of correlation maps in the frequency domain: every map is transformed on the chip,
// by products with cosines and sines, and no spectrum of a map is ever in memory.
//
// A map is folded about its centre along both axes, so that sums e meet cosines and differences o
// meet sines. With rows first in a name, ee, eo, oe and oo are a quarter of the map each, and
//
//   a = C ee C',  b = S oo S',  c = C eo S',  d = S oe C'
//   X(+-ky, kx) = (a -+ b) - i (c +- d)
//   |X(+-ky, kx)|^2 = M +- 2 N,  M = a^2 + b^2 + c^2 + d^2,  N = c d - a b.
//
// Operands are multiplied by a power of two that takes their largest entry to [1, 2), which is
// exact, so that nothing overflows and what underflows is far below a rounding of their norm.
// docs/spectral.md proves the bounds. The host lays tables out (_launch_spectral.py).

#include "cuda/block.cuh"

namespace dpkern::cuda {

// 2^k for -1022 <= k <= 1023.
template <class T>
__device__ __forceinline__ T power_of_two(int k) {
  return static_cast<T>(__hiloint2double((1023 + k) << 20, 0));
}

// The exponent of a positive number, of zero 0; of denormal doubles the least.
__device__ __forceinline__ int exponent_of(double x) {
  const int field = (__double2hiint(x) >> 20) & 0x7ff;
  return x == 0 ? 0 : field - 1023 < -1022 ? -1022 : field - 1023;
}

// A multiplication by 2^k in two exact steps, of which neither overflows where the whole does not.
template <class T>
struct PowerOfTwo {
  T first, second;
  __device__ __forceinline__ explicit PowerOfTwo(int k)
      : first(power_of_two<T>(k / 2)), second(power_of_two<T>(k - k / 2)) {}
  __device__ __forceinline__ T operator()(T x) const { return x * first * second; }
};

// sizes[b] = the largest entry and the sum of squares of a sample's used rows and columns; the sum
// is not finite if an entry is not.
template <class T>
__global__ void __launch_bounds__(kSpectralThreads)
    spectral_sizes_kernel(SpectralMaps maps, double* sizes) {
  typedef BlockTotals<kSpectralThreads> Totals;
  __shared__ double room[Totals::kCount];
  const std::int64_t used = maps.rows * maps.columns, all = maps.channels * used;
  const T* const from =
      static_cast<const T*>(maps.data) + blockIdx.x * maps.channels * maps.height * maps.width;
  double most = 0, square = 0;
  for (std::int64_t i = threadIdx.x; i < all; i += kSpectralThreads) {
    const std::int64_t row = i / maps.columns;
    const std::int64_t at = (row / maps.rows * maps.height + row % maps.rows) * maps.width;
    const double x = static_cast<double>(from[at + i % maps.columns]);
    most = larger(most, std::fabs(x));
    square = ::fma(x, x, square);
  }
  most = Totals::most(most, room);
  square = Totals::sum(square, room);
  if (threadIdx.x != 0) return;
  sizes[2 * blockIdx.x] = most;
  sizes[2 * blockIdx.x + 1] = square;
}

// What a block of transforms holds: folded maps [team][quarter][row][column], and their transforms
// along rows [team][quarter][row][kx].
template <class T>
struct SpectralRoom;
template <>
struct SpectralRoom<float> {
  alignas(16) float folded[kSpectralFolded];
  float lines[kSpectralLines];
};
template <>
struct SpectralRoom<double> {
  alignas(16) double folded[kSpectralFoldedWide];
  double lines[kSpectralLinesWide];
};

// One block: some frequencies kx of all of a split's maps, one map for each team of threads at a
// time. A thread has one kx and kSpectralEach ky.
template <class T>
struct SpectralBlock {
  static constexpr int V = 16 / static_cast<int>(sizeof(T));
  const SpectralMaps& maps;
  SpectralRoom<T>& room;
  int half_rows, half_columns;      // folded indices along each axis
  int padded_rows, padded_columns;  // to whole packs
  int first_kx, count_kx;
  int team, kx, group;  // of this thread; the team is -1 without one

  __device__ __forceinline__ SpectralBlock(const SpectralMaps& of, SpectralRoom<T>& to, int chunk)
      : maps(of), room(to) {
    half_rows = static_cast<int>(maps.rows) / 2 + 1;
    half_columns = static_cast<int>(maps.columns) / 2 + 1;
    padded_rows = (half_rows + V - 1) / V * V;
    padded_columns = (half_columns + V - 1) / V * V;
    first_kx = chunk * maps.together;
    const int left = maps.across - first_kx;
    count_kx = left < maps.together ? left : maps.together;
    const int size = maps.together * maps.lanes, thread = static_cast<int>(threadIdx.x);
    team = thread / size;
    kx = thread % size % maps.together;
    group = thread % size / maps.together;
    if (team >= maps.teams || kx >= count_kx) team = -1;
  }
  __device__ __forceinline__ T* lines_of(int quarter) const {
    return room.lines + (team * 4 + quarter) * padded_rows * maps.together;
  }
  // Rows of lines that only fill up packs.
  __device__ __forceinline__ void clear() const {
    const int all = maps.teams * 4 * padded_rows * maps.together;
    for (int i = static_cast<int>(threadIdx.x); i < all; i += kSpectralThreads) room.lines[i] = 0;
  }
  __device__ __forceinline__ static T entry(const T* map, std::int64_t at, bool any) {
    return any ? map[at] : T{0};
  }
  // The four quarters of the maps of `used` teams, whose first map is `from`.
  __device__ __forceinline__ void fold(const T* from, int used, PowerOfTwo<T> scale) const {
    const int rows = static_cast<int>(maps.rows), columns = static_cast<int>(maps.columns);
    const int width = static_cast<int>(maps.width), quarter = half_rows * padded_columns;
    const int top = rows / 2, left = columns / 2;
    for (int i = static_cast<int>(threadIdx.x); i < used * quarter; i += kSpectralThreads) {
      const int of = i / quarter, row = i % quarter / padded_columns, column = i % padded_columns;
      T* const to = room.folded + of * 4 * quarter + i % quarter;
      T sums[2][2] = {};  // [plus or minus the row][the column]
      if (column < half_columns) {
        const T* const centre = from + of * maps.height * maps.width + top * width + left;
        const bool below = top + row < rows, beside = left + column < columns;
        const T pp = entry(centre, row * width + column, below && beside);
        const T pm = entry(centre, row * width - column, below && column > 0);
        const T mp = entry(centre, -row * width + column, row > 0 && beside);
        const T mm = entry(centre, -row * width - column, row > 0 && column > 0);
        const T upper0 = scale(pp), upper1 = scale(mp), lower0 = scale(pm), lower1 = scale(mm);
        const T cosine0 = upper0 + upper1, sine0 = upper0 - upper1;
        const T cosine1 = lower0 + lower1, sine1 = lower0 - lower1;
        sums[0][0] = cosine0 + cosine1;
        sums[0][1] = cosine0 - cosine1;
        sums[1][0] = sine0 + sine1;
        sums[1][1] = sine0 - sine1;
      }
      DPK_UNROLL
      for (int k = 0; k < 4; ++k) to[k * quarter] = sums[k / 2][k % 2];
    }
  }
  // Along rows: quarters ee and oe meet cosines, eo and oo sines.
  __device__ __forceinline__ void transform_rows() const {
    if (team < 0) return;
    const int quarter = half_rows * padded_columns, step = maps.lanes;
    const T* const folded = room.folded + team * 4 * quarter;
    const T* const cosines = static_cast<const T*>(maps.row_turns) + first_kx + kx;
    const T* const sines = cosines + padded_columns * maps.across;
    for (int first = group; first < half_rows; first += kSpectralEach * step) {
      T sums[kSpectralEach][4] = {};
      DPK_NO_UNROLL
      for (int column = 0; column < padded_columns; column += V) {
        T c[V], s[V];
        DPK_UNROLL
        for (int v = 0; v < V; ++v) {
          c[v] = cosines[(column + v) * maps.across];
          s[v] = sines[(column + v) * maps.across];
        }
        DPK_UNROLL
        for (int r = 0; r < kSpectralEach; ++r) {
          const int row = first + r * step < half_rows ? first + r * step : first;
          DPK_UNROLL
          for (int k = 0; k < 4; ++k) {
            T x[V];
            load_pack<V>(folded + k * quarter + row * padded_columns + column, x);
            DPK_UNROLL
            for (int v = 0; v < V; ++v) {
              sums[r][k] = fused(k % 2 == 0 ? c[v] : s[v], x[v], sums[r][k]);
            }
          }
        }
      }
      DPK_UNROLL
      for (int r = 0; r < kSpectralEach; ++r) {
        if (first + r * step >= half_rows) continue;
        DPK_UNROLL
        for (int k = 0; k < 4; ++k) {
          lines_of(k)[(first + r * step) * maps.together + kx] = sums[r][k];
        }
      }
    }
  }
  // Along columns, at one of this thread's ky: a, c, d, b of the file's comment.
  __device__ __forceinline__ void transform_columns(T (&sums)[kSpectralEach][4]) const {
    if (team < 0) return;
    const T* const cosines = static_cast<const T*>(maps.column_turns);
    const T* const sines = cosines + maps.down * padded_rows;
    const T* from[4];
    DPK_UNROLL
    for (int k = 0; k < 4; ++k) from[k] = lines_of(k) + kx;
    DPK_NO_UNROLL
    for (int row = 0; row < padded_rows; row += V) {
      T x[4][V];
      DPK_UNROLL
      for (int k = 0; k < 4; ++k) {
        DPK_UNROLL
        for (int v = 0; v < V; ++v) x[k][v] = from[k][(row + v) * maps.together];
      }
      DPK_UNROLL
      for (int r = 0; r < kSpectralEach; ++r) {
        const int own = group + r * maps.lanes;
        const int ky = own < maps.down ? own : group;
        T c[V], s[V];
        load_pack<V>(cosines + ky * padded_rows + row, c);
        load_pack<V>(sines + ky * padded_rows + row, s);
        DPK_UNROLL
        for (int k = 0; k < 4; ++k) {
          DPK_UNROLL
          for (int v = 0; v < V; ++v) sums[r][k] = fused(k < 2 ? c[v] : s[v], x[k][v], sums[r][k]);
        }
      }
    }
  }
  __device__ __forceinline__ int place(int ky) const { return (first_kx + kx) * maps.down + ky; }

  // The retained bins at one place, of one map.
  __device__ __forceinline__ void keep(const SpectralKept& kept, int place, const T (&sums)[4],
                                       std::int64_t sample, std::int64_t channel,
                                       PowerOfTwo<T> back) const {
    const T a = sums[0], c = sums[1], d = sums[2], b = sums[3];
    const std::int32_t* const first = kept.first + 2 * place;
    const std::int64_t bin = 2 * maps.batch * maps.channels;
    T* const out = static_cast<T*>(kept.out) + 2 * sample * maps.channels + channel;
    for (int i = first[0]; i < first[2]; ++i) {
      const bool upper = i < first[1];  // the bin at +ky
      const T re = upper ? a - b : a + b, im = upper ? c + d : c - d;
      const T* const turn = static_cast<const T*>(kept.turns) + 4 * i;
      T* const to = out + kept.which[i] * bin;
      to[0] = back(fused(turn[0], re, turn[1] * im));
      to[maps.channels] = back(fused(turn[2], re, turn[3] * im));
    }
  }
};

// powers[b, group, split, place] = M and N of the split's maps; and retained bins. Blocks are
// [sample, group, split, chunk of kx].
template <class T>
__global__ void __launch_bounds__(kSpectralThreads, 1)
    spectral_powers_kernel(SpectralMaps maps, SpectralKept kept, const double* sizes, T* powers) {
  __shared__ SpectralRoom<T> room;
  const int chunks = (maps.across + maps.together - 1) / maps.together;
  const int chunk = static_cast<int>(blockIdx.x % chunks);
  const std::int64_t set = blockIdx.x / chunks;  // [sample, group, split]
  const std::int64_t sample = set / (maps.groups * maps.splits);
  const std::int64_t of_group = maps.channels / maps.groups, split = set % maps.splits;
  const std::int64_t group = set / maps.splits % maps.groups;
  const std::int64_t begin = group * of_group + of_group * split / maps.splits;
  const std::int64_t end = group * of_group + of_group * (split + 1) / maps.splits;
  const int exponent = exponent_of(sizes[2 * sample]);
  const PowerOfTwo<T> scale(-exponent), back(exponent);
  const SpectralBlock<T> block(maps, room, chunk);
  const std::int64_t size = maps.height * maps.width;
  block.clear();
  T m[kSpectralEach] = {}, n[kSpectralEach] = {};
  for (std::int64_t channel = begin; channel < end; channel += maps.teams) {
    const int used = static_cast<int>(end - channel < maps.teams ? end - channel : maps.teams);
    const T* const from =
        static_cast<const T*>(maps.data) + (sample * maps.channels + channel) * size;
    block.fold(from, used, scale);
    __syncthreads();
    if (block.team < used) block.transform_rows();
    __syncthreads();
    if (block.team < 0 || block.team >= used) continue;
    T sums[kSpectralEach][4] = {};
    block.transform_columns(sums);
    DPK_UNROLL
    for (int r = 0; r < kSpectralEach; ++r) {
      const int ky = block.group + r * maps.lanes;
      if (ky >= maps.down) continue;
      if (kept.out != nullptr) {
        block.keep(kept, block.place(ky), sums[r], sample, channel + block.team, back);
      }
      if (powers == nullptr) continue;
      const T a = sums[r][0], c = sums[r][1], d = sums[r][2], b = sums[r][3];
      m[r] = fused(a, a, fused(b, b, fused(c, c, fused(d, d, m[r]))));
      n[r] = fused(c, d, fused(-a, b, n[r]));
    }
  }
  if (powers == nullptr) return;
  // Teams meet in one order.
  __syncthreads();
  const int thread = static_cast<int>(threadIdx.x);
  const int size_of_team = maps.together * maps.lanes;
  DPK_UNROLL
  for (int r = 0; r < kSpectralEach; ++r) {
    room.folded[2 * (r * kSpectralThreads + thread)] = m[r];
    room.folded[2 * (r * kSpectralThreads + thread) + 1] = n[r];
  }
  __syncthreads();
  if (block.team != 0) return;
  DPK_UNROLL
  for (int r = 0; r < kSpectralEach; ++r) {
    const int ky = block.group + r * maps.lanes;
    if (ky >= maps.down) continue;
    T total[2] = {};
    for (int team = 0; team < maps.teams; ++team) {
      const int at = 2 * (r * kSpectralThreads + team * size_of_team + thread);
      total[0] += room.folded[at];
      total[1] += room.folded[at + 1];
    }
    T* const to = powers + 2 * (set * maps.across * maps.down + block.place(ky));
    to[0] = total[0];
    to[1] = total[1];
  }
}

// The sum of a place's splits.
template <class T>
__device__ __forceinline__ void powers_at(const T* powers, std::int64_t splits, std::int64_t places,
                                          std::int64_t place, double* m, double* n) {
  *m = *n = 0;
  for (std::int64_t split = 0; split < splits; ++split) {
    const T* const at = powers + 2 * (split * places + place);
    *m += static_cast<double>(at[0]);
    *n += static_cast<double>(at[1]);
  }
}

// squares[b]: the sum over groups and places of the weighted product of both operands' powers,
// raised by what rounding can hide.
template <class T>
__global__ void __launch_bounds__(kSpectralThreads)
    spectral_product_kernel(SpectralProduct call, const T* x_powers, const T* g_powers,
                            const double* x_sizes, const double* g_sizes, double* squares) {
  typedef BlockTotals<kSpectralThreads> Totals;
  __shared__ double room[Totals::kCount];
  const std::int64_t sample = blockIdx.x;
  double product = 0, all = 0, x_norm = 0, g_norm = 0, x_most = 0, g_most = 0;
  for (std::int64_t group = 0; group < call.groups; ++group) {
    const std::int64_t set = sample * call.groups + group;
    const T* const xs = x_powers + 2 * set * call.x_splits * call.x_places;
    const T* const gs = g_powers + 2 * set * call.g_splits * call.g_places;
    for (std::int64_t k = threadIdx.x; k < call.x_places; k += kSpectralThreads) {
      const double* const w = call.weights + 3 * k;
      double mx, nx, md, nd;
      powers_at(xs, call.x_splits, call.x_places, k, &mx, &nx);
      x_norm = ::fma(call.x_weights[k], mx, x_norm);
      if (w[0] == 0) continue;
      powers_at(gs, call.g_splits, call.g_places, call.index[k], &md, &nd);
      const double both = w[0] * mx * md;
      all += both;
      product += both;
      product = ::fma(w[1] * nx, nd, product);
      product = ::fma(w[2], w[1] > 0 ? mx * nd + nx * md : nx * md - mx * nd, product);
      x_most = larger(x_most, mx + 2 * std::fabs(nx));
      g_most = larger(g_most, md + 2 * std::fabs(nd));
    }
    for (std::int64_t k = threadIdx.x; k < call.g_places; k += kSpectralThreads) {
      double md, nd;
      powers_at(gs, call.g_splits, call.g_places, k, &md, &nd);
      g_norm = ::fma(call.g_weights[k], md, g_norm);
    }
  }
  product = Totals::sum(product, room);
  all = Totals::sum(all, room);
  x_norm = Totals::sum(x_norm, room);
  g_norm = Totals::sum(g_norm, room);
  x_most = Totals::most(x_most, room);
  g_most = Totals::most(g_most, room);
  if (threadIdx.x != 0) return;
  const double *const x_size = x_sizes + 2 * sample, *const g_size = g_sizes + 2 * sample;
  const double bad = x_size[1] * 0 + g_size[1] * 0;  // 0 if both are finite
  if (bad != 0 || x_size[0] == 0 || g_size[0] == 0) {
    squares[sample] = bad == 0 ? 0 : bad;
    return;
  }
  const double kNorms = 1 + 0x1p-10;  // the operands' norms come from computed spectra
  x_norm = kNorms * std::sqrt(x_norm);
  g_norm = kNorms * std::sqrt(g_norm);
  const double lost = call.lost * (x_norm * x_norm + g_norm * g_norm + 1);
  const double square = larger(0, product) + call.sums_error * all + lost;
  const double slack =
      call.g_error * g_norm * kNorms * std::sqrt(x_most) +
      call.x_error * x_norm * (kNorms * std::sqrt(g_most) + call.share * call.g_error * g_norm);
  const double norm = std::sqrt(square) + slack;
  const PowerOfTwo<double> x_back(exponent_of(x_size[0])), g_back(exponent_of(g_size[0]));
  const double back = g_back(x_back(norm));
  squares[sample] = back * back * (1 + 0x1p-42);
}

// sums[b, group, piece] = squares of the whitened coordinates of a piece's channel pairs. A thread
// has kSpectralPairs output channels of one input channel, and kSpectralRows coordinates at a time.
template <class T>
__global__ void __launch_bounds__(kPairThreads)
    spectral_pairs_kernel(SpectralPairs call, const T* x_bins, const T* g_bins, double* sums) {
  typedef BlockTotals<kPairThreads> Totals;
  __shared__ double room[Totals::kCount];
  const std::int64_t piece = blockIdx.x % call.pieces, set = blockIdx.x / call.pieces;
  const std::int64_t group = set % call.groups, sample = set / call.groups;
  const std::int64_t ins = call.ins / call.groups, outs = call.outs / call.groups;
  const std::int64_t quads = (outs + kSpectralPairs - 1) / kSpectralPairs;
  const std::int64_t own = piece * kPairThreads + static_cast<int>(threadIdx.x);
  const bool any = own < quads * ins;
  const std::int64_t in = any ? own % ins : 0, out = any ? own / ins * kSpectralPairs : 0;
  const std::int64_t x_step = 2 * call.batch * call.ins, g_step = 2 * call.batch * call.outs;
  const T* const x = x_bins + 2 * sample * call.ins + group * ins + in;
  const T* const g = g_bins + 2 * sample * call.outs + group * outs + out;
  const T* const turns = static_cast<const T*>(call.turns);
  double square = 0;
  for (std::int64_t tile = 0; tile < call.tiles; ++tile) {
    T y[kSpectralRows][kSpectralPairs] = {};
    for (int part = 0; part < 2; ++part) {  // Re Z, Im Z
      const bool within = part == 0 ? tile < call.even_tiles : tile >= call.odd_from;
      if (!within) continue;
      const T* const table = static_cast<const T*>(part == 0 ? call.even : call.odd) +
                             (part == 0 ? tile : tile - call.odd_from) * call.bins * kSpectralRows;
      for (std::int64_t first = 0; first < call.bins; first += kSpectralChunk) {
        const std::int64_t end =
            first + kSpectralChunk < call.bins ? first + kSpectralChunk : call.bins;
        T of_chunk[kSpectralRows][kSpectralPairs] = {};
        for (std::int64_t k = first; k < end; ++k) {
          const T xr = x[k * x_step], xi = x[k * x_step + call.ins];
          const T c = turns[2 * k], s = turns[2 * k + 1];
          const T re = fused(c, xr, -s * xi), im = fused(c, xi, s * xr);
          const T one = part == 0 ? re : im, other = part == 0 ? im : -re;
          T z[kSpectralPairs];
          DPK_UNROLL
          for (int p = 0; p < kSpectralPairs; ++p) {
            const bool is = out + p < outs;
            const T gr = is ? g[k * g_step + p] : T{0};
            const T gi = is ? g[k * g_step + call.outs + p] : T{0};
            z[p] = fused(gr, one, gi * other);
          }
          DPK_UNROLL
          for (int r = 0; r < kSpectralRows; ++r) {
            const T weight = table[k * kSpectralRows + r];
            DPK_UNROLL
            for (int p = 0; p < kSpectralPairs; ++p) {
              of_chunk[r][p] = fused(weight, z[p], of_chunk[r][p]);
            }
          }
        }
        DPK_UNROLL
        for (int r = 0; r < kSpectralRows; ++r) {
          DPK_UNROLL
          for (int p = 0; p < kSpectralPairs; ++p) y[r][p] += of_chunk[r][p];
        }
      }
    }
    DPK_UNROLL
    for (int r = 0; r < kSpectralRows; ++r) {
      DPK_UNROLL
      for (int p = 0; p < kSpectralPairs; ++p) {
        const double wide = static_cast<double>(y[r][p]);
        square = ::fma(wide, wide, square);
      }
    }
  }
  square = Totals::sum(any ? square : 0, room);
  if (threadIdx.x == 0) sums[blockIdx.x] = square;
}

// The sum over a group's channels of one bin's powers.
template <class T>
__device__ __forceinline__ double power_of_bin(const T* bin, std::int64_t channels,
                                               std::int64_t used) {
  double sum = 0;
  for (std::int64_t c = 0; c < used; ++c) {
    const double re = static_cast<double>(bin[c]), im = static_cast<double>(bin[channels + c]);
    sum = ::fma(re, re, ::fma(im, im, sum));
  }
  return sum;
}

// squares[b] from the pieces' sums, raised by what rounding of bins and coordinates can hide.
template <class T>
__global__ void __launch_bounds__(kPairThreads)
    spectral_whitened_kernel(SpectralPairs call, SpectralBound bound, const T* x_bins,
                             const T* g_bins, const double* sums, const double* x_sizes,
                             const double* g_sizes, double* squares) {
  typedef BlockTotals<kPairThreads> Totals;
  __shared__ double room[Totals::kCount];
  const std::int64_t sample = blockIdx.x;
  const std::int64_t ins = call.ins / call.groups, outs = call.outs / call.groups;
  double square = 0, kept = 0, x_most = 0, g_most = 0;
  const std::int64_t pieces = call.groups * call.pieces;
  for (std::int64_t i = threadIdx.x; i < pieces; i += kPairThreads) {
    square += sums[sample * pieces + i];
  }
  for (std::int64_t i = threadIdx.x; i < call.groups * call.bins; i += kPairThreads) {
    const std::int64_t k = i / call.groups, group = i % call.groups;
    const T* const x = x_bins + 2 * (k * call.batch + sample) * call.ins + group * ins;
    const T* const g = g_bins + 2 * (k * call.batch + sample) * call.outs + group * outs;
    const double of_x = power_of_bin(x, call.ins, ins), of_g = power_of_bin(g, call.outs, outs);
    kept = ::fma(bound.weights[k], of_x * of_g, kept);
    x_most = larger(x_most, of_x);
    g_most = larger(g_most, of_g);
  }
  square = Totals::sum(square, room);
  kept = Totals::sum(kept, room);
  x_most = Totals::most(x_most, room);
  g_most = Totals::most(g_most, room);
  if (threadIdx.x != 0) return;
  const double x_square = x_sizes[2 * sample + 1], g_square = g_sizes[2 * sample + 1];
  const double kSums = 1 + 0x1p-10;
  const double x_norm = std::sqrt(x_square), g_norm = std::sqrt(g_square);
  const bool in_range = x_square >= bound.least && g_square >= bound.least &&
                        x_square <= bound.most && g_square <= bound.most && square - square == 0;
  double norm =
      kSums * bound.stretch * bound.share * x_norm * g_norm;  // || y || <= stretch || R ||
  if (in_range) {
    const double bins = kSums * (bound.g_error * g_norm * std::sqrt(x_most) +
                                 bound.x_error * x_norm *
                                     (std::sqrt(g_most) + bound.share * bound.g_error * g_norm));
    norm = std::sqrt(square) + bound.stretch * bins +
           bound.product_error * kSums * std::sqrt(kept) + bound.lost;
  }
  squares[sample] = norm * norm * (1 + bound.terms * 0x1p-52);
}

// partial[split, pair, tap] = what a split's bins add to the taps of the weighted sum over samples.
// A thread has 2 x 2 channel pairs, and kSpectralTogether bins of them at a time.
template <class T>
__global__ void __launch_bounds__(kPairThreads)
    spectral_bins_sum_kernel(SpectralTaps call, const T* x_bins, const T* g_bins, const T* factors,
                             T* partial) {
  const std::int64_t ins = call.ins / call.groups, outs = call.outs / call.groups;
  const std::int64_t across = (ins + 1) / 2, units = across * ((outs + 1) / 2);
  const std::int64_t blocks = (units + kPairThreads - 1) / kPairThreads;
  const std::int64_t group = blockIdx.x / blocks, split = blockIdx.y;
  const std::int64_t unit = blockIdx.x % blocks * kPairThreads + static_cast<int>(threadIdx.x);
  if (unit >= units) return;
  const std::int64_t in = unit % across * 2, out = unit / across * 2;
  const bool has_in[2] = {true, in + 1 < ins}, has_out[2] = {true, out + 1 < outs};
  const T* const turns = static_cast<const T*>(call.turns);
  const std::int64_t begin = call.bins * split / gridDim.y,
                     end = call.bins * (split + 1) / gridDim.y;
  T* const to = partial + split * outs * call.groups * ins * call.taps;
  for (std::int64_t first = begin; first < end; first += kSpectralTogether) {
    T re[kSpectralTogether][2][2] = {}, im[kSpectralTogether][2][2] = {};
    for (std::int64_t b = 0; b < call.batch; ++b) {
      const T factor = factors[b];
      if (factor == 0) continue;  // 0 * inf would not vanish
      DPK_UNROLL
      for (int j = 0; j < kSpectralTogether; ++j) {
        const std::int64_t k = first + j;
        if (k >= end) continue;
        const T* const x = x_bins + 2 * (k * call.batch + b) * call.ins + group * ins + in;
        const T* const g = g_bins + 2 * (k * call.batch + b) * call.outs + group * outs + out;
        T xr[2], xi[2], gr[2], gi[2];
        DPK_UNROLL
        for (int i = 0; i < 2; ++i) {
          xr[i] = has_in[i] ? factor * x[i] : T{0};
          xi[i] = has_in[i] ? factor * x[call.ins + i] : T{0};
          gr[i] = has_out[i] ? g[i] : T{0};
          gi[i] = has_out[i] ? g[call.outs + i] : T{0};
        }
        DPK_UNROLL
        for (int o = 0; o < 2; ++o) {
          DPK_UNROLL
          for (int i = 0; i < 2; ++i) {
            re[j][o][i] = fused(gr[o], xr[i], fused(gi[o], xi[i], re[j][o][i]));
            im[j][o][i] = fused(gr[o], xi[i], fused(-gi[o], xr[i], im[j][o][i]));
          }
        }
      }
    }
    DPK_UNROLL
    for (int o = 0; o < 2; ++o) {
      DPK_UNROLL
      for (int i = 0; i < 2; ++i) {
        if (!has_out[o] || !has_in[i]) continue;
        T* const taps = to + ((group * outs + out + o) * ins + in + i) * call.taps;
        for (std::int64_t t = 0; t < call.taps; ++t) {
          T sum = first == begin ? T{0} : taps[t];
          DPK_UNROLL
          for (int j = 0; j < kSpectralTogether; ++j) {
            if (first + j >= end) continue;
            const T* const turn = turns + 2 * ((first + j) * call.taps + t);
            sum = fused(turn[0], re[j][o][i], fused(turn[1], im[j][o][i], sum));
          }
          taps[t] = sum;
        }
      }
    }
  }
}

// out += the sum of the splits.
template <class T>
__global__ void __launch_bounds__(kFlatThreads)
    spectral_add_kernel(std::int64_t splits, std::int64_t numbers, const T* partial, T* out) {
  const std::int64_t i = blockIdx.x * static_cast<std::int64_t>(kFlatThreads) + threadIdx.x;
  if (i >= numbers) return;
  T sum = 0;
  for (std::int64_t split = 0; split < splits; ++split) sum += partial[split * numbers + i];
  out[i] += sum;
}

}  // namespace dpkern::cuda
