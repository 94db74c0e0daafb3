// The integers of a sample are the product of two vectors of 16-bit integers, whose norm is known
// exactly, and their sum over samples is a product of two matrices: exact in any order. Every
// operation here has the same bits on all processors. docs/exact.md.

#include "cpu/exact_factors.h"

#include <algorithm>
#include <type_traits>
#include <vector>

#include "cpu/factor_bytes.h"
#include "cpu/factor_rounding.h"
#include "cpu/linear_parts.h"
#include "cpu/pair_tile.h"
#include "cpu/panels.h"
#include "cpu/parallel.h"

namespace dpkern::cpu {
namespace {

using namespace ghost;
using exact::Samples;

constexpr std::int64_t kSmallest = 1 << 20;  // multiplications worth a thread
constexpr std::int64_t kNarrow = 32;         // inputs or outputs that fill tiles of bytes
constexpr std::int64_t kGrain = 8;           // pairs that a thread rounds at a time
constexpr std::int64_t kNear = 1 << 14;      // integers that stay in the first cache

// out += the integers of a block of samples.
template <class F, int kBytes, bool kVnni>
struct Product {
  using T = PairTile<kBytes, kVnni>;
  const Samples<F>& samples;

  std::int64_t pairs() const { return (samples.count + 1) / 2; }
  std::int64_t row_panels() const { return (samples.shape.outputs + T::kRows - 1) / T::kRows; }
  std::int64_t column_panels() const {
    return (samples.shape.inputs + T::kColumns - 1) / T::kColumns;
  }
  std::int64_t row_panel() const { return panel_size<T::kRows, std::int32_t>(pairs()); }
  std::int64_t column_panel() const { return panel_size<T::kColumns, std::int32_t>(pairs()); }

  // Rounds the samples of pairs [begin, end) into panels.
  DPK_INLINE void pack(std::int64_t begin, std::int64_t end, std::int32_t* g,
                       std::int32_t* a) const {
    const std::int64_t wide = column_panels() * T::kColumns, tall = row_panels() * T::kRows;
    constexpr std::int64_t kMost = Samples<F>::kTogether / 2;
    const std::int64_t together =
        std::clamp<std::int64_t>(kNear / (2 * (wide + tall)), 1, std::min(kMost, end - begin));
    std::int16_t* const inputs = scratch<std::int16_t, 0>(2 * together * (wide + tall));
    std::int16_t* const outputs = inputs + 2 * together * wide;
    std::fill_n(inputs, 2 * together * (wide + tall), std::int16_t{0});
    for (std::int64_t first = begin; first < end; first += together) {
      const std::int64_t pairs = std::min(together, end - first);
      const Range numbers{2 * first, std::min(samples.count, 2 * (first + pairs))};
      if (numbers.end - numbers.begin < 2 * pairs) {  // the last has no partner
        std::fill_n(inputs + (2 * pairs - 1) * wide, wide, std::int16_t{0});
        std::fill_n(outputs + (2 * pairs - 1) * tall, tall, std::int16_t{0});
      }
      samples.round(numbers, inputs, wide, outputs, tall);
      for (std::int64_t i = 0; i < pairs; ++i) {
        const std::int16_t *const row = inputs + 2 * i * wide, *const column =
                                                                   outputs + 2 * i * tall;
        pack_pair<T::kColumns>(row, row + wide, wide, column_panel(),
                               a + (first + i) * T::kColumns);
        pack_pair<T::kRows>(column, column + tall, tall, row_panel(), g + (first + i) * T::kRows);
      }
    }
  }

  DPK_INLINE void add(const std::int32_t* g, const std::int32_t* a, Range rows, Range columns,
                      std::int32_t* out) const {
    const LinearShape& shape = samples.shape;
    for (std::int64_t j = columns.begin; j < columns.end; ++j) {
      const std::int64_t wide = std::min<std::int64_t>(T::kColumns, shape.inputs - j * T::kColumns);
      for (std::int64_t i = rows.begin; i < rows.end; ++i) {
        const std::int64_t tall = std::min<std::int64_t>(T::kRows, shape.outputs - i * T::kRows);
        std::int32_t* to = out + i * T::kRows * shape.inputs + j * T::kColumns;
        prefetch_rows<T::kColumns>(to, tall, shape.inputs);
        T tile;
        tile.multiply(g + i * row_panel(), T::kRows, a + j * column_panel(), T::kColumns, pairs());
        for (std::int64_t m = 0; m < tall; ++m, to += shape.inputs) {
          add_row(tile.at[m], wide, to);
        }
      }
    }
  }
};

template <class F>
void add_samples(const Samples<F>& samples, std::int32_t* out, int team) {
  // parallel_for is outside of what is compiled for an instruction set.
  std::int64_t pairs = 0, row_panels = 0, column_panels = 0, row_panel = 0, column_panel = 0;
  versioned_by_pairs([&](auto width, auto vnni) DPK_INLINE {
    const Product<F, decltype(width)::value, decltype(vnni)::value> product{samples};
    pairs = product.pairs();
    row_panels = product.row_panels(), row_panel = product.row_panel();
    column_panels = product.column_panels(), column_panel = product.column_panel();
  });
  std::int32_t* const g = scratch<std::int32_t, 4>(row_panels * row_panel);
  std::int32_t* const a = scratch<std::int32_t, 5>(column_panels * column_panel);
  parallel_for(pairs, kGrain, team, [&](std::int64_t begin, std::int64_t end) {
    versioned_by_pairs([&](auto width, auto vnni) DPK_INLINE {
      Product<F, decltype(width)::value, decltype(vnni)::value>{samples}.pack(begin, end, g, a);
    });
  });
  for_panels(row_panels, column_panels, team, [&](Range rows, Range columns) {
    versioned_by_pairs([&](auto width, auto vnni) DPK_INLINE {
      const Product<F, decltype(width)::value, decltype(vnni)::value> product{samples};
      product.add(g, a, rows, columns, out);
    });
  });
}

}  // namespace

template <class F>
void add_factored(const F* a, const F* g, const F* factors, const LinearShape& shape,
                  std::int32_t* out, int threads) {
  std::vector<std::int64_t> used;
  for (std::int64_t b = 0; b < shape.batch; ++b) {
    if (factors[b] != 0) used.push_back(b);
  }
  const auto count = static_cast<std::int64_t>(used.size());
  const int team = useful_threads(count * shape.inputs * shape.outputs, kSmallest, threads);
  constexpr std::int64_t kMost = Samples<F>::kMostSamples;
  for (std::int64_t first = 0; first < count; first += kMost) {
    const std::int64_t some = std::min(kMost, count - first);
    const Samples<F> samples{a, g, factors, used.data() + first, some, shape};
    if (isa() >= Isa::kAmx && std::min(shape.inputs, shape.outputs) >= kNarrow) {
      exact::add_by_bytes(samples, out, team);
    } else {
      add_samples(samples, out, team);
    }
  }
}

template void add_factored<float>(const float*, const float*, const float*, const LinearShape&,
                                  std::int32_t*, int);
template void add_factored<double>(const double*, const double*, const double*, const LinearShape&,
                                   std::int32_t*, int);

}  // namespace dpkern::cpu
