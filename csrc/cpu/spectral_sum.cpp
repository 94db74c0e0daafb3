// Weighted sums over retained bins, and the taps that they add up to, without the sums in memory.
//
// For every bin k, S(k) = sum_b factors_b conj(D(k)) X(k) of a tile of channel pairs stays in
// registers, and taps += cosines(k) Re S + sines(k) Im S. One operand's channels are the lanes, the
// other's are broadcast: whichever needs fewer products.

#include <algorithm>
#include <vector>

#include "cpu/ghost_tiles.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"

namespace dpkern::cpu {
namespace {

using ghost::load;
using ghost::scratch;

constexpr std::int64_t kChunk = 32;  // broadcast channels that share one pass over the bins

// Bins [K, B, 2, channels] of one operand, of which a group has `used` channels from `first` on.
template <class F>
struct Bins {
  const F* data;
  const F* last;  // a copy of the last bin with room behind it, for loads of whole vectors
  std::int64_t K, size, channels, first, used;

  const F* at(std::int64_t k) const { return (k + 1 < K ? data + k * size : last) + first; }
};

template <class F>
struct Sample {
  std::int64_t row;
  F factor;
};

template <class F, int kBytes>
struct BinsSum {
  static constexpr int kLanes = kBytes / static_cast<int>(sizeof(F));
  static constexpr int kRows = kBytes == 64 ? 4 : 2;  // four sums each, to hide the latency of FMA
  using V = Vector<F, kLanes>;

  // taps[t][i] += cosines[t] Re S + sines[t] Im S for kCount broadcast channels.
  template <int kCount>
  static DPK_INLINE void add_bin(const std::vector<Sample<F>>& samples, const F* rows,
                                 std::int64_t row_channels, const F* lanes,
                                 std::int64_t lane_channels, F sign, const F* cosines,
                                 const F* sines, std::int64_t count, V* taps, std::int64_t step) {
    V sums[kCount][4];
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) sums[i][0] = sums[i][1] = sums[i][2] = sums[i][3] = V{};
    for (const Sample<F>& sample : samples) {
      const F* const lane = lanes + 2 * sample.row * lane_channels;
      const F* const row = rows + 2 * sample.row * row_channels;
      const V re = sample.factor * load<V>(lane),
              im = sample.factor * load<V>(lane + lane_channels);
#pragma GCC unroll 8
      for (int i = 0; i < kCount; ++i) {
        const F a = row[i], b = row[row_channels + i];
        sums[i][0] += a * re;
        sums[i][1] += b * im;
        sums[i][2] += a * im;
        sums[i][3] += b * re;
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) {
      sums[i][0] += sums[i][1];
      sums[i][2] = sign * (sums[i][2] - sums[i][3]);
    }
    for (std::int64_t t = 0; t < count; ++t) {
#pragma GCC unroll 8
      for (int i = 0; i < kCount; ++i) {
        taps[t * step + i] += cosines[t] * sums[i][0];
        taps[t * step + i] += sines[t] * sums[i][2];
      }
    }
  }

  // Taps of broadcast channels [begin, end) and all lanes, [lane blocks, taps, chunk].
  static DPK_INLINE void add(const std::vector<Sample<F>>& samples, const Bins<F>& rows,
                             const Bins<F>& lanes, F sign, const F* turns, std::int64_t count,
                             Range range, std::int64_t chunk, V* taps) {
    for (std::int64_t k = 0; k < rows.K; ++k) {
      const F *const cosines = turns + 2 * k * count, *const sines = cosines + count;
      for (std::int64_t lane = 0; lane < lanes.used; lane += kLanes) {
        V* const block = taps + lane / kLanes * count * chunk;
        const auto add_rows = [&](auto size, std::int64_t row) DPK_INLINE {
          add_bin<size>(samples, rows.at(k) + row, rows.channels, lanes.at(k) + lane,
                        lanes.channels, sign, cosines, sines, count, block + row - range.begin,
                        chunk);
        };
        std::int64_t row = range.begin;
        for (; row + kRows <= range.end; row += kRows) {
          add_rows(std::integral_constant<int, kRows>{}, row);
        }
        for (; row < range.end; ++row) add_rows(std::integral_constant<int, 1>{}, row);
      }
    }
  }
};

// The last bin with `room` zeros behind it.
template <class F>
std::vector<F> padded(const F* bins, std::int64_t K, std::int64_t size, std::int64_t room) {
  std::vector<F> copy(static_cast<std::size_t>(size + room), F{0});
  std::copy(bins + (K - 1) * size, bins + K * size, copy.begin());
  return copy;
}

}  // namespace

template <class F>
void spectral_bins_sum(const SpectralBinsSum<F>& call, int threads) {
  std::vector<Sample<F>> samples;
  for (std::int64_t b = 0; b < call.B; ++b) {
    if (call.factors[b] != 0) samples.push_back({b, call.factors[b]});
  }
  if (call.K == 0 || samples.empty()) return;
  std::int64_t bytes = 0;
  versioned_by_width([&](auto width) DPK_INLINE { bytes = width; });
  const std::int64_t vector = bytes / static_cast<std::int64_t>(sizeof(F)), taps = call.T;
  const std::int64_t outs = call.O / call.groups, ins = call.C / call.groups;
  const auto vectors = [&](std::int64_t n) { return (n + vector - 1) / vector; };
  const bool turned = outs * vectors(ins) > ins * vectors(outs);  // outputs are the lanes
  const auto x_last = padded(call.x_bins, call.K, 2 * call.B * call.C, vector);
  const auto g_last = padded(call.g_bins, call.K, 2 * call.B * call.O, vector);
  std::vector<F> turns(static_cast<std::size_t>(2 * call.K * taps));
  for (std::int64_t k = 0; k < call.K; ++k) {
    F* const at = turns.data() + 2 * k * taps;
    for (std::int64_t t = 0; t < taps; ++t) {
      at[t] = static_cast<F>(call.cosines[t * call.K + k]);
      at[taps + t] = static_cast<F>(call.sines[t * call.K + k]);
    }
  }
  const std::int64_t used = turned ? ins : outs;
  // Fewer if threads would have nothing to do.
  const std::int64_t chunk = std::min(used, call.groups < threads ? kChunk / 2 : kChunk);
  const std::int64_t chunks = (used + chunk - 1) / chunk;
  parallel_for(call.groups * chunks, 1, threads, [&](std::int64_t begin, std::int64_t end) {
    const std::int64_t lane_count = turned ? outs : ins, room = vectors(lane_count) * taps * chunk;
    F* const sums = scratch<F, 3>(room * vector);
    for (std::int64_t piece = begin; piece < end; ++piece) {
      const std::int64_t group = piece / chunks, first = piece % chunks * chunk;
      const Range range{first, std::min(used, first + chunk)};
      const Bins<F> x{call.x_bins, x_last.data(), call.K, 2 * call.B * call.C,
                      call.C,      group * ins,   ins};
      const Bins<F> g{call.g_bins, g_last.data(), call.K, 2 * call.B * call.O,
                      call.O,      group * outs,  outs};
      std::fill(sums, sums + room * vector, F{0});
      versioned_by_width([&](auto width) DPK_INLINE {
        using Of = BinsSum<F, width>;
        Of::add(samples, turned ? x : g, turned ? g : x, turned ? F{-1} : F{1}, turns.data(), taps,
                range, chunk, reinterpret_cast<typename Of::V*>(sums));
      });
      for (std::int64_t lane = 0; lane < lane_count; ++lane) {
        for (std::int64_t row = range.begin; row < range.end; ++row) {
          const std::int64_t out = group * outs + (turned ? lane : row), in = turned ? row : lane;
          F* const to = call.out + (out * ins + in) * taps;
          const F* const from =
              sums + (lane / vector * taps * chunk + row - first) * vector + lane % vector;
          for (std::int64_t t = 0; t < taps; ++t) to[t] += from[t * chunk * vector];
        }
      }
    }
  });
}

template void spectral_bins_sum<float>(const SpectralBinsSum<float>&, int);
template void spectral_bins_sum<double>(const SpectralBinsSum<double>&, int);

}  // namespace dpkern::cpu
