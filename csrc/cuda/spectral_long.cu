// Powers and retained bins of maps with lines of more than 64 values, in two levels for a line
// (spectral_line.cuh). No spectrum of a map is ever in memory.
//
// A block has some frequencies kx of all of a split's maps: frequencies k1 of the first level, or a
// part of one. It transforms rows to its kx alone, a few at a time, and holds what they give in
// shared memory; then the columns, whose sums of powers over maps stay in registers. So rows are
// read by every block of a map, and none of their products are made twice but those of a k1 in
// parts.

#include "cuda/spectral_line.cuh"
#include "cuda/spectral_maps.cuh"

namespace dpkern::cuda {

template <class T>
struct SpectralLongRoom {
  Phasor<T> columns[SpectralTile<T>::kRoom];  // [map][slot][row]
  Phasor<T> between[SpectralTile<T>::kRoom];  // the levels: [row][k1][b], [map][slot][k1][b]
};

// Slots of a block are its frequencies kx, [k1][m].
template <class T>
struct SpectralLongBlock {
  typedef SpectralTile<T> Tile;
  typedef typename Tile::Sums Sums;
  static constexpr int kTile = Tile::kCount;

  const SpectralMaps& maps;
  const SpectralLong& by;
  SpectralLongRoom<T>& room;
  SpectralLevels<T> across, down;
  int first_k1, first_m;
  int lines, each;   // k1, and the frequencies of each
  int slots, pitch;  // of columns

  __device__ __forceinline__ SpectralLongBlock(const SpectralMaps& of, const SpectralLong& how,
                                               SpectralLongRoom<T>& to, int chunk)
      : maps(of), by(how), room(to), across(how.across), down(how.down) {
    const int half = across.n1 / 2 + 1, most = (across.n2 + by.parts - 1) / by.parts;
    first_k1 = chunk / by.parts * by.lines;
    first_m = chunk % by.parts * most;
    lines = by.lines < half - first_k1 ? by.lines : half - first_k1;
    each = most < across.n2 - first_m ? most : across.n2 - first_m;
    slots = lines * each;
    pitch = down.count | 1;
  }
  __device__ __forceinline__ int tiles_of(int count) const { return (count + kTile - 1) / kTile; }

  // Along rows [first, first + count) of the maps from `from` on. Tile i has rows i, i + tiles, ...
  __device__ __forceinline__ void add_rows(const T* from, int first, int count, T scale) const {
    const int tiles = tiles_of(count), all = tiles * lines * across.n2;
    const int height = static_cast<int>(maps.height), width = static_cast<int>(maps.width);
    for (int item = static_cast<int>(threadIdx.x); item < all; item += kSpectralLongThreads) {
      const int b = item % across.n2, line = item / across.n2 % lines;
      const int tile = item / (across.n2 * lines), k1 = first_k1 + line;
      int rows[kTile];  // a block's maps have fewer than 2^31 entries
      DPK_UNROLL
      for (int i = 0; i < kTile; ++i) {
        const int own = tile + i * tiles, row = first + (own < count ? own : tile);
        const int map = row / down.count, at = row - map * down.count;
        rows[i] = (map * height + at) * width + b;
      }
      const Phasor<T>* const turns = across.first + k1;
      Sums sums = {};
      Tile::add_terms(across.terms(b), sums, [&](int t, Sums& part) {
        const Phasor<T> turn = turns[t * across.pitch];
        const T* const at = from + t * across.n2;
        DPK_UNROLL
        for (int i = 0; i < kTile; ++i) part[i].add_turned(turn, scale * at[rows[i]]);
      });
      const Phasor<T> phase = across.phase(k1, b);
      DPK_UNROLL
      for (int i = 0; i < kTile; ++i) {
        const int own = tile + i * tiles;
        if (own >= count) continue;
        room.between[(own * lines + line) * across.step + b] = sums[i].turned(phase);
      }
    }
  }
  __device__ __forceinline__ void finish_rows(int first, int count) const {
    const int tiles = tiles_of(count), all = tiles * slots;
    for (int item = static_cast<int>(threadIdx.x); item < all; item += kSpectralLongThreads) {
      const int slot = item % slots, tile = item / slots, line = slot / each;
      const Phasor<T>* const turns = across.second + first_m + slot % each;
      const Phasor<T>* const from = room.between + (tile * lines + line) * across.step;
      const int apart = tiles * lines * across.step;
      Sums sums = {};
      Tile::add_terms(across.n2, sums, [&](int b, Sums& part) {
        const Phasor<T> turn = turns[b * across.n2];
        DPK_UNROLL
        for (int i = 0; i < kTile; ++i) part[i].add_turned(turn, from[i * apart + b]);
      });
      DPK_UNROLL
      for (int i = 0; i < kTile; ++i) {
        const int own = tile + i * tiles, row = first + own;
        if (own >= count) continue;
        const int map = row / down.count;
        room.columns[(map * slots + slot) * pitch + row - map * down.count] = sums[i];
      }
    }
  }
  // The first level of the columns of so many maps; a tile has one column and several k1.
  __device__ __forceinline__ void add_columns(int used) const {
    const int tiles = tiles_of(down.n1), all = used * slots * tiles * down.n2;
    for (int item = static_cast<int>(threadIdx.x); item < all; item += kSpectralLongThreads) {
      const int b = item % down.n2, k1 = item / down.n2 % tiles * kTile;
      const int column = item / (down.n2 * tiles);
      const Phasor<T>* const from = room.columns + column * pitch + b;
      const Phasor<T>* const turns = down.first + k1;
      Sums sums = {};
      Tile::add_terms(down.terms(b), sums, [&](int t, Sums& part) {
        const Phasor<T> x = from[t * down.n2];
        Sums own;
        load_pack<kTile>(turns + t * down.pitch, own);
        DPK_UNROLL
        for (int i = 0; i < kTile; ++i) part[i].add_turned(own[i], x);
      });
      DPK_UNROLL
      for (int i = 0; i < kTile; ++i) {
        if (k1 + i >= down.n1) continue;
        room.between[(column * down.n1 + k1 + i) * down.step + b] =
            sums[i].turned(down.phase(k1 + i, b));
      }
    }
  }
  // The place of this thread's sum i, [k1, m] of kx, then of ky; -1 without one.
  __device__ __forceinline__ int place(int i) const {
    const int rows = slots * down.n1, tiles = tiles_of(rows);
    const int item = static_cast<int>(threadIdx.x), m = item % down.n2, tile = item / down.n2;
    const int row = tile + i * tiles;
    if (tile >= tiles || row >= rows) return -1;
    const int slot = row / down.n1, k1 = row - slot * down.n1;
    const int kx = (first_k1 + slot / each) * across.n2 + first_m + slot % each;
    return (kx * down.n1 + k1) * down.n2 + m;
  }
  // The second level of a map's columns: this thread's frequencies. Columns are not needed any
  // more.
  __device__ __forceinline__ void finish_columns(int map, T (&powers)[kTile], bool keeps) const {
    const int rows = slots * down.n1, tiles = tiles_of(rows);
    const int item = static_cast<int>(threadIdx.x), m = item % down.n2, tile = item / down.n2;
    if (tile >= tiles) return;
    const Phasor<T>* const from = room.between + (map * rows + tile) * down.step;
    const int apart = tiles * down.step;
    Sums sums = {};
    Tile::add_terms(down.n2, sums, [&](int b, Sums& part) {
      const Phasor<T> turn = down.second[b * down.n2 + m];
      DPK_UNROLL
      for (int i = 0; i < kTile; ++i) part[i].add_turned(turn, from[i * apart + b]);
    });
    DPK_UNROLL
    for (int i = 0; i < kTile; ++i) {
      if (tile + i * tiles >= rows) continue;
      powers[i] = fused(sums[i].p, sums[i].p, fused(sums[i].q, sums[i].q, powers[i]));
      if (keeps) room.columns[i * kSpectralLongThreads + item] = sums[i];
    }
  }
  // Write this thread's retained bins of one map, which `finish_columns` left.
  __device__ __forceinline__ void keep(const SpectralKept& kept, T back, std::int64_t sample,
                                       std::int64_t channel) const {
    DPK_NO_UNROLL
    for (int i = 0; i < kTile; ++i) {
      const int at = place(i);
      if (at < 0) continue;
      const Phasor<T> x = room.columns[i * kSpectralLongThreads + static_cast<int>(threadIdx.x)];
      keep_bins(maps, kept, kept.first[at], kept.first[at + 1], x.p, x.q, back, sample, channel);
    }
  }
};

// powers[b, group, split, place] = the sum of the split's maps; and retained bins. Blocks are
// [sample, group, split, chunk of kx].
template <class T>
__global__ void __launch_bounds__(kSpectralLongThreads, sizeof(T) == 4 ? 2 : 1)
    spectral_long_kernel(SpectralMaps maps, SpectralLong by, SpectralKept kept, const double* sizes,
                         T* powers) {
  __shared__ SpectralLongRoom<T> room;
  const int half = by.across.n1 / 2 + 1, chunks = (half + by.lines - 1) / by.lines * by.parts;
  const SpectralPart part(maps, blockIdx.x / chunks);
  const int exponent = exponent_of<T>(sizes[2 * part.sample]);
  const T scale = power_of_two<T>(-exponent), back = power_of_two<T>(exponent);
  const SpectralLongBlock<T> block(maps, by, room, static_cast<int>(blockIdx.x % chunks));
  T sums[SpectralTile<T>::kCount] = {};
  for (std::int64_t channel = part.begin; channel < part.end; channel += by.maps) {
    const std::int64_t left = part.end - channel;
    const int used = static_cast<int>(left < by.maps ? left : by.maps);
    const int rows = used * static_cast<int>(maps.rows);
    for (int first = 0; first < rows; first += by.rows) {
      const int count = by.rows < rows - first ? by.rows : rows - first;
      block.add_rows(part.map<T>(maps, channel), first, count, scale);
      __syncthreads();
      block.finish_rows(first, count);
      __syncthreads();
    }
    block.add_columns(used);
    __syncthreads();
    for (int map = 0; map < used; ++map) {
      block.finish_columns(map, sums, kept.out != nullptr);
      if (kept.out != nullptr) block.keep(kept, back, part.sample, channel + map);
    }
    __syncthreads();
  }
  if (powers == nullptr) return;
  const std::int64_t places =
      static_cast<std::int64_t>(half) * by.across.n2 * by.down.n1 * by.down.n2;
  DPK_UNROLL
  for (int i = 0; i < SpectralTile<T>::kCount; ++i) {
    const int place = block.place(i);
    if (place >= 0) powers[part.set * places + place] = sums[i];
  }
}

}  // namespace dpkern::cuda
