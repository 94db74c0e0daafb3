#include "cpu/noise.h"

#include <algorithm>
#include <cmath>

#include "core/chacha.h"
#include "core/lattice.h"
#include "cpu/isa.h"
#include "cpu/keystream.h"
#include "cpu/nontemporal.h"
#include "cpu/parallel.h"
#include "cpu/tiles.h"

#if DPK_X86
#include <immintrin.h>
#endif

namespace dpkern::cpu {
namespace {

constexpr std::int64_t kGrain = 16 * kTile;  // coordinates worth a thread
constexpr int kBlocks = kRowBlocks;          // cipher blocks of a tile

// All look-ups of a tile by scalar loads, from the first-level cache into it. Left alone, GCC packs
// them into vectors element by element, which takes twice as many instructions.
#if defined(__GNUC__) && !defined(__clang__)
__attribute__((noinline, optimize("no-tree-vectorize")))
#endif
void look_up_entries(const std::uint32_t* table, const std::uint32_t* rows, std::uint32_t* entry) {
  for (int set = 0; set < 8; ++set, entry += 64) {
    const std::uint32_t* columns = rows + (6 * set + 4) * kLanes;
    for (int l = 0; l < kLanes; ++l) {
      const std::uint32_t column = columns[l];
      entry[l] = table[column & 0xffu];
      entry[l + 16] = table[(column >> 8) & 0xffu];
      entry[l + 32] = table[(column >> 16) & 0xffu];
      entry[l + 48] = table[column >> 24];
    }
  }
}

template <class Law, int N>
struct CacheLookup {
  alignas(64) std::uint32_t entry[kTile];

  DPK_INLINE explicit CacheLookup(const std::uint32_t* rows) {
    look_up_entries(Law::table(), rows, entry);
  }
  DPK_INLINE Words<N> operator()(int set, int part, int b, const Words<N>&) const {
    Words<N> found;
    __builtin_memcpy(&found, entry + 64 * set + 16 * b + part, sizeof(found));
    return found;
  }
};

// Make those of up to N draws again that belong to the tail; their blocks are made side by side.
template <class Law, int N>
DPK_HD void extend(const Stream& stream, std::uint64_t tile, const std::uint32_t* rows,
                   const int* places, int count, std::int32_t* x) {
  const std::uint64_t first = tile * kTile;  // the high words of a tile's positions are the same
  Words<N> low[1] = {}, block[1][16];
  for (int l = 0; l < count; ++l) {
    low[0][l] = static_cast<std::uint32_t>(first) + static_cast<std::uint32_t>(places[l]);
  }
  chacha_blocks<1>(stream, stream.n0 ^ kTailDomain, low, static_cast<std::uint32_t>(first >> 32),
                   block);
  for (int l = 0; l < count; ++l) {
    const int j = places[l], b = (j / kLanes) % 4;
    std::uint32_t w[6], own[16], escaped = 0;
    for (int i = 0; i < 6; ++i) w[i] = rows[(6 * (j / 64) + i) * kLanes + j % kLanes];
    const auto entry = [](std::uint32_t column, int) { return Law::table()[column]; };
    draw<Law>(w, b, entry, escaped);
    if (escaped == 0) continue;
    for (int i = 0; i < 16; ++i) own[i] = block[0][i][l];
    const std::uint32_t magnitude = tail_magnitude(Law{}, own);
    x[j] = as_signed(assemble(magnitude, w[2 + (b >> 1)], b, Law::offset(w[5], b)));
  }
}

template <class Law, int N, int kSets, class Lookup>
DPK_HD void tile_body(const Stream& stream, std::uint64_t tile, std::int32_t* x) {
  alignas(64) std::uint32_t rows[kBlocks * kLanes];
  block_rows<N, kSets, kBlocks>(stream, kBlocks * tile, rows);
  const Lookup lookup(rows);
  Words<N> escaped{};
  for (int set = 0; set < 8; ++set) {
    for (int part = 0; part < kLanes; part += N) {
      Words<N> w[6];
      for (int i = 0; i < 6; ++i) {
        __builtin_memcpy(&w[i], rows + (6 * set + i) * kLanes + part, sizeof(w[i]));
      }
      const auto entry = [&](const Words<N>& column, int b)
                             DPK_INLINE { return lookup(set, part, b, column); };
      for (int b = 0; b < 4; ++b) {
        const Words<N> value = draw<Law>(w, b, entry, escaped);
        __builtin_memcpy(x + 64 * set + 16 * b + part, &value, sizeof(value));
      }
    }
  }
  std::uint32_t any = 0;
  for (int l = 0; l < N; ++l) any |= escaped[l];
  if (any == 0) return;
  int places[kTile], count = 0;
  for (int j = 0; j < kTile; ++j) {
    places[count] = j;
    count += may_have_escaped(x[j]) ? 1 : 0;
  }
  for (int first = 0; first < count; first += N) {
    extend<Law, N>(stream, tile, rows, places + first, std::min(N, count - first), x);
  }
}

#if DPK_X86

// The 256-entry table as three planes of bytes in twelve registers: 64 look-ups in nine shuffles.
template <class Law>
struct Planes {
  alignas(64) std::uint8_t byte[3][256];
  constexpr Planes() : byte{} {
    for (int plane = 0; plane < 3; ++plane) {
      for (int i = 0; i < 256; ++i) {
        byte[plane][i] = static_cast<std::uint8_t>(Law::table()[i] >> (8 * plane));
      }
    }
  }
};

// Not inlined: its callers must be compilable without the instructions it uses.
DPK_VBMI __attribute__((noinline)) void look_up_planes(const std::uint8_t table[3][256],
                                                       const std::uint32_t* rows,
                                                       Words<16> plane[8][3]) {
  for (int set = 0; set < 8; ++set) {
    const __m512i columns = _mm512_loadu_si512(rows + (6 * set + 4) * kLanes);
    const __mmask64 upper = _mm512_movepi8_mask(columns);
    for (int i = 0; i < 3; ++i) {
      const std::uint8_t* bytes = table[i];
      const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(bytes), columns,
                                                   _mm512_load_si512(bytes + 64));
      const __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(bytes + 128), columns,
                                                    _mm512_load_si512(bytes + 192));
      plane[set][i] = reinterpret_cast<Words<16>>(_mm512_mask_blend_epi8(upper, low, high));
    }
  }
}

template <class Law>
struct RegisterLookup {
  static constexpr Planes<Law> planes{};
  Words<16> plane[8][3];

  DPK_INLINE explicit RegisterLookup(const std::uint32_t* rows) {
    look_up_planes(planes.byte, rows, plane);
  }
  DPK_INLINE Words<16> operator()(int set, int, int b, const Words<16>&) const {
    const int shift = 8 * b;
    return ((plane[set][0] >> shift) & 0xffu) | (((plane[set][1] >> shift) & 0xffu) << 8) |
           (((plane[set][2] >> shift) & 0xffu) << 16);
  }
};

template <class Law>
DPK_VBMI void tile_vbmi(const Stream& stream, std::uint64_t tile, std::int32_t* x) {
  tile_body<Law, 16, 3, RegisterLookup<Law>>(stream, tile, x);
}
template <class Law>
DPK_AVX512 void tile_avx512(const Stream& stream, std::uint64_t tile, std::int32_t* x) {
  tile_body<Law, 16, 3, CacheLookup<Law, 16>>(stream, tile, x);
}
// With the generic scheduling model of GCC 12 this function takes 13 % longer, on AMD as well.
template <class Law>
__attribute__((target("arch=x86-64-v3,tune=cascadelake"))) void tile_avx2(const Stream& stream,
                                                                          std::uint64_t tile,
                                                                          std::int32_t* x) {
  tile_body<Law, 8, 3, CacheLookup<Law, 8>>(stream, tile, x);
}
DPK_AVX512 void rows_avx512(const Stream& stream, std::uint64_t first, std::uint32_t* rows) {
  block_rows<16, 3, kBlocks>(stream, first, rows);
}
DPK_AVX2 void rows_avx2(const Stream& stream, std::uint64_t first, std::uint32_t* rows) {
  block_rows<8, 3, kBlocks>(stream, first, rows);
}

#endif

template <class Law>
void draw_tile_of(const Stream& stream, std::uint64_t tile, std::int32_t* x) {
#if DPK_X86
  if (isa() >= Isa::kAvx512Vbmi) return tile_vbmi<Law>(stream, tile, x);
  if (isa() >= Isa::kAvx512) return tile_avx512<Law>(stream, tile, x);
  if (isa() == Isa::kAvx2) return tile_avx2<Law>(stream, tile, x);
#endif
  tile_body<Law, 4, 4, CacheLookup<Law, 4>>(stream, tile, x);
}

}  // namespace

void keystream_rows(const Stream& stream, std::uint64_t first, std::uint32_t* rows) {
#if DPK_X86
  if (isa() >= Isa::kAvx512) return rows_avx512(stream, first, rows);
  if (isa() == Isa::kAvx2) return rows_avx2(stream, first, rows);
#endif
  block_rows<4, 4, kBlocks>(stream, first, rows);
}

void draw_tile(const Stream& stream, Distribution law, std::uint64_t tile, std::int32_t* x) {
  if (law == Distribution::kGaussian) {
    draw_tile_of<Gaussian>(stream, tile, x);
  } else {
    draw_tile_of<Laplace>(stream, tile, x);
  }
}

void RoundingTiles::bits(std::uint64_t tile, std::uint32_t* out) {
  if (tile / 3 != made_) {
    made_ = tile / 3;
    keystream_rows(stream_, kBlocks * made_, rows_);
  }
  const std::uint32_t* rows = rows_ + (tile % 3) * 16 * kLanes;
  versioned([&]() DPK_INLINE {
    for (int half = 0; half < kTile / kLanes; ++half) {
      const std::uint32_t* row = rows + (half >> 1) * kLanes;
      for (int l = 0; l < kLanes; ++l) {
        out[half * kLanes + l] = dpkern::rounding_bits(row[l], half);
      }
    }
  });
}

// out[0 .. 16 blocks) = keystream words in the order of RFC 8439: blocks are made word by word, as
// those of a tile, and turned.
void keystream(const Keystream& call, int threads) {
  const auto first = static_cast<std::uint64_t>(call.first_block);
  auto* const words = reinterpret_cast<std::uint32_t*>(call.words);
  parallel_for(call.blocks, kGrain / 16, threads, [&](std::int64_t begin, std::int64_t end) {
    alignas(64) std::uint32_t rows[kBlocks * kLanes];
    for (std::int64_t i = begin; i < end; i += kBlocks) {
      keystream_rows(call.stream, first + static_cast<std::uint64_t>(i), rows);
      const std::int64_t count = std::min<std::int64_t>(kBlocks, end - i);
      for (std::int64_t block = 0; block < count; ++block) {
        const std::uint32_t* const row = rows + 16 * kLanes * (block / kLanes) + block % kLanes;
        std::uint32_t* const out = words + 16 * (i + block);
        for (int word = 0; word < 16; ++word) out[word] = row[word * kLanes];
      }
    }
  });
}

// draws[i] = the draw at position + i.
void lattice_draws(const LatticeDraws& call, int threads) {
  const auto first = static_cast<std::uint64_t>(call.position);
  parallel_for(call.count, kGrain, threads, [&](std::int64_t begin, std::int64_t end) {
    for_tiles(first, begin, end, [&](const TilePart& part) {
      alignas(64) std::int32_t draws[kTile];
      draw_tile(call.stream, call.distribution, part.tile, draws);
      if (call.count >= kNonTemporalMin) {
        nontemporal_copy(draws + part.offset, part.count, call.draws + part.index);
      } else {
        std::copy_n(draws + part.offset, part.count, call.draws + part.index);
      }
    });
    nontemporal_fence();
  });
}

// bits[i] = the 16 rounding bits at position + i.
void rounding_bits(const RoundingBits& call, int threads) {
  const auto first = static_cast<std::uint64_t>(call.position);
  parallel_for(call.count, kGrain, threads, [&](std::int64_t begin, std::int64_t end) {
    RoundingTiles rounded(call.stream);
    for_tiles(first, begin, end, [&](const TilePart& part) {
      alignas(64) std::uint32_t made[kTile];
      alignas(64) std::int16_t narrow[kTile];
      rounded.bits(part.tile, made);
      versioned([&]() DPK_INLINE {
        const int count = part.count;  // a copy: stores through `narrow` could change the original
        const std::uint32_t* from = made + part.offset;
        for (int i = 0; i < count; ++i) narrow[i] = static_cast<std::int16_t>(from[i]);
      });
      if (call.count >= kNonTemporalMin) {
        nontemporal_copy(narrow, part.count, call.bits + part.index);
      } else {
        std::copy_n(narrow, part.count, call.bits + part.index);
      }
    });
    nontemporal_fence();
  });
}

template <class T>
void add_noise_integer(const Stream& stream, Distribution law, const Draws& made,
                       std::uint64_t first, std::int64_t n, T* x, int threads) {
  parallel_for(n, kGrain, threads, [&](std::int64_t begin, std::int64_t end) {
    NoiseTiles tiles(stream, law, stream, made);
    for_tiles(first, begin, end, [&](const TilePart& part) {
      const std::int32_t* noise = tiles.draws(part);
      versioned([&]() DPK_INLINE {
        const int count = part.count;  // a copy: stores through `values` could change the original
        T* values = x + part.index;
        const std::int32_t* drawn = noise;
        for (int i = 0; i < count; ++i) values[i] = release_integer(values[i], drawn[i]);
      });
    });
  });
}

template <class T>
std::int64_t add_noise_float(const Stream& stream, const Stream& rounding, Distribution law,
                             const Draws& made, std::uint64_t first, std::int64_t n, double scale,
                             T* x, int threads) {
  const Lattice<T> lattice(scale);
  std::int64_t nonfinite = 0;
  parallel_for(n, kGrain, threads, [&](std::int64_t begin, std::int64_t end) {
    std::int64_t mine = 0;
    NoiseTiles tiles(stream, law, rounding, made);
    for_tiles(first, begin, end, [&](const TilePart& part) {
      const std::int32_t* noise = tiles.draws(part);
      const std::uint32_t* bits = tiles.rounding(part);
      versioned([&]() DPK_INLINE {
        const int count = part.count;  // a copy: stores through `values` could change the original
        T* values = x + part.index;
        const std::int32_t* drawn = noise;
        const std::uint32_t* round = bits;
        const Lattice<T> grid = lattice;
        std::int32_t bad = 0;
        for (int i = 0; i < count; ++i) {
          const T units = grid.units(values[i]);
          const bool finite = std::isfinite(units);
          bad += finite ? 0 : 1;
          values[i] = grid.cell * release_float(finite ? units : T{0}, round[i], drawn[i]);
        }
        mine += bad;
      });
    });
    __atomic_fetch_add(&nonfinite, mine, __ATOMIC_RELAXED);
  });
  return nonfinite;
}

template void add_noise_integer(const Stream&, Distribution, const Draws&, std::uint64_t,
                                std::int64_t, std::int32_t*, int);
template void add_noise_integer(const Stream&, Distribution, const Draws&, std::uint64_t,
                                std::int64_t, std::int64_t*, int);
template std::int64_t add_noise_float(const Stream&, const Stream&, Distribution, const Draws&,
                                      std::uint64_t, std::int64_t, double, float*, int);
template std::int64_t add_noise_float(const Stream&, const Stream&, Distribution, const Draws&,
                                      std::uint64_t, std::int64_t, double, double*, int);

template <class F>
void add_noise(const AddNoise<F>& call, int threads) {
  const auto first = static_cast<std::uint64_t>(call.position);
  if constexpr (std::is_integral_v<F>) {
    add_noise_integer(call.stream, call.distribution, call.draws, first, call.S, call.x, threads);
  } else {
    add_noise_float(call.stream, call.rounding, call.distribution, call.draws, first, call.S,
                    *call.scale, call.x, threads);
  }
}

template void add_noise(const AddNoise<std::int32_t>&, int);
template void add_noise(const AddNoise<std::int64_t>&, int);
template void add_noise(const AddNoise<float>&, int);
template void add_noise(const AddNoise<double>&, int);

}  // namespace dpkern::cpu
