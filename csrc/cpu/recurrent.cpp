// Recurrent layers forwards. Each time step is one product of [x_t, h_(t-1)] with all weights, a
// block of hidden units at a time; what follows from it is computed while it is in the cache.

#include "cpu/recurrent.h"

#include "cpu/ops.h"
#include "cpu/recurrent_math.h"

namespace dpkern::cpu {
namespace {

using namespace recurrent;

// A layer's sizes and tensors that every cell has.
template <class F>
struct Layer {
  const F *x, *h, *w_ih, *w_hh, *b_ih, *b_hh;
  bool reverse;
  F *y, *before;
  std::int64_t batch, steps, inputs, hidden;
};
template <class F, class Call>
Layer<F> layer_of(const Call& call) {
  return {call.x, call.h,      call.w_ih, call.w_hh, call.b_ih, call.b_hh, call.reverse,
          call.y, call.before, call.B,    call.T,    call.D,    call.H};
}

// A cell computes one vector of hidden units of one row: from its products and the state before to
// the state behind, and stores what the way back needs. There is one product of [x, h] for each of
// kGates blocks of weight rows; where kSplit, the last block makes two, one of x and one of h.
// `kept`: a second state, which only LSTMs have. `at`: the first of these units, `used`: how many
// there are from it on.
template <class F>
struct LstmCell {
  static constexpr int kGates = 4, kProducts = 4;
  static constexpr bool kSplit = false;
  F *gates, *cells;
  const F* c;

  template <int kLanes, class V>
  DPK_INLINE V next(const V* s, V, F* kept, std::int64_t time_row, std::int64_t at,
                    std::int64_t used, std::int64_t hidden) const {
    using Math = Functions<F, kLanes>;
    const V i = Math::sigmoid(s[0]), f = Math::sigmoid(s[1]);
    const V g = Math::tanh(s[2]), o = Math::sigmoid(s[3]);
    const V state = f * load<V>(kept) + i * g;
    __builtin_memcpy(kept, &state, sizeof(V));
    F* const to = gates + time_row * 4 * hidden + at;
    store_part<kLanes>(to, i, used), store_part<kLanes>(to + hidden, f, used);
    store_part<kLanes>(to + 2 * hidden, g, used), store_part<kLanes>(to + 3 * hidden, o, used);
    store_part<kLanes>(cells + time_row * hidden + at, state, used);
    return o * Math::tanh(state);
  }
  const F* kept_from() const { return c; }
};

template <class F>
struct GruCell {
  static constexpr int kGates = 3, kProducts = 4;
  static constexpr bool kSplit = true;
  F* gates;

  template <int kLanes, class V>
  DPK_INLINE V next(const V* s, V h, F*, std::int64_t time_row, std::int64_t at, std::int64_t used,
                    std::int64_t hidden) const {
    using Math = Functions<F, kLanes>;
    const V r = Math::sigmoid(s[0]), z = Math::sigmoid(s[1]);
    const V n = Math::tanh(s[2] + r * s[3]);
    F* const to = gates + time_row * 4 * hidden + at;
    store_part<kLanes>(to, r, used), store_part<kLanes>(to + hidden, z, used);
    store_part<kLanes>(to + 2 * hidden, n, used), store_part<kLanes>(to + 3 * hidden, s[3], used);
    return (1 - z) * n + z * h;
  }
  const F* kept_from() const { return nullptr; }
};

template <class F>
struct RnnCell {
  static constexpr int kGates = 1, kProducts = 1;
  static constexpr bool kSplit = false;
  Nonlinearity nonlinearity;

  template <int kLanes, class V>
  DPK_INLINE V next(const V* s, V, F*, std::int64_t, std::int64_t, std::int64_t,
                    std::int64_t) const {
    if (nonlinearity == Nonlinearity::kTanh) return Functions<F, kLanes>::tanh(s[0]);
    return s[0] <= 0 ? V{} : s[0];  // NaN stays
  }
  const F* kept_from() const { return nullptr; }
};

// The weights of kColumns hidden units behind each other: for each gate a panel of rows
// [inputs + hidden, kColumns]; and the biases of each product.
template <class Cell, class F, int kBytes>
struct Packed {
  using S = Strips<F, kBytes>;
  static constexpr int kColumns = S::kColumns;
  const Layer<F>& layer;
  F *panels, *biases;

  std::int64_t inner() const { return layer.inputs + layer.hidden; }
  std::int64_t blocks() const { return (layer.hidden + kColumns - 1) / kColumns; }
  F* panel(std::int64_t block, int gate) const {
    return panels + (block * Cell::kGates + gate) * inner() * kColumns;
  }
  F* bias(std::int64_t block, int product) const {
    return biases + (block * Cell::kProducts + product) * kColumns;
  }
  void pack(std::int64_t block) const {
    for (int gate = 0; gate < Cell::kGates; ++gate) {
      F* const to = panel(block, gate);
      for (int column = 0; column < kColumns; ++column) {
        const std::int64_t unit = block * kColumns + column;
        const std::int64_t row = gate * layer.hidden + unit;
        const bool used = unit < layer.hidden;
        const F* const from_x = layer.w_ih + row * layer.inputs;
        const F* const from_h = layer.w_hh + row * layer.hidden;
        F* const to_h = to + layer.inputs * kColumns;
        for (std::int64_t k = 0; k < layer.inputs; ++k) {
          to[k * kColumns + column] = used ? from_x[k] : 0;
        }
        for (std::int64_t k = 0; k < layer.hidden; ++k) {
          to_h[k * kColumns + column] = used ? from_h[k] : 0;
        }
        const F b_ih = used && layer.b_ih != nullptr ? layer.b_ih[row] : 0;
        const F b_hh = used && layer.b_hh != nullptr ? layer.b_hh[row] : 0;
        const bool split = Cell::kSplit && gate == Cell::kGates - 1;
        bias(block, gate)[column] = split ? b_ih : b_ih + b_hh;
        if (split) bias(block, gate + 1)[column] = b_hh;
      }
    }
  }
};

// All time steps of a range of samples.
template <class Cell, class F, int kBytes>
DPK_INLINE inline void run(const Layer<F>& layer, const Cell& cell,
                           const Packed<Cell, F, kBytes>& packed, Range samples) {
  using S = Strips<F, kBytes>;
  using V = typename S::V;
  constexpr int kLanes = S::kLanes, kColumns = S::kColumns;
  const std::int64_t count = samples.end - samples.begin, rows = S::rows_for(count);
  const std::int64_t inputs = layer.inputs, hidden = layer.hidden, inner = packed.inner();
  const std::int64_t row = padded_row<kColumns>(inner), kept_row = padded_row<kColumns>(hidden);
  F* now = scratch<F, kStates>(2 * rows * row);
  F* next = now + rows * row;
  F* const sums = scratch<F, kSums>(Cell::kProducts * rows * kColumns);
  F* const kept = scratch<F, kCells>(count * kept_row);
  std::fill_n(now, 2 * rows * row, F{0});
  for (std::int64_t b = 0; b < count; ++b) {
    const F* const h = layer.h + (samples.begin + b) * hidden;
    std::copy(h, h + hidden, now + b * row + inputs);
    if (cell.kept_from() == nullptr) continue;
    const F* const c = cell.kept_from() + (samples.begin + b) * hidden;
    std::copy(c, c + hidden, kept + b * kept_row);
  }
  for (std::int64_t s = 0; s < layer.steps; ++s) {
    const std::int64_t t = time_of(s, layer.steps, layer.reverse);
    for (std::int64_t b = 0; b < count; ++b) {
      const F* const x = layer.x + ((samples.begin + b) * layer.steps + t) * inputs;
      std::copy(x, x + inputs, now + b * row);
    }
    for (std::int64_t block = 0; block < packed.blocks(); ++block) {
      for (int gate = 0; gate < Cell::kGates; ++gate) {
        const F* const panel = packed.panel(block, gate);
        F* const to = sums + gate * rows * kColumns;
        if (Cell::kSplit && gate == Cell::kGates - 1) {
          S::template multiply<false>(now, row, rows, panel, inputs, to, kColumns);
          S::template multiply<false>(now + inputs, row, rows, panel + inputs * kColumns, hidden,
                                      to + rows * kColumns, kColumns);
        } else {
          S::template multiply<false>(now, row, rows, panel, inner, to, kColumns);
        }
      }
      for (std::int64_t b = 0; b < count; ++b) {
        const std::int64_t time_row = (samples.begin + b) * layer.steps + t;
        for (int lane = 0; lane < kColumns; lane += kLanes) {
          const std::int64_t at = block * kColumns + lane, used = hidden - at;
          if (used <= 0) break;
          V total[Cell::kProducts];
#pragma GCC unroll 4
          for (int p = 0; p < Cell::kProducts; ++p) {
            total[p] = load<V>(sums + (p * rows + b) * kColumns + lane) +
                       load<V>(packed.bias(block, p) + lane);
          }
          F* const state = now + b * row + inputs + at;
          const V before = load<V>(state);
          const V h = cell.template next<kLanes, V>(total, before, kept + b * kept_row + at,
                                                    time_row, at, used, hidden);
          store_part<kLanes>(layer.before + time_row * hidden + at, before, used);
          __builtin_memcpy(next + b * row + inputs + at, &h, sizeof(V));
          store_part<kLanes>(layer.y + time_row * hidden + at, h, used);
        }
      }
    }
    std::swap(now, next);
  }
}

template <class F, class Cell>
void forward(const Layer<F>& layer, const Cell& cell, int threads) {
  if (layer.batch == 0 || layer.steps == 0 || layer.hidden == 0) return;
  versioned_by_width([&](auto width) DPK_INLINE {
    constexpr int kBytes = decltype(width)::value;
    using Weights = Packed<Cell, F, kBytes>;
    Weights packed{layer, nullptr, nullptr};
    const std::int64_t blocks = packed.blocks();
    packed.panels = scratch<F, kPanels>(blocks * Cell::kGates * packed.inner() * Weights::kColumns);
    packed.biases = scratch<F, kBiases>(blocks * Cell::kProducts * Weights::kColumns);
    for (std::int64_t block = 0; block < blocks; ++block) packed.pack(block);
    const std::int64_t each = Cell::kGates * packed.inner() * layer.hidden;
    for_samples(layer.batch, layer.batch * layer.steps * each, threads, [&](Range samples) {
      versioned_by_width([&](auto same) DPK_INLINE {
        if constexpr (decltype(same)::value == kBytes) run(layer, cell, packed, samples);
      });
    });
  });
}

}  // namespace

template <class F>
void lstm(const Lstm<F>& call, int threads) {
  forward(layer_of<F>(call), LstmCell<F>{call.gates, call.cells, call.c}, threads);
}
template <class F>
void gru(const Gru<F>& call, int threads) {
  forward(layer_of<F>(call), GruCell<F>{call.gates}, threads);
}
template <class F>
void rnn(const Rnn<F>& call, int threads) {
  forward(layer_of<F>(call), RnnCell<F>{call.nonlinearity}, threads);
}

template void lstm<float>(const Lstm<float>&, int);
template void lstm<double>(const Lstm<double>&, int);
template void gru<float>(const Gru<float>&, int);
template void gru<double>(const Gru<double>&, int);
template void rnn<float>(const Rnn<float>&, int);
template void rnn<double>(const Rnn<double>&, int);

}  // namespace dpkern::cpu
