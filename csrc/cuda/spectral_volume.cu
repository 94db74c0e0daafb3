// Powers and retained bins of volumes, one level of products for a line (spectral_line.cuh). No
// spectrum of a volume is ever in memory.
//
// A block has some frequencies kx of all of a split's volumes. It transforms the rows of one at a
// time to its kx alone, then the columns of each plane, and holds both in shared memory; then lines
// along the depth, whose powers are added in place: nobody else has these.

#include "cuda/spectral_line.cuh"
#include "cuda/spectral_maps.cuh"

namespace dpkern::cuda {

template <class T>
struct SpectralVolumeBlock {
  typedef SpectralTile<T> Tile;
  typedef typename Tile::Sums Sums;
  static constexpr int kTile = Tile::kCount;

  const SpectralVolume& by;
  Phasor<T>* rows;     // [kx][plane][row]
  Phasor<T>* columns;  // [kx][plane][ky]
  int first_kx, count;
  std::int64_t width;

  __device__ __forceinline__ SpectralVolumeBlock(const SpectralMaps& maps,
                                                 const SpectralVolume& how, Phasor<T>* room,
                                                 int chunk)
      : by(how),
        rows(room),
        columns(room + how.together * how.planes * how.rows),
        first_kx(chunk * how.together),
        count(how.together < how.across - first_kx ? how.together : how.across - first_kx),
        width(maps.width) {}

  // body(line, frequency, i) for this thread's tile of so many lines: tile j has the lines j,
  // j + tiles, ..., those behind the last left out.
  template <class Sum, class Body>
  __device__ __forceinline__ void each_tile(int lines, int frequencies, const Sum& sum,
                                            const Body& body) const {
    const int tiles = (lines + kTile - 1) / kTile;
    for (int item = static_cast<int>(threadIdx.x); item < tiles * frequencies;
         item += kSpectralVolumeThreads) {
      const int k = item % frequencies, tile = item / frequencies;
      int own[kTile];
      DPK_UNROLL
      for (int i = 0; i < kTile; ++i) {
        const int line = tile + i * tiles;
        own[i] = line < lines ? line : tile;
      }
      Sums sums = {};
      sum(own, k, sums);
      DPK_UNROLL
      for (int i = 0; i < kTile; ++i) {
        if (tile + i * tiles < lines) body(own[i], k, sums[i]);
      }
    }
  }
  __device__ __forceinline__ void transform_rows(const T* from, T scale) const {
    const Phasor<T>* const turns = static_cast<const Phasor<T>*>(by.row_turns) + first_kx;
    const int lines = by.planes * by.rows;
    each_tile(
        lines, count,
        [&](const int (&own)[kTile], int k, Sums& sums) {
          Tile::add_terms(static_cast<int>(width), sums, [&](int t, Sums& part) {
            const Phasor<T> turn = turns[t * by.across + k];
            DPK_UNROLL
            for (int i = 0; i < kTile; ++i) {
              part[i].add_turned(turn, scale * from[own[i] * width + t]);
            }
          });
        },
        [&](int line, int k, Phasor<T> x) { rows[k * lines + line] = x; });
  }
  __device__ __forceinline__ void transform_columns() const {
    const Phasor<T>* const turns = static_cast<const Phasor<T>*>(by.column_turns);
    each_tile(
        count * by.planes, by.down,
        [&](const int (&own)[kTile], int ky, Sums& sums) {
          Tile::add_terms(by.rows, sums, [&](int t, Sums& part) {
            const Phasor<T> turn = turns[t * by.down + ky];
            DPK_UNROLL
            for (int i = 0; i < kTile; ++i) part[i].add_turned(turn, rows[own[i] * by.rows + t]);
          });
        },
        [&](int line, int ky, Phasor<T> x) { columns[line * by.down + ky] = x; });
  }
  // done(place, spectrum) for the places [kx, ky, kz] of this thread.
  template <class Done>
  __device__ __forceinline__ void transform_depth(const Done& done) const {
    const Phasor<T>* const turns = static_cast<const Phasor<T>*>(by.depth_turns);
    each_tile(
        count * by.down, by.deep,
        [&](const int (&own)[kTile], int kz, Sums& sums) {
          const Phasor<T>* from[kTile];
          DPK_UNROLL
          for (int i = 0; i < kTile; ++i) {
            from[i] = columns + own[i] / by.down * by.planes * by.down + own[i] % by.down;
          }
          Tile::add_terms(by.planes, sums, [&](int t, Sums& part) {
            const Phasor<T> turn = turns[t * by.deep + kz];
            DPK_UNROLL
            for (int i = 0; i < kTile; ++i) part[i].add_turned(turn, from[i][t * by.down]);
          });
        },
        [&](int line, int kz, Phasor<T> x) {
          done((first_kx * by.down + line) * by.deep + kz, x);
        });
  }
};

// powers[b, group, split, place] = the sum of the split's maps; and retained bins. Blocks are
// [sample, group, split, chunk of kx].
template <class T>
__global__ void __launch_bounds__(kSpectralVolumeThreads, sizeof(T) == 4 ? 2 : 1)
    spectral_volume_kernel(SpectralMaps maps, SpectralVolume by, SpectralKept kept,
                           const double* sizes, T* powers) {
  __shared__ Phasor<T> room[sizeof(T) == 4 ? kSpectralVolume : kSpectralVolumeWide];
  const int chunks = (by.across + by.together - 1) / by.together;
  const SpectralPart part(maps, blockIdx.x / chunks);
  const int exponent = exponent_of<T>(sizes[2 * part.sample]);
  const T scale = power_of_two<T>(-exponent), back = power_of_two<T>(exponent);
  const SpectralVolumeBlock<T> block(maps, by, room, static_cast<int>(blockIdx.x % chunks));
  const std::int64_t places = static_cast<std::int64_t>(by.across) * by.down * by.deep;
  T* const sums = powers == nullptr ? nullptr : powers + part.set * places;
  for (std::int64_t channel = part.begin; channel < part.end; ++channel) {
    block.transform_rows(part.map<T>(maps, channel), scale);
    __syncthreads();
    block.transform_columns();
    __syncthreads();
    block.transform_depth([&](int place, Phasor<T> x) {
      if (sums != nullptr) {
        const T before = channel == part.begin ? T{0} : sums[place];
        sums[place] = fused(x.p, x.p, fused(x.q, x.q, before));
      }
      if (kept.out == nullptr) return;
      keep_bins(maps, kept, kept.first[place], kept.first[place + 1], x.p, x.q, back, part.sample,
                channel);
    });
    __syncthreads();
  }
}

}  // namespace dpkern::cuda
