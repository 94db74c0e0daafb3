// Tiles of draws by what gives them: the law itself, a table of samples, a cumulative table.

#include <algorithm>

#include "core/cdt.h"
#include "cpu/isa.h"
#include "cpu/keystream.h"
#include "cpu/noise.h"
#include "cpu/nontemporal.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/tiles.h"

namespace dpkern::cpu {
namespace {

constexpr std::int64_t kGrain = 16 * kTile;  // coordinates worth a thread
constexpr int kCdtBlocks = kCdtWords * kTile / 16;

// The guide's entries of a tile, by scalar loads from the first-level cache, see noise.cpp.
#if defined(__GNUC__) && !defined(__clang__)
__attribute__((noinline, optimize("no-tree-vectorize")))
#endif
void look_up_guide(const std::uint32_t* guide, const std::uint32_t* rows, std::uint32_t* entry) {
  for (int group = 0; group < kTile / kLanes; ++group, entry += kLanes) {
    const std::uint32_t* index = rows + (kCdtWords * group + 1) * kLanes;
    for (int l = 0; l < kLanes; ++l) entry[l] = guide[cdt_bucket(index[l])];
  }
}

// Row 2 m of the tile's blocks holds the first words of coordinates 16 m .. 16 m + 15, row 2 m + 1
// their second ones.
template <class Law, int N, int kSets>
DPK_HD void cdt_tile(const Stream& stream, const CdtTable& table, std::uint64_t tile,
                     std::int32_t* x) {
  alignas(64) std::uint32_t rows[kCdtBlocks * 16];
  alignas(64) std::uint32_t entries[kTile];
  block_rows<N, kSets, kCdtBlocks>(stream, kCdtBlocks * tile, rows);
  look_up_guide(table.guide, rows, entries);
  alignas(64) std::uint32_t open[kLanes];  // bit m of lane l: coordinate 16 m + l is undecided
  for (int part = 0; part < kLanes; part += N) {
    Words<N> marks{};
    for (int group = 0; group < kTile / kLanes; ++group) {
      Words<N> own, index, entry, undecided;
      __builtin_memcpy(&own, rows + kCdtWords * group * kLanes + part, sizeof(own));
      __builtin_memcpy(&index, rows + (kCdtWords * group + 1) * kLanes + part, sizeof(index));
      __builtin_memcpy(&entry, entries + group * kLanes + part, sizeof(entry));
      const Words<N> magnitude = cdt_magnitude(index, entry, undecided);
      const Words<N> value = cdt_value<Law>(magnitude, own);
      __builtin_memcpy(x + group * kLanes + part, &value, sizeof(value));
      marks |= undecided & (1u << group);
    }
    __builtin_memcpy(open + part, &marks, sizeof(marks));
  }
  for (int l = 0; l < kLanes; ++l) {
    for (std::uint32_t left = open[l]; left != 0; left &= left - 1) {
      const int group = __builtin_ctz(left);
      const int j = kLanes * group + l;
      const std::uint32_t* words = rows + kCdtWords * group * kLanes + l;
      const std::uint64_t position = tile * kTile + static_cast<std::uint64_t>(j);
      const std::uint32_t magnitude = cdt_search(table, stream, position, words[kLanes]);
      x[j] = static_cast<std::int32_t>(cdt_value<Law>(magnitude, words[0]));
    }
  }
}

#if DPK_X86
template <class Law>
DPK_AVX512 void cdt_avx512(const Stream& stream, const CdtTable& table, std::uint64_t tile,
                           std::int32_t* x) {
  cdt_tile<Law, 16, 2>(stream, table, tile, x);
}
template <class Law>
__attribute__((target("arch=x86-64-v3,tune=cascadelake"))) void cdt_avx2(const Stream& stream,
                                                                         const CdtTable& table,
                                                                         std::uint64_t tile,
                                                                         std::int32_t* x) {
  cdt_tile<Law, 8, 2>(stream, table, tile, x);
}
#endif

template <class Law>
void cdt_tile_of(const Stream& stream, const CdtTable& table, std::uint64_t tile, std::int32_t* x) {
#if DPK_X86
  if (isa() >= Isa::kAvx512) return cdt_avx512<Law>(stream, table, tile, x);
  if (isa() == Isa::kAvx2) return cdt_avx2<Law>(stream, table, tile, x);
#endif
  cdt_tile<Law, 4, 4>(stream, table, tile, x);
}

// x[i] = the sample of position + i, in units of u: the cursor walks round the table.
template <class Sample>
void read_samples(const Draws& made, std::uint64_t position, int count, std::int32_t* x) {
  const auto* const table = static_cast<const Sample*>(made.table);
  const auto from_first = static_cast<std::int64_t>(position - made.first);  // may be negative
  std::int64_t at = (from_first % made.entries + made.cursor) % made.entries;
  if (at < 0) at += made.entries;
  while (count > 0) {
    const int run = static_cast<int>(std::min<std::int64_t>(count, made.entries - at));
    versioned([&]() DPK_INLINE {
      const int n = run;  // copies: stores through `x` could change the originals
      const int bits = made.shift;
      const Sample* from = table + at;
      std::int32_t* to = x;
      for (int i = 0; i < n; ++i) {
        to[i] = static_cast<std::int32_t>(static_cast<std::uint32_t>(from[i]) << bits);
      }
    });
    x += run;
    count -= run;
    at = 0;
  }
}

}  // namespace

void draw_tile(const Draws& made, const Stream& stream, Distribution law, std::uint64_t tile,
               std::int32_t* x) {
  switch (made.source) {
    case DrawSource::kStream:
      return draw_tile(stream, law, tile, x);
    case DrawSource::kValues:
      std::copy_n(made.values + (tile * kTile - made.first), kTile, x);
      return;
    case DrawSource::kSamples16:
      return read_samples<std::int16_t>(made, tile * kTile, kTile, x);
    case DrawSource::kSamples32:
      return read_samples<std::int32_t>(made, tile * kTile, kTile, x);
    case DrawSource::kCdt: {
      const CdtTable table = cdt_table(made.table, made.entries);
      if (made.law == Distribution::kGaussian) {
        return cdt_tile_of<Gaussian>(made.stream, table, tile, x);
      }
      return cdt_tile_of<Laplace>(made.stream, table, tile, x);
    }
  }
}

// values[i] = the draw of this source at position + i.
void source_draws(const SourceDraws& call, int threads) {
  const auto first = static_cast<std::uint64_t>(call.position);
  parallel_for(call.count, kGrain, threads, [&](std::int64_t begin, std::int64_t end) {
    const Stream none{};
    NoiseTiles tiles(none, call.draws.law, none, call.draws);
    for_tiles(first, begin, end, [&](const TilePart& part) {
      const std::int32_t* made = tiles.draws(part);
      if (call.count >= kNonTemporalMin) {
        nontemporal_copy(made, part.count, call.values + part.index);
      } else {
        std::copy_n(made, part.count, call.values + part.index);
      }
    });
    nontemporal_fence();
  });
}

}  // namespace dpkern::cpu
