#include "counted/noise.h"

#include "counted/kernels.h"
#include "counted/tensor_noise.h"

namespace dpkern::counted {
namespace {

constexpr int kBlocks = 48;  // cipher blocks of a noise tile

template <class Law>
void draw_tile_of(const Stream& stream, std::uint64_t tile, Draw x[kTile]) {
  Word blocks[kBlocks][16];
  for (int i = 0; i < kBlocks; ++i) {
    chacha_block(stream, stream.n0, kBlocks * tile + static_cast<std::uint64_t>(i), blocks[i]);
  }
  // The six words of a lane: rows 6 set .. 6 set + 5 of the words of 16 blocks each.
  const auto words_of = [&](int set, int lane, Word w[6]) {
    for (int i = 0; i < 6; ++i) {
      const int row = 6 * set + i;
      w[i] = blocks[kLanes * (row / 16) + lane][row % 16];
    }
  };
  const auto entry = [](const Word& column, int) { return Word(Law::table()[index_of(column)]); };
  Word escaped{};
  Word w[6];
  for (int set = 0; set < 8; ++set) {
    for (int lane = 0; lane < kLanes; ++lane) {
      words_of(set, lane, w);
      for (int b = 0; b < 4; ++b) {
        x[64 * set + 16 * b + lane] = as_signed(draw<Law>(w, b, entry, escaped));
      }
    }
  }
  if (escaped == 0u) return;
  const Counting chance(current == nullptr ? nullptr : by_chance);
  for (int j = 0; j < kTile; ++j) {
    if (!may_have_escaped(x[j])) continue;
    const int b = (j / kLanes) % 4;
    words_of(j / 64, j % kLanes, w);
    Word again{};
    draw<Law>(w, b, entry, again);
    if (again == 0u) continue;
    x[j] = draw_tail<Law>(stream, tile * kTile + static_cast<std::uint64_t>(j), w, b);
  }
}

}  // namespace

void draw_tile(const Stream& stream, Distribution law, std::uint64_t tile, Draw x[kTile]) {
  if (law == Distribution::kGaussian) {
    draw_tile_of<Gaussian>(stream, tile, x);
  } else {
    draw_tile_of<Laplace>(stream, tile, x);
  }
}

void rounding_tile(const Stream& stream, std::uint64_t tile, Word bits[kTile]) {
  for (int lane = 0; lane < kLanes; ++lane) {
    Word block[16];
    chacha_block(stream, stream.n0, kLanes * tile + static_cast<std::uint64_t>(lane), block);
    for (int half = 0; half < kTile / kLanes; ++half) {
      bits[half * kLanes + lane] = rounding_bits(block[half >> 1], half);
    }
  }
}

void keystream(const Stream& stream, std::uint64_t first_block, std::int64_t blocks,
               std::uint32_t* out) {
  Operand<std::uint32_t> words(out, 16 * blocks);
  for (std::int64_t i = 0; i < blocks; ++i) {
    Word block[16];
    chacha_block(stream, stream.n0, first_block + static_cast<std::uint64_t>(i), block);
    for (int word = 0; word < 16; ++word) words.store(16 * i + word, block[word]);
  }
}

void lattice_draws(const Stream& stream, Distribution law, std::uint64_t first, std::int64_t n,
                   std::int32_t* out) {
  Operand<std::int32_t> x(out, n);
  cpu::for_tiles(first, 0, n, [&](const cpu::TilePart& part) {
    Draw draws[kTile];
    draw_tile(stream, law, part.tile, draws);
    for (int i = 0; i < part.count; ++i) x.store(part.index + i, draws[part.offset + i]);
  });
}

void rounding_bits(const Stream& stream, std::uint64_t first, std::int64_t n, std::int16_t* out) {
  Operand<std::int16_t> bits(out, n);
  cpu::for_tiles(first, 0, n, [&](const cpu::TilePart& part) {
    Word tile[kTile];
    rounding_tile(stream, part.tile, tile);
    for (int i = 0; i < part.count; ++i) {
      bits.store(part.index + i, Counted<std::int16_t>(tile[part.offset + i]));
    }
  });
}

template <class T>
void add_noise_integer(const Stream& stream, Distribution law, std::uint64_t first, std::int64_t n,
                       T* x) {
  Operand<T> values(x, n);
  cpu::for_tiles(first, 0, n, [&](const cpu::TilePart& part) {
    Draw draws[kTile];
    draw_tile(stream, law, part.tile, draws);
    for (int i = 0; i < part.count; ++i) {
      const std::int64_t at = part.index + i;
      values.store(at, release_integer(values[at], draws[part.offset + i]));
    }
  });
}

template <class T, class R>
void add_noise_float(const Stream& stream, const Stream& rounding, Distribution law,
                     std::uint64_t first, std::int64_t n, double scale, const R* scales, T* x) {
  Operand<T> values(x, n);
  const Operand<const R> each(scales, scales == nullptr ? 0 : n);
  const Grid<T> for_all(scale);
  cpu::for_tiles(first, 0, n, [&](const cpu::TilePart& part) {
    Draw draws[kTile];
    Word bits[kTile];
    draw_tile(stream, law, part.tile, draws);
    rounding_tile(rounding, part.tile, bits);
    for (int i = 0; i < part.count; ++i) {
      const std::int64_t at = part.index + i;
      const Grid<T> grid = scales == nullptr ? for_all : Grid<T>(wide(each[at]));
      const Counted<T> units = values[at] * grid.per_unit;
      const Counted<T> finite = choose(isfinite(units), units, Counted<T>{});
      const int j = part.offset + i;
      values.store(at, grid.cell * release_float(finite, bits[j], draws[j]));
    }
  });
}

template void add_noise_integer(const Stream&, Distribution, std::uint64_t, std::int64_t,
                                std::int32_t*);
template void add_noise_integer(const Stream&, Distribution, std::uint64_t, std::int64_t,
                                std::int64_t*);
template void add_noise_float(const Stream&, const Stream&, Distribution, std::uint64_t,
                              std::int64_t, double, const float*, float*);
template void add_noise_float(const Stream&, const Stream&, Distribution, std::uint64_t,
                              std::int64_t, double, const double*, float*);
template void add_noise_float(const Stream&, const Stream&, Distribution, std::uint64_t,
                              std::int64_t, double, const float*, double*);
template void add_noise_float(const Stream&, const Stream&, Distribution, std::uint64_t,
                              std::int64_t, double, const double*, double*);

}  // namespace dpkern::counted
