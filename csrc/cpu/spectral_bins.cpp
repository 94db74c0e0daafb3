// Retained bins of a layer's operands and the maps' squares, without their powers: only columns and
// tiles of frequencies that hold a bin are transformed.

#include <algorithm>
#include <vector>

#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/spectral_long.h"

namespace dpkern::cpu {
namespace {

using ghost::scratch;
using spectral::Kept;
using spectral::LongMaps;
using spectral::Maps;
using spectral::TransformOf;

// Whether a bin is retained, for each tile of each column.
template <class F>
std::vector<char> tiles_with_bins(const Maps<F>& maps, const std::int64_t* bins) {
  std::vector<char> found;
  const std::int64_t each = maps.rows.split ? 4 : 2;  // bins of a frequency, and its partner's
  for (std::int64_t k = 0; k < maps.columns.n / 2 + 1; ++k) {
    maps.rows.each_tile([&](std::int64_t, int size) {
      const std::int64_t* const end = bins + each * size;
      found.push_back(std::any_of(bins, end, [](std::int64_t bin) { return bin >= 0; }) ? 1 : 0);
      bins = end;
    });
  }
  return found;
}

// The same for each long column.
template <class F>
std::vector<char> tiles_with_bins(const LongMaps<F>& maps, const std::int64_t* bins) {
  std::vector<char> found;
  for (std::int64_t k = 0; k < maps.columns.n / 2 + 1; ++k, bins += maps.bins()) {
    const auto kept = [](std::int64_t bin) { return bin >= 0; };
    found.push_back(std::any_of(bins, bins + maps.bins(), kept) ? 1 : 0);
  }
  return found;
}

template <template <class> class M, class F>
void keep_bins(const M<F>& maps, Kept keep, double* squares, int threads) {
  const std::vector<char> tiles = tiles_with_bins(maps, keep.bins);
  keep.tiles = tiles.data();
  const auto last = std::find(tiles.rbegin(), tiles.rend(), 1);
  if constexpr (M<F>::kParts == 2) {
    keep.columns = (tiles.rend() - last + maps.rows.tiles() - 1) / maps.rows.tiles();
  }
  std::int64_t bytes = 0;
  versioned_by_width([&](auto width) DPK_INLINE { bytes = width; });
  const std::int64_t lanes = bytes / static_cast<std::int64_t>(sizeof(F));
  const std::int64_t blocks = (maps.samples + lanes - 1) / lanes;
  parallel_for(blocks, 1, threads, [&](std::int64_t begin, std::int64_t end) {
    F* const room = scratch<F, 2>(lanes * (maps.room() + keep.room(lanes)));
    F* const kept = room + lanes * maps.room();
    if (maps.channels % lanes != 0) std::fill(kept, kept + lanes * keep.room(lanes), F{0});
    for (std::int64_t block = begin; block < end; ++block) {
      const std::int64_t first = block * lanes, used = std::min(lanes, maps.samples - first);
      versioned_by_width([&](auto width) DPK_INLINE {
        using Of = TransformOf<M<F>, width>;
        using V = typename Of::V;
        double sums[Of::kLanes] = {};
        Of::template add_channels<false>(maps, &keep, first, used, 0, maps.channels, nullptr,
                                         reinterpret_cast<V*>(room), reinterpret_cast<V*>(kept),
                                         sums);
        std::copy(sums, sums + used, squares + first);
      });
    }
  });
}

template <class M, class T>
void run(const SpectralBins<T>& call, int threads) {
  using Line = decltype(M::rows);
  const bool deep = call.N == 9;
  const std::int64_t* const lines = call.lines + (deep ? 3 : 0);
  const double* const rows = call.turns + (deep ? 2 * call.lines[0] : 0);
  const double* const columns = rows + 2 * lines[0];
  M maps{call.x,
         sizeof(T) == 4,
         call.B,
         call.C,
         call.D * call.H,
         call.W,
         Line(lines, rows),
         Line(lines + 3, columns)};
  if constexpr (M::kParts == 1) {
    if (deep) maps.depth = Line(call.lines, call.turns);
    maps.between = call.H;
  }
  keep_bins(maps, {call.bin, call.source, call.turn, call.bins, call.count, call.R}, call.squares,
            threads);
}

}  // namespace

template <class T>
void spectral_bins(const SpectralBins<T>& call, int threads) {
  const bool narrow = sizeof(T) == 4 && !call.wide;
  if (call.S == 1) {  // one bin for each slot: lines are long
    return narrow ? run<LongMaps<float>>(call, threads) : run<LongMaps<double>>(call, threads);
  }
  narrow ? run<Maps<float>>(call, threads) : run<Maps<double>>(call, threads);
}

template void spectral_bins<float>(const SpectralBins<float>&, int);
template void spectral_bins<double>(const SpectralBins<double>&, int);

}  // namespace dpkern::cpu
