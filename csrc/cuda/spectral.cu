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

#include "cuda/spectral_maps.cuh"

namespace dpkern::cuda {

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
  const SpectralBlocks& blocks;
  SpectralRoom<T>& room;
  int half_rows, half_columns;      // folded indices along each axis
  int padded_rows, padded_columns;  // to whole packs
  int first_kx, count_kx;
  int team, kx, group;  // of this thread; the team is -1 without one

  __device__ __forceinline__ SpectralBlock(const SpectralMaps& of, const SpectralBlocks& by,
                                           SpectralRoom<T>& to, int chunk)
      : maps(of), blocks(by), room(to) {
    half_rows = static_cast<int>(maps.rows) / 2 + 1;
    half_columns = static_cast<int>(maps.columns) / 2 + 1;
    padded_rows = (half_rows + V - 1) / V * V;
    padded_columns = (half_columns + V - 1) / V * V;
    first_kx = chunk * blocks.together;
    const int left = blocks.across - first_kx;
    count_kx = left < blocks.together ? left : blocks.together;
    const int size = blocks.together * blocks.lanes, thread = static_cast<int>(threadIdx.x);
    team = thread / size;
    kx = thread % size % blocks.together;
    group = thread % size / blocks.together;
    if (team >= blocks.teams || kx >= count_kx) team = -1;
  }
  __device__ __forceinline__ T* lines_of(int quarter) const {
    return room.lines + (team * 4 + quarter) * padded_rows * blocks.together;
  }
  // Rows of lines that only fill up packs.
  __device__ __forceinline__ void clear() const {
    const int all = blocks.teams * 4 * padded_rows * blocks.together;
    for (int i = static_cast<int>(threadIdx.x); i < all; i += kSpectralThreads) room.lines[i] = 0;
  }
  __device__ __forceinline__ static T entry(const T* map, std::int64_t at, bool any) {
    return any ? map[at] : T{0};
  }
  // The four quarters of the maps of `used` teams, whose first map is `from`.
  __device__ __forceinline__ void fold(const T* from, int used, T scale) const {
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
        const T upper0 = scale * pp, upper1 = scale * mp, lower0 = scale * pm, lower1 = scale * mm;
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
    const int quarter = half_rows * padded_columns, step = blocks.lanes;
    const T* const folded = room.folded + team * 4 * quarter;
    const T* const cosines = static_cast<const T*>(blocks.row_turns) + first_kx + kx;
    const T* const sines = cosines + padded_columns * blocks.across;
    for (int first = group; first < half_rows; first += kSpectralEach * step) {
      T sums[kSpectralEach][4] = {};
      DPK_NO_UNROLL
      for (int column = 0; column < padded_columns; column += V) {
        T c[V], s[V];
        DPK_UNROLL
        for (int v = 0; v < V; ++v) {
          c[v] = cosines[(column + v) * blocks.across];
          s[v] = sines[(column + v) * blocks.across];
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
          lines_of(k)[(first + r * step) * blocks.together + kx] = sums[r][k];
        }
      }
    }
  }
  // Along columns, at one of this thread's ky: a, c, d, b of the file's comment.
  __device__ __forceinline__ void transform_columns(T (&sums)[kSpectralEach][4]) const {
    if (team < 0) return;
    const T* const cosines = static_cast<const T*>(blocks.column_turns);
    const T* const sines = cosines + blocks.down * padded_rows;
    const T* from[4];
    DPK_UNROLL
    for (int k = 0; k < 4; ++k) from[k] = lines_of(k) + kx;
    DPK_NO_UNROLL
    for (int row = 0; row < padded_rows; row += V) {
      T x[4][V];
      DPK_UNROLL
      for (int k = 0; k < 4; ++k) {
        DPK_UNROLL
        for (int v = 0; v < V; ++v) x[k][v] = from[k][(row + v) * blocks.together];
      }
      DPK_UNROLL
      for (int r = 0; r < kSpectralEach; ++r) {
        const int own = group + r * blocks.lanes;
        const int ky = own < blocks.down ? own : group;
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
  __device__ __forceinline__ int place(int ky) const { return (first_kx + kx) * blocks.down + ky; }

  // The retained bins at one place, of one map.
  __device__ __forceinline__ void keep(const SpectralKept& kept, int place, const T (&sums)[4],
                                       std::int64_t sample, std::int64_t channel, T back) const {
    const T a = sums[0], c = sums[1], d = sums[2], b = sums[3];
    const std::int32_t* const first = kept.first + 2 * place;
    keep_bins(maps, kept, first[0], first[1], a - b, c + d, back, sample, channel);
    keep_bins(maps, kept, first[1], first[2], a + b, c - d, back, sample, channel);
  }
};

// powers[b, group, split, place] = M and N of the split's maps; and retained bins. Blocks are
// [sample, group, split, chunk of kx].
template <class T>
__global__ void __launch_bounds__(kSpectralThreads, 1)
    spectral_powers_kernel(SpectralMaps maps, SpectralBlocks blocks, SpectralKept kept,
                           const double* sizes, T* powers) {
  __shared__ SpectralRoom<T> room;
  const int chunks = (blocks.across + blocks.together - 1) / blocks.together;
  const SpectralPart part(maps, blockIdx.x / chunks);
  const int exponent = exponent_of<T>(sizes[2 * part.sample]);
  const T scale = power_of_two<T>(-exponent), back = power_of_two<T>(exponent);
  const SpectralBlock<T> block(maps, blocks, room, static_cast<int>(blockIdx.x % chunks));
  block.clear();
  T m[kSpectralEach] = {}, n[kSpectralEach] = {};
  for (std::int64_t channel = part.begin; channel < part.end; channel += blocks.teams) {
    const std::int64_t left = part.end - channel;
    const int used = static_cast<int>(left < blocks.teams ? left : blocks.teams);
    block.fold(part.map<T>(maps, channel), used, scale);
    __syncthreads();
    if (block.team < used) block.transform_rows();
    __syncthreads();
    if (block.team < 0 || block.team >= used) continue;
    T sums[kSpectralEach][4] = {};
    block.transform_columns(sums);
    DPK_UNROLL
    for (int r = 0; r < kSpectralEach; ++r) {
      const int ky = block.group + r * blocks.lanes;
      if (ky >= blocks.down) continue;
      if (kept.out != nullptr) {
        block.keep(kept, block.place(ky), sums[r], part.sample, channel + block.team, back);
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
  const int size_of_team = blocks.together * blocks.lanes;
  DPK_UNROLL
  for (int r = 0; r < kSpectralEach; ++r) {
    room.folded[2 * (r * kSpectralThreads + thread)] = m[r];
    room.folded[2 * (r * kSpectralThreads + thread) + 1] = n[r];
  }
  __syncthreads();
  if (block.team != 0) return;
  DPK_UNROLL
  for (int r = 0; r < kSpectralEach; ++r) {
    const int ky = block.group + r * blocks.lanes;
    if (ky >= blocks.down) continue;
    T total[2] = {};
    for (int team = 0; team < blocks.teams; ++team) {
      const int at = 2 * (r * kSpectralThreads + team * size_of_team + thread);
      total[0] += room.folded[at];
      total[1] += room.folded[at + 1];
    }
    T* const to = powers + 2 * (part.set * blocks.across * blocks.down + block.place(ky));
    to[0] = total[0];
    to[1] = total[1];
  }
}

}  // namespace dpkern::cuda
