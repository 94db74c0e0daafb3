// Norms of whitened coordinates, from the retained bins of both operands and without a coordinate
// in memory.
//
// For every channel pair, y_r = sum_k c(r, k) Re Z(k) + s(r, k) Im Z(k) with Z = conj(D) X. The
// channels of one operand are the lanes, those of the other are broadcast: whichever needs fewer
// products. A chunk of bins is added up by itself before it joins the sum of all, so rounding grows
// with the chunk's length and not with the number of bins. docs/spectral.md proves the bound.

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/ghost_tiles.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"

namespace dpkern::cpu {
namespace {

using ghost::load;
using ghost::round_up;
using ghost::scratch;

constexpr std::int64_t kChunk = 16;   // bins; `_whitened_plan.py` knows it
constexpr std::int64_t kTogether = 5;  // coordinates whose sums stay in registers, for each row
constexpr std::int64_t kSamples = 4;  // samples that are packed together, a few lines of each bin

// What the bins of one sample and group say about the rounding.
struct Powers {
  double kept = 0;    // sum w P_x P_d
  double x_most = 0;  // largest powers
  double g_most = 0;
};

// c and s as the loops read them: [chunk][tile of coordinates][bin][coordinate][2].
template <class F>
std::vector<F> in_order(const SpectralWhitened<F>& call, F sign) {
  std::vector<F> table;
  table.reserve(static_cast<std::size_t>(call.R * 2 * call.K));
  for (std::int64_t first = 0; first < call.K; first += kChunk) {
    const std::int64_t end = std::min(call.K, first + kChunk);
    for (std::int64_t r = 0; r < call.R; r += kTogether) {
      for (std::int64_t k = first; k < end; ++k) {
        for (std::int64_t i = r; i < std::min(call.R, r + kTogether); ++i) {
          const double* const at = call.matrix + (i * call.K + k) * 2;
          table.push_back(static_cast<F>(at[0]));
          table.push_back(sign * static_cast<F>(at[1]));
        }
      }
    }
  }
  return table;
}

// One operand's bins [K, B, 2, channels], of which a group has `used` channels from `first` on.
template <class F>
struct Bins {
  const F* data;
  std::int64_t samples, channels, first, used;
};

template <class F, int kBytes>
struct Whitened {
  static constexpr int kLanes = kBytes / static_cast<int>(sizeof(F));
  static constexpr int kRows = kBytes == 64 ? 4 : 2;
  static constexpr int kWide = kBytes / static_cast<int>(sizeof(double));
  using V = Vector<F, kLanes>;
  using D = Vector<double, kWide>;

  // One sample's bins as [panel of kLanes channels][K][2][kLanes], zeros behind the last channel.
  static DPK_INLINE void pack(const Bins<F>& bins, std::int64_t K, std::int64_t sample, F* to) {
    for (std::int64_t first = 0; first < bins.used; first += kLanes) {
      const std::int64_t count = std::min<std::int64_t>(kLanes, bins.used - first);
      for (std::int64_t k = 0; k < K; ++k) {
        const F* const from =
            bins.data + (k * bins.samples + sample) * 2 * bins.channels + bins.first + first;
        for (int part = 0; part < 2; ++part, to += kLanes) {
          if (count == kLanes) {
            ghost::pack_row(from + part * bins.channels, kLanes, kLanes, F{1}, to);
          } else {
            ghost::pack_row(from + part * bins.channels, count, kLanes, F{1}, to);
          }
        }
      }
    }
  }
  // The sum over channels of a bin's powers.
  static DPK_INLINE double power(const F* packed, std::int64_t panels, std::int64_t K,
                                 std::int64_t k) {
    V sum{};
    for (std::int64_t panel = 0; panel < panels; ++panel) {
      const V* const at = reinterpret_cast<const V*>(packed) + (panel * K + k) * 2;
      sum += at[0] * at[0];
      sum += at[1] * at[1];
    }
    return static_cast<double>(ghost::sum_lanes<V, kLanes>(sum));
  }

  // Z of a chunk's bins and kCount rows, times the sign of its imaginary part.
  template <int kCount>
  static DPK_INLINE void multiply(const F* lanes, const F* rows, std::int64_t bins, V* z) {
    for (std::int64_t k = 0; k < bins; ++k) {
      const V re = load<V>(lanes + 2 * k * kLanes), im = load<V>(lanes + (2 * k + 1) * kLanes);
      const F* const row = rows + 2 * k * kLanes;
#pragma GCC unroll 4
      for (int i = 0; i < kCount; ++i) {
        const F a = row[i], b = row[kLanes + i];
        V sum = a * re, difference = a * im;
        sum += b * im;
        difference -= b * re;
        z[2 * (k * kCount + i)] = sum;
        z[2 * (k * kCount + i) + 1] = difference;
      }
    }
  }
  // y[j][i] += sum over a chunk's bins of c Re Z + s Im Z.
  template <int kSize, int kCount>
  static DPK_INLINE void add(const F* table, const V* z, std::int64_t bins, V* y) {
    // One row has too few sums to hide the latency of FMA: real and imaginary parts stay apart.
    constexpr int kParts = kCount == 1 ? 2 : 1;
    V sums[kSize][kCount][kParts];
#pragma GCC unroll 8
    for (int j = 0; j < kSize; ++j) {
#pragma GCC unroll 4
      for (int i = 0; i < kCount; ++i) {
#pragma GCC unroll 2
        for (int part = 0; part < kParts; ++part) sums[j][i][part] = V{};
      }
    }
    for (std::int64_t k = 0; k < bins; ++k) {
      const V* const at = z + 2 * k * kCount;
#pragma GCC unroll 8
      for (int j = 0; j < kSize; ++j) {
        const F c = table[2 * (k * kSize + j)], s = table[2 * (k * kSize + j) + 1];
#pragma GCC unroll 4
        for (int i = 0; i < kCount; ++i) {
          sums[j][i][0] += c * at[2 * i];
          sums[j][i][kParts - 1] += s * at[2 * i + 1];
        }
      }
    }
#pragma GCC unroll 8
    for (int j = 0; j < kSize; ++j) {
#pragma GCC unroll 4
      for (int i = 0; i < kCount; ++i) {
        if constexpr (kParts == 2) sums[j][i][0] += sums[j][i][1];
        y[j * kCount + i] += sums[j][i][0];
      }
    }
  }
  template <int kCount>
  static DPK_INLINE void add_tile(std::int64_t size, const F* table, const V* z, std::int64_t bins,
                                  V* y) {
    switch (size) {
      case 1:
        return add<1, kCount>(table, z, bins, y);
      case 2:
        return add<2, kCount>(table, z, bins, y);
      case 3:
        return add<3, kCount>(table, z, bins, y);
      case 4:
        return add<4, kCount>(table, z, bins, y);
      default:
        return add<5, kCount>(table, z, bins, y);
    }
  }
  // The squares of all coordinates of kCount rows with one panel of lanes.
  template <int kCount>
  static DPK_INLINE D squares(const F* table, const F* lanes, const F* rows, std::int64_t K,
                              std::int64_t R, V* z, V* y) {
    for (std::int64_t i = 0; i < R * kCount; ++i) y[i] = V{};
    for (std::int64_t first = 0; first < K; first += kChunk) {
      const std::int64_t bins = std::min(kChunk, K - first);
      multiply<kCount>(lanes + 2 * first * kLanes, rows + 2 * first * kLanes, bins, z);
      for (std::int64_t r = 0; r < R; r += kTogether) {
        const std::int64_t size = std::min(kTogether, R - r);
        add_tile<kCount>(size, table, z, bins, y + r * kCount);
        table += 2 * bins * size;
      }
    }
    D sum{};
    for (std::int64_t i = 0; i < R * kCount; ++i) {
      for (int part = 0; part < kLanes / kWide; ++part) {
        const auto narrow = load<Vector<F, kWide>>(reinterpret_cast<const F*>(y + i) + part * kWide);
        const D wide = __builtin_convertvector(narrow, D);
        sum += wide * wide;
      }
    }
    return sum;
  }
  // One group of one sample, both operands packed.
  static DPK_INLINE double all_squares(const F* table, const F* lanes, std::int64_t lane_count,
                                       const F* rows, std::int64_t row_count, std::int64_t K,
                                       std::int64_t R, V* z, V* y) {
    const std::int64_t panel = 2 * K * kLanes;
    D sum{};
    for (std::int64_t lane = 0; lane < lane_count; lane += kLanes, lanes += panel) {
      for (std::int64_t row = 0; row < row_count;) {
        const F* const at = rows + row / kLanes * panel + row % kLanes;
        const std::int64_t left = std::min(row_count, row / kLanes * kLanes + kLanes) - row;
        if (left >= kRows) {
          sum += squares<kRows>(table, lanes, at, K, R, z, y);
          row += kRows;
        } else if (left >= 2) {
          sum += squares<2>(table, lanes, at, K, R, z, y);
          row += 2;
        } else {
          sum += squares<1>(table, lanes, at, K, R, z, y);
          row += 1;
        }
      }
    }
    return ghost::sum_lanes<D, kWide>(sum);
  }
};

// Squares of the rows and columns of x that outputs use.
template <class F>
double square_of_maps(const F* from, std::int64_t channels, std::int64_t height, std::int64_t width,
                      std::int64_t rows, std::int64_t columns) {
  double total = 0;
  versioned([&]() DPK_INLINE {
    for (std::int64_t c = 0; c < channels; ++c) {
      for (std::int64_t y = 0; y < rows; ++y) {
        total += ghost::square_of(from + (c * height + y) * width, columns);
      }
    }
  });
  return total;
}

template <class F>
double from_above(const SpectralWhitened<F>& call, double square, const Powers& powers,
                  double x_square, double g_square) {
  constexpr bool kNarrow = sizeof(F) == 4;
  constexpr double kLeast = kNarrow ? 0x1p-80 : 0x1p-400, kMost = kNarrow ? 0x1p100 : 0x1p400;
  constexpr double kSums = 1 + 0x1p-10;  // powers are summed in F
  const double x_norm = std::sqrt(x_square), g_norm = std::sqrt(g_square);
  const bool in_range = x_square >= kLeast && g_square >= kLeast && x_square <= kMost &&
                        g_square <= kMost && square - square == 0;
  double norm = 0;
  if (in_range) {
    const double bins =
        kSums * (call.g_error * g_norm * std::sqrt(powers.x_most) +
                 call.x_error * x_norm *
                     (std::sqrt(powers.g_most) + call.share * call.g_error * g_norm));
    // What underflows in products and sums.
    const double pairs = static_cast<double>(call.C * call.O);
    const double lost = kNarrow ? 8 * static_cast<double>(call.K) *
                                      std::sqrt(static_cast<double>(call.R) * pairs) * 0x1p-125
                                : 0;
    norm = std::sqrt(square) + call.stretch * bins +
           call.product_error * kSums * std::sqrt(powers.kept) + lost;
  } else {
    norm = call.stretch * call.share * x_norm * g_norm;  // || y || <= stretch || R ||
  }
  // A sum of so many squares in double.
  const double terms = static_cast<double>(call.R * (call.C / call.groups) * call.O);
  return norm * norm * (1 + (terms + 64) * 0x1p-52);
}

}  // namespace

template <class F>
void spectral_whitened(const SpectralWhitened<F>& call, int threads) {
  std::int64_t bytes = 0;
  versioned_by_width([&](auto width) DPK_INLINE { bytes = width; });
  const std::int64_t lanes = bytes / static_cast<std::int64_t>(sizeof(F)), K = call.K;
  const std::int64_t outs = call.O / call.groups, ins = call.C / call.groups;
  const auto panels = [&](std::int64_t n) { return (n + lanes - 1) / lanes; };
  const bool turned = outs * panels(ins) > ins * panels(outs);  // outputs are the lanes
  const std::vector<F> table = in_order(call, turned ? F{-1} : F{1});
  const std::int64_t x_size = panels(ins) * 2 * K * lanes, g_size = panels(outs) * 2 * K * lanes;
  const std::int64_t z_size = 2 * kChunk * 4 * lanes, y_size = 4 * call.R * lanes;
  const std::int64_t blocks = (call.B + kSamples - 1) / kSamples;
  parallel_for(blocks, 1, threads, [&](std::int64_t begin, std::int64_t end) {
    F* const room = scratch<F, 4>(kSamples * (x_size + g_size) + z_size + y_size);
    F *const z = room + kSamples * (x_size + g_size), *const y = z + z_size;
    for (std::int64_t block = begin; block < end; ++block) {
      const std::int64_t first = block * kSamples, used = std::min(kSamples, call.B - first);
      double squares[kSamples] = {};
      Powers powers[kSamples];
      for (std::int64_t group = 0; group < call.groups; ++group) {
        const Bins<F> x{call.x_bins, call.B, call.C, group * ins, ins};
        const Bins<F> g{call.g_bins, call.B, call.O, group * outs, outs};
        versioned_by_width([&](auto width) DPK_INLINE {
          using Of = Whitened<F, width>;
          using V = typename Of::V;
          for (std::int64_t i = 0; i < used; ++i) {
            Of::pack(x, K, first + i, room + i * x_size);
            Of::pack(g, K, first + i, room + kSamples * x_size + i * g_size);
          }
          for (std::int64_t i = 0; i < used; ++i) {
            const F *const xs = room + i * x_size, *const gs = room + kSamples * x_size + i * g_size;
            Powers& sums = powers[i];
            for (std::int64_t k = 0; k < K; ++k) {
              const double of_x = Of::power(xs, panels(ins), K, k);
              const double of_g = Of::power(gs, panels(outs), K, k);
              sums.kept += call.weights[k] * of_x * of_g;
              sums.x_most = std::max(sums.x_most, of_x);
              sums.g_most = std::max(sums.g_most, of_g);
            }
            squares[i] += Of::all_squares(table.data(), turned ? gs : xs, turned ? outs : ins,
                                          turned ? xs : gs, turned ? ins : outs, K, call.R,
                                          reinterpret_cast<V*>(z), reinterpret_cast<V*>(y));
          }
        });
      }
      for (std::int64_t i = 0; i < used; ++i) {
        const std::int64_t b = first + i;
        const double x_square = square_of_maps(call.x + b * call.C * call.H * call.W, call.C,
                                               call.H, call.W, call.rows, call.columns);
        const double g_square =
            square_of_maps(call.g + b * call.O * call.Y * call.X, call.O, call.Y, call.X, call.Y,
                           call.X);
        call.squares[b] = from_above(call, squares[i], powers[i], x_square, g_square);
      }
    }
  });
}

template void spectral_whitened<float>(const SpectralWhitened<float>&, int);
template void spectral_whitened<double>(const SpectralWhitened<double>&, int);

}  // namespace dpkern::cpu
