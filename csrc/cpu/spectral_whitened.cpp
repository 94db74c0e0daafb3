// Norms of whitened coordinates, from the retained bins of both operands and without a coordinate
// in memory.
//
// For every channel pair, y_r = sum_k c(r, k) Re Z(k) + s(r, k) Im Z(k) with Z = turn conj(D) X.
// Where the matrix allows it the coordinates are even or odd about the kernel's centre: the first
// take Re Z alone, the others Im Z. The channels of one operand are the lanes, those of the other
// are broadcast: whichever needs fewer products. A chunk of bins is added up by itself before it
// joins the sum of all, so rounding grows with the chunk's length and not with the number of bins.
// Where few bins meet many channels, Gram matrices over channels take the place of the pairs.
// docs/spectral.md proves the bounds.

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

constexpr std::int64_t kChunk = 16;    // bins; `_whitened_plan.py` knows it
constexpr std::int64_t kTogether = 5;  // coordinates whose sums stay in registers, for each row
constexpr std::int64_t kSamples = 4;   // samples that are packed together, a few lines of each bin

// What the bins of one sample and group say about the rounding.
struct Powers {
  double kept = 0;    // sum w P_x P_d
  double x_most = 0;  // largest powers
  double g_most = 0;
};

// Coefficients [rows, K] as the loops read them: [chunk][tile of coordinates][bin][coordinate].
template <class F>
struct Table {
  std::vector<F> entries;
  std::int64_t rows, K;

  Table(const double* from, std::int64_t count, std::int64_t bins, F sign) : rows(count), K(bins) {
    entries.reserve(static_cast<std::size_t>(rows * K));
    for (std::int64_t first = 0; first < K; first += kChunk) {
      const std::int64_t end = std::min(K, first + kChunk);
      for (std::int64_t r = 0; r < rows; r += kTogether) {
        for (std::int64_t k = first; k < end; ++k) {
          for (std::int64_t i = r; i < std::min(rows, r + kTogether); ++i) {
            entries.push_back(sign * static_cast<F>(from[i * K + k]));
          }
        }
      }
    }
  }
};

// Coefficients of Re Z and of Im Z, whose coordinates begin at `odd_from`.
template <class F>
struct Tables {
  Table<F> even, odd;
  std::int64_t odd_from;
  std::int64_t rows() const { return std::max(even.rows, odd_from + odd.rows); }
};

// One operand's bins [K, B, 2, channels], of which a group has `used` channels from `first` on.
template <class F>
struct Bins {
  const F* data;
  std::int64_t samples, channels, first, used;
  const double* turns;  // [K, 2]: what each bin is multiplied by, or nullptr
};

template <class F, int kBytes>
struct Whitened {
  static constexpr int kLanes = kBytes / static_cast<int>(sizeof(F));
  static constexpr int kRows = kBytes == 64 ? 4 : 2;
  static constexpr int kWide = kBytes / static_cast<int>(sizeof(double));
  using V = Vector<F, kLanes>;
  using D = Vector<double, kWide>;

  // (c + i s) (re + i im), the imaginary part `step` behind the real one.
  template <class T>
  static DPK_INLINE void turn(T re, T im, F c, F s, T* to, std::int64_t step) {
    to[0] = c * re - s * im;
    to[step] = c * im + s * re;
  }
  // Some samples' bins, each as [panel of kLanes channels][K][2][kLanes], `size` apart. Lanes
  // behind the last channel keep their zeros. The bins of a sample are pages apart, so that the
  // processor must be told which ones come next.
  static DPK_INLINE void pack(const Bins<F>& bins, std::int64_t K, std::int64_t first_sample,
                              std::int64_t used, std::int64_t size, F* to) {
    constexpr std::int64_t kLine = 64 / static_cast<std::int64_t>(sizeof(F)), kAhead = 8;
    const std::int64_t row = 2 * bins.channels, step = bins.samples * row;
    for (std::int64_t k = 0; k < K; ++k) {
      const F* from = bins.data + k * step + first_sample * row;
      if (k + kAhead < K) {
        const F* const next = from + kAhead * step;
        for (std::int64_t i = 0; i < used * row; i += kLine) __builtin_prefetch(next + i);
      }
      from += bins.first;
      F c = 1, s = 0;
      if (bins.turns != nullptr) {
        c = static_cast<F>(bins.turns[2 * k]);
        s = static_cast<F>(bins.turns[2 * k + 1]);
      }
      for (std::int64_t i = 0; i < used; ++i, from += row) {
        F* at = to + i * size + 2 * k * kLanes;
        for (std::int64_t first = 0; first < bins.used; first += kLanes, at += 2 * K * kLanes) {
          const std::int64_t count = std::min<std::int64_t>(kLanes, bins.used - first);
          const F *const re = from + first, *const im = re + bins.channels;
          if (count == kLanes) {
            turn(load<V>(re), load<V>(im), c, s, reinterpret_cast<V*>(at), 1);
            continue;
          }
          for (std::int64_t i = 0; i < count; ++i) turn(re[i], im[i], c, s, at + i, kLanes);
        }
      }
    }
  }
  // The sum over channels of a bin's powers.
  static DPK_INLINE double power(const F* packed, std::int64_t channels, std::int64_t K,
                                 std::int64_t k) {
    packed += 2 * k * kLanes;
    if (channels <= 4) {
      F sum = 0;
      for (std::int64_t c = 0; c < channels; ++c) {
        const F re = packed[c], im = packed[kLanes + c];
        sum += re * re + im * im;
      }
      return static_cast<double>(sum);
    }
    V sum{};
    for (std::int64_t c = 0; c < channels; c += kLanes, packed += 2 * K * kLanes) {
      const V* const at = reinterpret_cast<const V*>(packed);
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
  // y[j][i] += sum over a chunk's bins of coefficients times one part of Z.
  template <int kSize, int kCount>
  static DPK_INLINE void add(const F* table, const V* z, std::int64_t bins, V* y) {
    V sums[kSize][kCount];
#pragma GCC unroll 8
    for (int j = 0; j < kSize; ++j) {
#pragma GCC unroll 4
      for (int i = 0; i < kCount; ++i) sums[j][i] = V{};
    }
    for (std::int64_t k = 0; k < bins; ++k) {
      const V* const at = z + 2 * k * kCount;
#pragma GCC unroll 8
      for (int j = 0; j < kSize; ++j) {
        const F c = table[k * kSize + j];
#pragma GCC unroll 4
        for (int i = 0; i < kCount; ++i) sums[j][i] += c * at[2 * i];
      }
    }
#pragma GCC unroll 8
    for (int j = 0; j < kSize; ++j) {
#pragma GCC unroll 4
      for (int i = 0; i < kCount; ++i) y[j * kCount + i] += sums[j][i];
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
  template <int kCount>
  static DPK_INLINE const F* add_all(const F* table, std::int64_t rows, const V* z,
                                     std::int64_t bins, V* y) {
    for (std::int64_t r = 0; r < rows; r += kTogether) {
      const std::int64_t size = std::min(kTogether, rows - r);
      add_tile<kCount>(size, table, z, bins, y + r * kCount);
      table += bins * size;
    }
    return table;
  }
  // The squares of all coordinates of kCount rows with one panel of lanes.
  template <int kCount>
  static DPK_INLINE D squares(const Tables<F>& tables, const F* lanes, const F* rows, V* z, V* y) {
    const F *even = tables.even.entries.data(), *odd = tables.odd.entries.data();
    const std::int64_t K = tables.even.K, count = tables.rows() * kCount;
    for (std::int64_t i = 0; i < count; ++i) y[i] = V{};
    for (std::int64_t first = 0; first < K; first += kChunk) {
      const std::int64_t bins = std::min(kChunk, K - first);
      multiply<kCount>(lanes + 2 * first * kLanes, rows + 2 * first * kLanes, bins, z);
      even = add_all<kCount>(even, tables.even.rows, z, bins, y);
      odd = add_all<kCount>(odd, tables.odd.rows, z + 1, bins, y + tables.odd_from * kCount);
    }
    constexpr int kParts = kLanes / kWide;
    D sums[kParts] = {};
    for (std::int64_t i = 0; i < count; ++i) {
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) {
        const auto narrow =
            load<Vector<F, kWide>>(reinterpret_cast<const F*>(y + i) + part * kWide);
        const D wide = __builtin_convertvector(narrow, D);
        sums[part] += wide * wide;
      }
    }
    for (int part = 1; part < kParts; ++part) sums[0] += sums[part];
    return sums[0];
  }
  // One group of one sample, both operands packed.
  static DPK_INLINE double all_squares(const Tables<F>& tables, const F* lanes,
                                       std::int64_t lane_count, const F* rows,
                                       std::int64_t row_count, V* z, V* y) {
    const std::int64_t panel = 2 * tables.even.K * kLanes;
    D sum{};
    for (std::int64_t lane = 0; lane < lane_count; lane += kLanes, lanes += panel) {
      for (std::int64_t row = 0; row < row_count;) {
        const F* const at = rows + row / kLanes * panel + row % kLanes;
        const std::int64_t left = std::min(row_count, row / kLanes * kLanes + kLanes) - row;
        if (left >= kRows) {
          sum += squares<kRows>(tables, lanes, at, z, y);
          row += kRows;
        } else if (left >= 2) {
          sum += squares<2>(tables, lanes, at, z, y);
          row += 2;
        } else {
          sum += squares<1>(tables, lanes, at, z, y);
          row += 1;
        }
      }
    }
    return ghost::sum_lanes<D, kWide>(sum);
  }
};

// The same squares from Gram matrices over channels, without a channel pair. With the coefficients
// A(r, k) of Re(A Z) and Z = conj(D) X,
//   sum y^2 = 1/2 sum_kl Re(J(k, l) conj(Q_d) Q_x + H(k, l) conj(P_d) P_x)
//   J = sum_r A(r, k) A(r, l)    H = sum_r A(r, k) conj(A(r, l))
//   Q = sum_c X_k X_l            P = sum_c X_k conj(X_l)
// in double: the sum cancels where the coordinates do, and its root must not.
struct Grams {
  static constexpr int kLanes = 8, kTile = 4;
  using D = Vector<double, kLanes>;

  std::int64_t K, rows;         // bins, and their real and imaginary parts in whole tiles
  std::vector<double> factors;  // [k <= l][4]: J and H, halved where k is l
  std::vector<double> sizes;    // [K]: the norms of A's columns

  template <class F>
  explicit Grams(const SpectralWhitened<F>& call)
      : K(call.K), rows(round_up(2 * call.K, kTile)), sizes(static_cast<std::size_t>(call.K)) {
    const std::int64_t count = std::max(call.E, call.odd_from + call.N);
    std::vector<double> a(static_cast<std::size_t>(2 * count * K));
    for (std::int64_t r = 0; r < count; ++r) {
      for (std::int64_t k = 0; k < K; ++k) {
        const std::int64_t n = r - call.odd_from;
        const double even = r < call.E ? call.even[r * K + k] : 0;
        const double odd = n >= 0 && n < call.N ? call.odd[n * K + k] : 0;
        const double c = call.turns[2 * k], s = call.turns[2 * k + 1];
        double* const at = a.data() + 2 * (r * K + k);  // (even - i odd) (c + i s)
        at[0] = even * c + odd * s;
        at[1] = even * s - odd * c;
        sizes[static_cast<std::size_t>(k)] += at[0] * at[0] + at[1] * at[1];
      }
    }
    for (double& size : sizes) size = std::sqrt(size);
    factors.reserve(static_cast<std::size_t>(2 * K * (K + 1)));
    for (std::int64_t k = 0; k < K; ++k) {
      for (std::int64_t l = k; l < K; ++l) {
        double same = 0, crossed = 0, cosine = 0, sine = 0;
        for (std::int64_t r = 0; r < count; ++r) {
          const double *const at = a.data() + 2 * (r * K + k), *const to =
                                                                   a.data() + 2 * (r * K + l);
          same += at[0] * to[0];
          crossed += at[1] * to[1];
          cosine += at[0] * to[1];
          sine += at[1] * to[0];
        }
        const double share = k == l ? 0.5 : 1.0;
        for (const double of : {same - crossed, cosine + sine, same + crossed, sine - cosine}) {
          factors.push_back(share * of);
        }
      }
    }
  }

  // Whether the matrices take less time than the pairs. Double has half the lanes, and each entry's
  // lanes must be added up.
  static bool cheaper(std::int64_t K, std::int64_t ins, std::int64_t outs, std::int64_t count) {
    const std::int64_t entries = 2 * K * K, length = (ins + 7) / 8 + (outs + 7) / 8;
    return 2 * entries * (length + 16) < ins * outs * K * (count + 4) / 16;
  }

  // One sample's bins as rows of double, with zeros behind the last channel and the last row.
  template <class F>
  void pack(const Bins<F>& bins, std::int64_t sample, std::int64_t length, double* to) const {
    for (std::int64_t row = 0; row < rows; ++row, to += length) {
      const std::int64_t channels = row < 2 * K ? bins.used : 0;
      const F* const from = bins.data +
                            ((row / 2 * bins.samples + sample) * 2 + row % 2) * bins.channels +
                            bins.first;
      for (std::int64_t c = 0; c < channels; ++c) to[c] = static_cast<double>(from[c]);
      std::fill(to + channels, to + length, 0.0);
    }
  }
  // gram [rows, rows]: products of all rows, in tiles on and above the diagonal.
  DPK_INLINE void multiply(const double* from, std::int64_t length, double* gram) const {
    for (std::int64_t i = 0; i < rows; i += kTile) {
      for (std::int64_t j = i; j < rows; j += kTile) {
        D sums[kTile][kTile] = {};
        for (std::int64_t c = 0; c < length; c += kLanes) {
          D right[kTile];
#pragma GCC unroll 4
          for (int b = 0; b < kTile; ++b) right[b] = load<D>(from + (j + b) * length + c);
#pragma GCC unroll 4
          for (int a = 0; a < kTile; ++a) {
            const D left = load<D>(from + (i + a) * length + c);
#pragma GCC unroll 4
            for (int b = 0; b < kTile; ++b) sums[a][b] += left * right[b];
          }
        }
        for (int a = 0; a < kTile; ++a) {
          for (int b = 0; b < kTile; ++b) {
            gram[(i + a) * rows + j + b] = ghost::sum_lanes<D, kLanes>(sums[a][b]);
          }
        }
      }
    }
  }
  // One group's squares of one sample, and what rounding can hide in them.
  template <class F>
  DPK_INLINE double squares(const SpectralWhitened<F>& call, const double* x, const double* g,
                            std::int64_t channels, Powers& powers, double& hidden) const {
    const auto power = [&](const double* gram, std::int64_t k) {
      return gram[2 * k * rows + 2 * k] + gram[(2 * k + 1) * rows + 2 * k + 1];
    };
    double total = 0, most = 0;
    const double* factor = factors.data();
    for (std::int64_t k = 0; k < K; ++k) {
      const double of_x = power(x, k), of_g = power(g, k);
      powers.kept += call.weights[k] * of_x * of_g;
      powers.x_most = std::max(powers.x_most, of_x);
      powers.g_most = std::max(powers.g_most, of_g);
      most += sizes[static_cast<std::size_t>(k)] * std::sqrt(of_x * of_g);
      for (std::int64_t l = k; l < K; ++l, factor += 4) {
        const std::int64_t real = 2 * (k * rows + l), imaginary = real + rows;
        const double qx = x[real] - x[imaginary + 1], qx_im = x[real + 1] + x[imaginary];
        const double px = x[real] + x[imaginary + 1], px_im = x[imaginary] - x[real + 1];
        const double qg = g[real] - g[imaginary + 1], qg_im = g[real + 1] + g[imaginary];
        const double pg = g[real] + g[imaginary + 1], pg_im = g[imaginary] - g[real + 1];
        total += factor[0] * (qg * qx + qg_im * qx_im) - factor[1] * (qg * qx_im - qg_im * qx) +
                 factor[2] * (pg * px + pg_im * px_im) - factor[3] * (pg * px_im - pg_im * px);
      }
    }
    const double count = static_cast<double>(call.E + call.N);
    const double terms = static_cast<double>(channels + K * K) + count + 48;
    hidden += 3 * terms * 0x1p-53 * most * most;
    return total;
  }
};

// Squares of the rows and columns of x that outputs use.
template <class F>
double square_of_maps(const F* from, std::int64_t channels, std::int64_t height, std::int64_t width,
                      std::int64_t rows, std::int64_t columns) {
  double total = 0;
  versioned([&]() DPK_INLINE {
    if (rows == height && columns == width) {
      total = ghost::square_of(from, channels * height * width);
      return;
    }
    for (std::int64_t c = 0; c < channels; ++c) {
      for (std::int64_t y = 0; y < rows; ++y) {
        total += ghost::square_of(from + (c * height + y) * width, columns);
      }
    }
  });
  return total;
}

template <class F>
double from_above(const SpectralWhitened<F>& call, std::int64_t b, double square,
                  const Powers& powers) {
  double x_square = call.x_squares[b], g_square = call.g_squares[b];
  constexpr bool kNarrow = sizeof(F) == 4;
  constexpr double kLeast = kNarrow ? 0x1p-80 : 0x1p-400, kMost = kNarrow ? 0x1p100 : 0x1p400;
  constexpr double kSums = 1 + 0x1p-10;  // powers and squares of maps are summed in F
  const bool in_range = x_square >= kLeast && g_square >= kLeast && x_square <= kMost &&
                        g_square <= kMost && square - square == 0;
  if (!in_range) {  // in double, in which nothing is lost
    x_square = square_of_maps(call.x + b * call.C * call.H * call.W, call.C, call.H, call.W,
                              call.rows, call.columns);
    g_square = square_of_maps(call.g + b * call.O * call.Y * call.X, call.O, call.Y, call.X, call.Y,
                              call.X);
  }
  const double x_norm = std::sqrt(x_square), g_norm = std::sqrt(g_square);
  double norm = 0;
  if (in_range) {
    const double bins =
        kSums *
        (call.g_error * g_norm * std::sqrt(powers.x_most) +
         call.x_error * x_norm * (std::sqrt(powers.g_most) + call.share * call.g_error * g_norm));
    // What underflows in products and sums.
    const double pairs = static_cast<double>(call.C * call.O);
    const double lost = kNarrow
                            ? 8 * static_cast<double>(call.K) *
                                  std::sqrt(static_cast<double>(call.E + call.N) * pairs) * 0x1p-125
                            : 0;
    norm = std::sqrt(square) + call.stretch * bins +
           call.product_error * kSums * std::sqrt(powers.kept) + lost;
  } else {
    norm = kSums * call.stretch * call.share * x_norm * g_norm;  // || y || <= stretch || R ||
  }
  // A sum of so many squares in double.
  const double terms = static_cast<double>((call.E + call.N) * (call.C / call.groups) * call.O);
  return norm * norm * (1 + (terms + 64) * 0x1p-52);
}

template <class F>
void by_gram_matrices(const SpectralWhitened<F>& call, int threads) {
  const Grams grams(call);
  const std::int64_t outs = call.O / call.groups, ins = call.C / call.groups;
  const std::int64_t x_length = round_up(ins, Grams::kLanes);
  const std::int64_t g_length = round_up(outs, Grams::kLanes);
  const std::int64_t x_size = grams.rows * x_length, g_size = grams.rows * g_length;
  parallel_for(call.B, 1, threads, [&](std::int64_t begin, std::int64_t end) {
    double* const x_rows = scratch<double, 4>(x_size + g_size + 2 * grams.rows * grams.rows);
    double *const g_rows = x_rows + x_size, *const x_gram = g_rows + g_size;
    double* const g_gram = x_gram + grams.rows * grams.rows;
    for (std::int64_t b = begin; b < end; ++b) {
      double square = 0, hidden = 0;
      Powers powers;
      for (std::int64_t group = 0; group < call.groups; ++group) {
        versioned([&]() DPK_INLINE {
          grams.pack(Bins<F>{call.x_bins, call.B, call.C, group * ins, ins, nullptr}, b, x_length,
                     x_rows);
          grams.pack(Bins<F>{call.g_bins, call.B, call.O, group * outs, outs, nullptr}, b, g_length,
                     g_rows);
          grams.multiply(x_rows, x_length, x_gram);
          grams.multiply(g_rows, g_length, g_gram);
          square += grams.squares(call, x_gram, g_gram, ins + outs, powers, hidden);
        });
      }
      const double above = (square < 0 ? 0 : square) + hidden;
      call.squares[b] = from_above(call, b, above, powers);
    }
  });
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
  // Turned, Im Z has the other sign.
  const Tables<F> tables{
      {call.even, call.E, K, F{1}}, {call.odd, call.N, K, turned ? F{-1} : F{1}}, call.odd_from};
  const bool by_grams = sizeof(F) == 4 && Grams::cheaper(K, ins, outs, call.E + call.N);
  if (by_grams) return by_gram_matrices(call, threads);
  const std::int64_t x_size = panels(ins) * 2 * K * lanes, g_size = panels(outs) * 2 * K * lanes;
  const std::int64_t z_size = 2 * kChunk * 4 * lanes, y_size = 4 * tables.rows() * lanes;
  const std::int64_t blocks = (call.B + kSamples - 1) / kSamples;
  parallel_for(blocks, 1, threads, [&](std::int64_t begin, std::int64_t end) {
    F* const room = scratch<F, 4>(kSamples * (x_size + g_size) + z_size + y_size);
    F *const z = room + kSamples * (x_size + g_size), *const y = z + z_size;
    std::fill(room, z, F{0});
    for (std::int64_t block = begin; block < end; ++block) {
      const std::int64_t first = block * kSamples, used = std::min(kSamples, call.B - first);
      double squares[kSamples] = {};
      Powers powers[kSamples];
      for (std::int64_t group = 0; group < call.groups; ++group) {
        const Bins<F> x{call.x_bins, call.B, call.C, group * ins, ins, call.turns};
        const Bins<F> g{call.g_bins, call.B, call.O, group * outs, outs, nullptr};
        versioned_by_width([&](auto width) DPK_INLINE {
          using Of = Whitened<F, width>;
          using V = typename Of::V;
          Of::pack(x, K, first, used, x_size, room);
          Of::pack(g, K, first, used, g_size, room + kSamples * x_size);
          for (std::int64_t i = 0; i < used; ++i) {
            const F *const xs = room + i * x_size, *const gs =
                                                       room + kSamples * x_size + i * g_size;
            Powers& sums = powers[i];
            for (std::int64_t k = 0; k < K; ++k) {
              const double of_x = Of::power(xs, ins, K, k);
              const double of_g = Of::power(gs, outs, K, k);
              sums.kept += call.weights[k] * of_x * of_g;
              sums.x_most = std::max(sums.x_most, of_x);
              sums.g_most = std::max(sums.g_most, of_g);
            }
            squares[i] += Of::all_squares(tables, turned ? gs : xs, turned ? outs : ins,
                                          turned ? xs : gs, turned ? ins : outs,
                                          reinterpret_cast<V*>(z), reinterpret_cast<V*>(y));
          }
        });
      }
      for (std::int64_t i = 0; i < used; ++i) {
        call.squares[first + i] = from_above(call, first + i, squares[i], powers[i]);
      }
    }
  });
}

template void spectral_whitened<float>(const SpectralWhitened<float>&, int);
template void spectral_whitened<double>(const SpectralWhitened<double>&, int);

}  // namespace dpkern::cpu
