// Integer sums of linear gradients. Each sample's gradient is a vector of integers that depends on
// that sample alone: a tile of it is held in registers, truncated, and added to integers, so that
// the sums do not depend on order, blocks or threads. docs/exact.md.

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "cpu/equal_ids.h"
#include "cpu/exact.h"
#include "cpu/exact_bfloat.h"
#include "cpu/exact_factors.h"
#include "cpu/exact_operands.h"
#include "cpu/exact_tiles.h"
#include "cpu/ghost_embedding.h"
#include "cpu/ghost_linear.h"
#include "cpu/ghost_tiles.h"
#include "cpu/linear_parts.h"
#include "cpu/parallel.h"

namespace dpkern::cpu {
namespace {

using namespace ghost;

constexpr std::int64_t kSteps = 256;  // positions of a packed block of whole samples

// The rows of an embedding table that is the linear layer's weight as well: entries that the other
// use adds to a sample's gradient before it is truncated.
template <class F>
struct Table {
  const std::int64_t* ids;  // [B, S]; null: the weight has no other use
  const F* rows;            // [B, S, d]
  std::int64_t places;      // S
  std::int64_t padding;
};

// One sample of a block: where it lies, its factor, and its rows of the table with those of equal
// ids added, ids increasing.
template <class F>
struct Member {
  const F* a;
  const F* g;
  F factor;
  std::vector<std::int64_t> ids;
  std::vector<F> rows;  // [ids, d]
};

// Whole samples whose positions are multiplied together.
template <class F>
using Block = std::vector<Member<F>>;

template <class F>
void gather(const Table<F>& table, std::int64_t b, std::int64_t columns, Member<F>& member) {
  static thread_local EqualIds groups;
  const F* const rows = table.rows + b * table.places * columns;
  groups.sort(table.ids + b * table.places, table.places, table.padding);
  groups.for_each([&](const auto* places, std::size_t count) {
    member.ids.push_back(places->first);
    const std::size_t start = member.rows.size();
    member.rows.resize(start + static_cast<std::size_t>(columns));
    const double* const sums = sum_rows(rows, columns, {0, columns}, places, count);
    for (std::int64_t i = 0; i < columns; ++i) {
      member.rows[start + static_cast<std::size_t>(i)] = static_cast<F>(sums[i]);
    }
  });
}

// The largest absolute value; not finite if an entry is not.
template <class F>
F largest(const F* numbers, std::int64_t count) {
  using Bits = std::conditional_t<std::is_same_v<F, float>, std::uint32_t, std::uint64_t>;
  Bits found = 0;
  versioned([&]() DPK_INLINE {
    const F* const from = numbers;
    const std::int64_t n = count;
    Bits most = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      Bits bits;  // without the sign, they are ordered as the numbers are, and NaN is the largest
      __builtin_memcpy(&bits, from + i, sizeof(F));
      most = std::max<Bits>(most, bits & (~Bits{0} >> 1));
    }
    found = most;
  });
  F value;
  __builtin_memcpy(&value, &found, sizeof(F));
  return value;
}

// The used samples in blocks of about kSteps positions, never a part of a sample.
template <class F>
std::vector<Block<F>> blocks_of(const F* a, const F* g, const F* factors, const LinearShape& shape,
                                const Table<F>& table) {
  std::vector<Block<F>> blocks;
  const auto most = static_cast<std::size_t>(
      std::max<std::int64_t>(1, kSteps / std::max<std::int64_t>(1, shape.positions)));
  for (std::int64_t b = 0; b < shape.batch; ++b) {
    if (factors[b] == 0) continue;
    if (blocks.empty() || blocks.back().size() == most) blocks.emplace_back();
    const std::int64_t row = b * shape.positions;
    // One position: the factor joins g.
    const bool single = shape.positions == 1 && table.ids == nullptr;
    Member<F> member{a + row * shape.inputs, g + row * shape.outputs, factors[b], {}, {}};
    if (single) {
      // Infinity times a small input would not be small.
      if (!std::isfinite(factors[b] * largest(member.g, shape.outputs))) continue;
    }
    if (table.ids != nullptr) gather(table, b, shape.inputs, member);
    blocks.back().push_back(std::move(member));
  }
  return blocks;
}

// Adds a sample's rows of the table to a tile of its gradient.
template <class F, int kBytes>
DPK_INLINE inline void add_table(const Member<F>& member, std::int64_t columns, Range rows,
                                 Range wanted, Tile<F, kBytes>& tile) {
  const auto begin = std::lower_bound(member.ids.begin(), member.ids.end(), rows.begin);
  for (auto id = begin; id != member.ids.end() && *id < rows.end; ++id) {
    const F* const from = member.rows.data() + (id - member.ids.begin()) * columns + wanted.begin;
    const std::int64_t count = wanted.end - wanted.begin;
    F sums[Tile<F, kBytes>::kColumns];
    __builtin_memcpy(sums, tile.at[*id - rows.begin], sizeof(sums));
    for (std::int64_t c = 0; c < count; ++c) sums[c] += from[c];
    __builtin_memcpy(tile.at[*id - rows.begin], sums, sizeof(sums));
  }
}

// out[rows, columns] += the integers of one block.
template <class F, int kBytes>
DPK_INLINE inline void add_block(const Block<F>& block, const LinearShape& shape, bool single,
                                 Range rows, Range columns, std::int32_t* out) {
  using T = Tile<F, kBytes>;
  const std::int64_t positions = shape.positions;
  const auto samples = static_cast<std::int64_t>(block.size());
  const std::int64_t steps = samples * positions;
  const std::int64_t panels = (rows.end - rows.begin + T::kRows - 1) / T::kRows;
  const std::int64_t size = panel_size<T::kRows, F>(steps);
  F* const g = scratch<F, 4>(panels * size);
  F* const a = scratch<F, 5>(T::kColumns * steps);
  for (std::int64_t b = 0; b < samples; ++b) {
    const Member<F>& member = block[static_cast<std::size_t>(b)];
    pack_panels<T::kRows, T::kWrittenRows>(member.g + rows.begin, positions, rows.end - rows.begin,
                                           shape.outputs, single ? member.factor : F{1},
                                           g + b * positions * T::kRows, size);
  }
  for (std::int64_t column = columns.begin; column < columns.end; column += T::kColumns) {
    const std::int64_t wide = std::min<std::int64_t>(T::kColumns, columns.end - column);
    for (std::int64_t b = 0; b < samples; ++b) {
      pack_panels<T::kColumns>(block[static_cast<std::size_t>(b)].a + column, positions, wide,
                               shape.inputs, F{1}, a + b * positions * T::kColumns,
                               T::kColumns * steps);
    }
    for (std::int64_t panel = 0; panel < panels; ++panel) {
      const std::int64_t row = rows.begin + panel * T::kRows;
      const std::int64_t tall = std::min<std::int64_t>(T::kRows, rows.end - row);
      const F* const left = g + panel * size;
      prefetch_rows<T::kColumns>(out + row * shape.inputs + column, tall, shape.inputs);
      IntegerTile<F, kBytes> total;
      total.clear();
      if (single) {
        total.add_products(left, a, samples);
      } else {
        for (std::int64_t b = 0; b < samples; ++b) {
          const Member<F>& member = block[static_cast<std::size_t>(b)];
          T tile;
          tile.multiply(left + b * positions * T::kRows, a + b * positions * T::kColumns,
                        positions);
          if (member.ids.empty()) {
            total.add(tile, member.factor);
            continue;
          }
          T with_table = tile;  // a copy: the tile itself stays in registers
          add_table<F, kBytes>(member, shape.inputs, {row, row + tall}, {column, column + wide},
                               with_table);
          total.add(with_table, member.factor);
        }
      }
      for (std::int64_t m = 0; m < tall; ++m) {
        add_row(total.at[m], wide, out + (row + m) * shape.inputs + column);
      }
    }
  }
}

// out += the integers of all samples.
template <class F>
void add_integers(const F* a, const F* g, const F* factors, const LinearShape& shape,
                  const Table<F>& table, std::int32_t* out, int threads) {
  const auto blocks = blocks_of(a, g, factors, shape, table);
  const bool single = shape.positions == 1 && table.ids == nullptr;
  const auto add = [&](const Block<F>& block, Range rows, Range columns, std::int32_t* to) {
    versioned_by_width([&](auto width) DPK_INLINE {
      add_block<F, decltype(width)::value>(block, shape, single, rows, columns, to);
    });
  };
  for_blocks(blocks, shape, out, threads, add);
}

// At least |row|. Squares are summed in F, which is enough for a bound; in double where their sizes
// could hide something.
template <class F, int kBytes>
DPK_INLINE inline double norm_above(const F* row, std::int64_t n) {
  constexpr int kLanes = kBytes / static_cast<int>(sizeof(F)), kChains = 4;
  constexpr std::int64_t kStep = kLanes * kChains, kMost = 1 << 20;
  using V = Vector<F, kLanes>;
  V sums[kChains] = {};
  std::int64_t i = 0;
  for (; i + kStep <= n; i += kStep) {
#pragma GCC unroll 16
    for (int k = 0; k < kChains; ++k) {
      const V x = load<V>(row + i + k * kLanes);
      sums[k] += x * x;
    }
  }
  double square = 0;
  for (; i < n; ++i) square += static_cast<double>(row[i]) * static_cast<double>(row[i]);
  square += static_cast<double>(sum_lanes<V, kLanes>((sums[0] + sums[1]) + (sums[2] + sums[3])));
  // What underflows is less than 2^-104 in all, so that it counts as one rounding more.
  if (std::is_same_v<F, double> || !(n <= kMost && 0x1p-80 < square && square < 0x1p127)) {
    return std::sqrt(square_of(row, n));
  }
  const auto roundings = static_cast<double>(n / kStep + 10);
  return std::sqrt(square * (1 + 1.02 * roundings * kRoundoff<F>));
}

// The rounding of all positions and rows of a table together, at most.
template <class F>
void bound_errors(const F* a, const F* g, const LinearShape& shape, const Table<F>& table,
                  double* errors, int threads) {
  const std::int64_t roundings = shape.positions + kOtherRoundings;
  const double entries = static_cast<double>(shape.inputs) * static_cast<double>(shape.outputs);
  const double flushed = 2 * static_cast<double>(roundings) * kFlushed<F> * std::sqrt(entries);
  const bool by_parts = std::is_same_v<F, float> && table.ids == nullptr && exact::by_bfloat(shape);
  parallel_for(shape.batch, 1, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t b = begin; b < end; ++b) {
      double total = 0;
      exact::PositionNorms norms;
      versioned_by_width([&](auto width) DPK_INLINE {
        constexpr int kBytes = decltype(width)::value;
        for (std::int64_t t = b * shape.positions; t < (b + 1) * shape.positions; ++t) {
          const double x = norm_above<F, kBytes>(a + t * shape.inputs, shape.inputs);
          const double y = norm_above<F, kBytes>(g + t * shape.outputs, shape.outputs);
          total += x * y;
          norms.inputs += x, norms.outputs += y;
          norms.largest = std::max({norms.largest, x, y});
        }
        for (std::int64_t s = b * table.places; s < (b + 1) * table.places; ++s) {
          if (table.ids[s] == table.padding) continue;
          total += norm_above<F, kBytes>(table.rows + s * shape.inputs, shape.inputs);
        }
      });
      norms.products = total;
      errors[b] =
          by_parts ? exact::bfloat_error(shape, norms) : chain_error<F>(roundings, total) + flushed;
    }
  });
}

}  // namespace

template <class F>
void linear_integer_sum(const LinearIntegerSum<F>& call, int threads) {
  const LinearShape shape = shape_of(call);
  if (call.rounding == LinearRounding::kFactors) {
    return add_factored<F>(call.a, call.g, call.factors, shape, call.out, threads);
  }
  if (call.rounding == LinearRounding::kOperands) {
    return add_by_operands<F>(call.a, call.g, call.factors, shape, call.out, threads);
  }
  if constexpr (std::is_same_v<F, float>) {
    if (exact::by_bfloat(shape)) {
      return exact::add_by_bfloat(call.a, call.g, call.factors, shape, call.out, threads);
    }
  }
  add_integers<F>(call.a, call.g, call.factors, shape, {}, call.out, threads);
}

template <class F>
void linear_integer_norm(const LinearIntegerNorm<F>& call, int threads) {
  operand_norms<F>(call.a, call.g, shape_of(call), call.squares, threads);
}

template <class F>
void tied_integer_sum(const TiedIntegerSum<F>& call, int threads) {
  const Table<F> table{call.ids, call.e, call.S, call.padding_idx.value_or(kNoPadding)};
  const LinearShape shape{call.B, call.T, call.d, call.p};
  add_integers<F>(call.a, call.g, call.factors, shape, table, call.out, threads);
}

// errors[b]: at least the norm of the difference between the gradient that is truncated and the one
// in real arithmetic.
template <class F>
void linear_sum_error(const LinearSumError<F>& call, int threads) {
  bound_errors(call.a, call.g, shape_of(call), Table<F>{}, call.errors, threads);
}

template <class F>
void tied_sum_error(const TiedSumError<F>& call, int threads) {
  const Table<F> table{call.ids, call.e, call.S, call.padding_idx.value_or(kNoPadding)};
  bound_errors(call.a, call.g, {call.B, call.T, call.D, call.V}, table, call.errors, threads);
}

template void linear_integer_sum<float>(const LinearIntegerSum<float>&, int);
template void linear_integer_sum<double>(const LinearIntegerSum<double>&, int);
template void linear_integer_norm<float>(const LinearIntegerNorm<float>&, int);
template void linear_integer_norm<double>(const LinearIntegerNorm<double>&, int);
template void tied_integer_sum<float>(const TiedIntegerSum<float>&, int);
template void tied_integer_sum<double>(const TiedIntegerSum<double>&, int);
template void linear_sum_error<float>(const LinearSumError<float>&, int);
template void linear_sum_error<double>(const LinearSumError<double>&, int);
template void tied_sum_error<float>(const TiedSumError<float>&, int);
template void tied_sum_error<double>(const TiedSumError<double>&, int);

}  // namespace dpkern::cpu
