#include "cpu/product_bfloat.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "cpu/bfloat_tiles.h"
#include "cpu/parallel.h"

namespace dpkern::cpu {
namespace {

constexpr std::int64_t kFewest = 8;  // entries of the inner dimension that are worth filling a tile

}  // namespace

bool by_bfloat(const Matmul<float>& call) { return isa() >= Isa::kAmx && call.K >= kFewest; }

#if DPK_X86

namespace {

using namespace bfloat;
using ghost::scratch;

constexpr std::int64_t kBlock = 512;            // entries of the inner dimension at a time, at most
constexpr std::int64_t kTogether = 4 * kGrain;  // rows that are packed by the way
constexpr std::int64_t kBeside = 64;            // columns that are
constexpr std::int64_t kManyColumns = 256;      // whose panels may leave a cache
constexpr std::int64_t kAhead = 2;              // rows that are asked for early
constexpr std::int64_t kLines = 4 * kColumns;   // columns that are packed together
constexpr std::int64_t kMostWhole = 4096;       // rows or columns that are packed as a whole
constexpr std::int64_t kSmallest = 1 << 20;     // multiplications worth a thread

// Rows [0, used) of [*, stride], entries [0, count): tiles whose row holds entries l and l + 16 of
// each 32 in lane l. Returns the rows with numbers beyond as bits.
DPK_AMX DPK_INLINE inline std::uint32_t pack_rows(const float* from, std::int64_t used,
                                                  std::int64_t count, std::int64_t stride,
                                                  std::uint8_t* to) {
  std::uint32_t flagged = 0;
  for (std::int64_t m = 0; m < kTileRows; ++m) {
    Beyond beyond;
    const float* const row = from + m * stride;
    std::uint8_t* out = to + m * kTileBytes;
    for (std::int64_t k = 0; k < count; k += kInner, out += kTriple) {
      _mm_prefetch(row + k + kAhead * stride, _MM_HINT_T0);
      _mm_prefetch(row + k + kAhead * stride + kTileRows, _MM_HINT_T0);
      Floats x{}, y{};
      if (m < used) x = some(row + k, count - k), y = some(row + k + 16, count - k - 16);
      beyond.look(x), beyond.look(y);
      write_pairs(x, y, out);
    }
    if (beyond.any()) flagged |= 1u << m;
  }
  return flagged;
}

// Rows of a matrix from some column on.
struct Strided {
  const float* from;
  std::int64_t stride;
  DPK_INLINE const float* at(std::int64_t k) const { return from + k * stride; }
  DPK_INLINE static float factor(std::int64_t) { return 1; }
};

// One block of the inner dimension. One side is packed as a whole, for all threads, the longer one
// piece by piece by the thread that multiplies it, so that its panels never leave the cache.
struct Work {
  const Matmul<float>& call;
  const float* bias;  // filled up to whole units
  Range inner;
  std::uint32_t* beyond;  // by panel of rows, those with numbers beyond

  DPK_INLINE std::int64_t count() const { return inner.end - inner.begin; }
  // Bytes.
  DPK_INLINE std::int64_t panel() const { return panel_bytes(count()); }

  // Rows from a multiple of kTileRows on, filled up to multiples of kGrain.
  DPK_AMX void pack_left(Range rows, std::uint8_t* to) const {
    const std::int64_t end = ghost::round_up(rows.end - rows.begin, kGrain) + rows.begin;
    for (std::int64_t row = rows.begin; row < end; row += kTileRows, to += panel()) {
      const std::int64_t used = std::clamp<std::int64_t>(rows.end - row, 0, kTileRows);
      beyond[row / kTileRows] |=
          pack_rows(call.x + row * call.K + inner.begin, used, count(), call.K, to);
    }
  }

  // Columns of w, [K, M] or stored [M, K]; not 0 if there are numbers beyond.
  DPK_AMX std::uint32_t pack_right(Range columns, std::uint8_t* to) const {
    const std::int64_t used = columns.end - columns.begin;
    if (!call.w_transposed) {
      const Strided rows{call.w + inner.begin * call.M + columns.begin, call.M};
      return pack_columns(rows, used, count(), to, panel()) ? 1 : 0;
    }
    std::uint32_t found = 0;
    for (std::int64_t c = 0; c < used; c += kColumns, to += panel()) {
      found |= pack_rows(call.w + (columns.begin + c) * call.K + inner.begin,
                         std::min(kColumns, used - c), count(), call.K, to);
      for (std::int64_t k = 0; k < count(); k += kInner) {
        for (int i = 0; i < kParts; ++i) transpose(to + (k / kInner * kParts + i) * kTile);
      }
    }
    return found;
  }

  // out[rows, columns] = bias + the product, or += it from the second block on, of panels that
  // begin there.
  DPK_AMX void multiply_all(const std::uint8_t* left, Range rows, const std::uint8_t* right,
                            Range columns) const {
    const AmxTiles tiles;
    asm volatile("" ::: "memory");  // what the tiles are loaded from has been written
    for (std::int64_t row = rows.begin; row < rows.end; row += kGrain) {
      for (std::int64_t column = columns.begin; column < columns.end; column += kUnit) {
        add_square(call.out + row * call.M + column, call.M, std::min(kGrain, rows.end - row),
                   std::min(kUnit, columns.end - column),
                   inner.begin == 0 ? bias + column : nullptr,
                   left + (row - rows.begin) / kTileRows * panel(),
                   right + (column - columns.begin) / kColumns * panel(), panel());
      }
    }
  }
};

// step(piece) over pieces of a range.
template <class F>
void by_pieces(Range all, std::int64_t size, const F& step) {
  for (std::int64_t first = all.begin; first < all.end; first += size) {
    step(Range{first, std::min(all.end, first + size)});
  }
}

// Bytes of that many rows or columns.
std::uint8_t* left_panels(const Work& work, std::int64_t rows) {
  return scratch<std::uint8_t, 10>(ghost::round_up(rows, kGrain) / kTileRows * work.panel());
}
std::uint8_t* right_panels(const Work& work, std::int64_t columns) {
  return scratch<std::uint8_t, 11>(ghost::round_up(columns, kUnit) / kColumns * work.panel());
}

// For more columns than rows. False if a weight is beyond.
bool by_columns(const Work& work, int team) {
  const Range rows{0, work.call.N};
  std::uint8_t* const left = left_panels(work, rows.end);
  parallel_for(rows.end, kGrain, team, [&](std::int64_t begin, std::int64_t end) {
    work.pack_left({begin, end}, left + begin / kTileRows * work.panel());
  });
  std::atomic<std::uint32_t> found{0};
  parallel_for(work.call.M, kBeside, team, [&](std::int64_t begin, std::int64_t end) {
    std::uint8_t* const right = right_panels(work, kBeside);
    by_pieces({begin, end}, kBeside, [&](Range columns) {
      found.fetch_or(work.pack_right(columns, right), std::memory_order_relaxed);
      work.multiply_all(left, rows, right, columns);
    });
  });
  return found.load() == 0;
}

// For more rows than columns.
bool by_rows(const Work& work, Range columns, int team) {
  std::uint8_t* const right = right_panels(work, columns.end - columns.begin);
  std::atomic<std::uint32_t> found{0};
  parallel_for(columns.end - columns.begin, kLines, team,
               [&](std::int64_t begin, std::int64_t end) {
                 found.fetch_or(work.pack_right({columns.begin + begin, columns.begin + end},
                                                right + begin / kColumns * work.panel()),
                                std::memory_order_relaxed);
               });
  if (found.load() != 0) return false;
  parallel_for(work.call.N, kGrain, team, [&](std::int64_t begin, std::int64_t end) {
    std::uint8_t* const left = left_panels(work, kTogether);
    by_pieces({begin, end}, kTogether, [&](Range rows) {
      work.pack_left(rows, left);
      work.multiply_all(left, rows, right, columns);
    });
  });
  return true;
}

}  // namespace

void matmul_by_bfloat(const Matmul<float>& call, int threads,
                      void (*other)(const Matmul<float>&, int)) {
  const int team = useful_threads(call.N * call.K * call.M, kSmallest, threads);
  const std::int64_t blocks = (call.K + kBlock - 1) / kBlock;
  const std::int64_t most = (call.K + blocks * kInner - 1) / (blocks * kInner) * kInner;
  const std::int64_t filled = ghost::round_up(call.M, kUnit);
  float* const bias = scratch<float, 12>(filled);
  std::fill_n(bias, filled, 0.0f);
  if (call.bias != nullptr) std::copy_n(call.bias, call.M, bias);
  std::vector<std::uint32_t> beyond(
      static_cast<std::size_t>(ghost::round_up(call.N, kGrain) / kTileRows));
  const bool wide = call.M >= kManyColumns && call.N <= std::min(call.M, kMostWhole);
  for (std::int64_t first = 0; first < call.M; first += wide ? call.M : kMostWhole) {
    const Range columns{first, std::min(call.M, first + kMostWhole)};
    for (std::int64_t k = 0; k < call.K; k += most) {
      const Work work{call, bias, {k, std::min(call.K, k + most)}, beyond.data()};
      if (!(wide ? by_columns(work, team) : by_rows(work, columns, team))) {
        return other(call, threads);
      }
    }
  }
  for (std::int64_t row = 0; row < call.N; ++row) {
    const std::uint32_t rows = beyond[static_cast<std::size_t>(row / kTileRows)];
    if ((rows >> (row % kTileRows) & 1) == 0) continue;
    Matmul<float> one = call;
    one.x += row * call.K, one.out += row * call.M, one.N = 1;
    other(one, 1);
  }
}

#else

void matmul_by_bfloat(const Matmul<float>& call, int threads,
                      void (*other)(const Matmul<float>&, int)) {
  other(call, threads);
}

#endif

}  // namespace dpkern::cpu
