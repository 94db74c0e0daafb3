#include "counted/noise.h"

#include "core/cdt.h"
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

template <class Law>
void cdt_tile(const Draws& made, std::uint64_t tile, Draw x[kTile]) {
  const CdtTable table = cdt_table(made.table, made.entries);
  constexpr int kCdtBlocks = kCdtWords * kTile / 16;
  Word blocks[kCdtBlocks][16];
  for (int i = 0; i < kCdtBlocks; ++i) {
    const std::uint64_t counter = kCdtBlocks * tile + static_cast<std::uint64_t>(i);
    chacha_block(made.stream, made.stream.n0, counter, blocks[i]);
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    Word marks{};
    const auto word_of = [&](int row) { return blocks[kLanes * (row / 16) + lane][row % 16]; };
    for (int group = 0; group < kTile / kLanes; ++group) {
      const Word index = word_of(kCdtWords * group + 1);
      const Word entry = table.guide[index_of(cdt_bucket(index))];
      Word undecided;
      const Word magnitude = cdt_magnitude(index, entry, undecided);
      x[kLanes * group + lane] = as_signed(cdt_value<Law>(magnitude, word_of(kCdtWords * group)));
      marks |= undecided & Word(1u << group);
    }
    if (marks == 0u) continue;
    const Counting chance(current == nullptr ? nullptr : by_chance);
    for (std::uint32_t left = marks.value; left != 0; left &= left - 1) {
      const int group = __builtin_ctz(left);
      const int j = kLanes * group + lane;
      const std::uint64_t position = tile * kTile + static_cast<std::uint64_t>(j);
      const std::uint32_t index = word_of(kCdtWords * group + 1).value;
      const Word magnitude = cdt_search(table, made.stream, position, index);
      x[j] = as_signed(cdt_value<Law>(magnitude, word_of(kCdtWords * group)));
    }
  }
}

template <class Sample>
void sample_tile(const Draws& made, std::uint64_t tile, Draw x[kTile]) {
  const auto* const table = static_cast<const Sample*>(made.table);
  const auto from_first = static_cast<std::int64_t>(tile * kTile - made.first);  // may be negative
  for (int j = 0; j < kTile; ++j) {
    std::int64_t at = ((from_first + j) % made.entries + made.cursor) % made.entries;
    if (at < 0) at += made.entries;
    x[j] = Draw(table[at]) << made.shift;
  }
}

}  // namespace

void draw_tile(const Draws& made, const Stream& stream, Distribution law, std::uint64_t tile,
               Draw x[kTile]) {
  if (made.source == DrawSource::kSamples16) return sample_tile<std::int16_t>(made, tile, x);
  if (made.source == DrawSource::kSamples32) return sample_tile<std::int32_t>(made, tile, x);
  if (made.source != DrawSource::kCdt) return draw_tile(stream, law, tile, x);
  if (made.law == Distribution::kGaussian) return cdt_tile<Gaussian>(made, tile, x);
  cdt_tile<Laplace>(made, tile, x);
}

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

void source_draws(const Draws& made, std::uint64_t first, std::int64_t n, std::int32_t* out) {
  Operand<std::int32_t> x(out, n);
  UpdateNoise noise{};
  noise.draws = made;
  TensorNoise drawn(noise, false);
  drawn.make(first, n);
  for (std::int64_t i = 0; i < n; ++i) x.store(i, drawn.draws[static_cast<std::size_t>(i)]);
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
void add_noise_integer(const UpdateNoise& noise, std::uint64_t first, std::int64_t n, T* x) {
  Operand<T> values(x, n);
  TensorNoise made(noise, false);
  made.make(first, n);
  for (std::int64_t i = 0; i < n; ++i) {
    values.store(i, release_integer(values[i], made.draws[static_cast<std::size_t>(i)]));
  }
}

template <class T, class R>
void add_noise_float(const UpdateNoise& noise, std::uint64_t first, std::int64_t n, double scale,
                     const R* scales, T* x) {
  Operand<T> values(x, n);
  const Operand<const R> each(scales, scales == nullptr ? 0 : n);
  const Grid<T> for_all(scale);
  TensorNoise made(noise, true);
  made.make(first, n);
  for (std::int64_t i = 0; i < n; ++i) {
    const Grid<T> grid = scales == nullptr ? for_all : Grid<T>(wide(each[i]));
    const Counted<T> units = values[i] * grid.per_unit;
    const Counted<T> finite = choose(isfinite(units), units, Counted<T>{});
    const auto at = static_cast<std::size_t>(i);
    values.store(i, grid.cell * release_float(finite, made.bits[at], made.draws[at]));
  }
}

template void add_noise_integer(const UpdateNoise&, std::uint64_t, std::int64_t, std::int32_t*);
template void add_noise_integer(const UpdateNoise&, std::uint64_t, std::int64_t, std::int64_t*);
template void add_noise_float(const UpdateNoise&, std::uint64_t, std::int64_t, double, const float*,
                              float*);
template void add_noise_float(const UpdateNoise&, std::uint64_t, std::int64_t, double,
                              const double*, float*);
template void add_noise_float(const UpdateNoise&, std::uint64_t, std::int64_t, double, const float*,
                              double*);
template void add_noise_float(const UpdateNoise&, std::uint64_t, std::int64_t, double,
                              const double*, double*);

}  // namespace dpkern::counted
