// Recurrent layers backwards. At each time step a cell turns the gradient by its new state into
// those by its products, `d` (and for GRUs `e`, by the products with the state); one product with
// the weights leads these back to the state before and, where wanted, to the input.

#include "cpu/ops.h"
#include "cpu/recurrent.h"
#include "cpu/recurrent_math.h"

namespace dpkern::cpu {
namespace {

using namespace recurrent;

// A layer's sizes and tensors that every cell has.
template <class F>
struct Layer {
  const F *w_ih, *w_hh, *gy, *gh;
  bool reverse;
  F *dx, *dh;
  std::int64_t batch, steps, inputs, hidden;
};
template <class F, class Call>
Layer<F> layer_of(const Call& call) {
  return {call.w_ih, call.w_hh, call.gy, call.gh, call.reverse, call.dx,
          call.dh,   call.B,    call.T,  call.D,  call.H};
}

// Where a vector of hidden units of one sample stands at one time step. Rows are those of [B, T,
// .]; the steps before the first and after the last one have row -1.
struct Place {
  std::int64_t sample, row, row_before, row_after;
  std::int64_t at, used, hidden;
};

// A row of [B, T, H], or, where it is -1, the sample's row of [B, H].
template <class V, int kLanes, class F>
DPK_INLINE inline V state_at(std::int64_t row, const F* states, const F* border,
                             const Place& place) {
  const F* const from =
      row < 0 ? border + place.sample * place.hidden : states + row * place.hidden;
  return load_part<V, kLanes>(from + place.at, place.used);
}

// Block `block` of kBlocks: into a result [B, T, blocks H], its sums [B, blocks H].
template <int kBlocks, int kLanes, class V, class F>
DPK_INLINE inline void keep(F* d, F* sums, const Place& place, int block, V value) {
  const std::int64_t at = block * place.hidden + place.at;
  store_part<kLanes>(d + place.row * kBlocks * place.hidden + at, value, place.used);
  F* const sum = sums + place.sample * kBlocks * place.hidden + at;
  store_part<kLanes>(sum, load_part<V, kLanes>(sum, place.used) + value, place.used);
}

// A cell puts its gradients behind each other into a row of `left`: of kLeft blocks of hidden units
// those from kState on, as many as weights have, meet w_hh, those from kInput on w_ih. `kOrder` is
// the block of weights that the first of them meets. It returns what of the gradient by the new
// state belongs to the old one as it is (kCarries), and may keep a second gradient.
template <class F>
struct LstmCell {
  static constexpr int kBlocks = 4, kLeft = 4, kInput = 0, kFirst = 0;
  static constexpr bool kCarries = false;
  const F *gates, *cells, *c;
  F *d, *sums;

  template <int kLanes, class V>
  DPK_INLINE V back(V dh, F* kept, F* left, const Place& p) const {
    const F* const from = gates + p.row * 4 * p.hidden + p.at;
    const V i = load_part<V, kLanes>(from, p.used);
    const V f = load_part<V, kLanes>(from + p.hidden, p.used);
    const V g = load_part<V, kLanes>(from + 2 * p.hidden, p.used);
    const V o = load_part<V, kLanes>(from + 3 * p.hidden, p.used);
    const V state = load_part<V, kLanes>(cells + p.row * p.hidden + p.at, p.used);
    const V tanh_c = Functions<F, kLanes>::tanh(state);
    const V dc = load<V>(kept) + dh * o * (1 - tanh_c * tanh_c);
    const V of[kBlocks] = {dc * g * (i * (1 - i)),
                           dc * state_at<V, kLanes>(p.row_before, cells, c, p) * (f * (1 - f)),
                           dc * i * (1 - g * g), dh * tanh_c * (o * (1 - o))};
#pragma GCC unroll 4
    for (int block = 0; block < kBlocks; ++block) {
      keep<kBlocks, kLanes>(d, sums, p, block, of[block]);
      store_part<kLanes>(left + block * p.hidden + p.at, of[block], p.used);
    }
    const V carried = dc * f;
    __builtin_memcpy(kept, &carried, sizeof(V));
    return V{};
  }
};

template <class F>
struct GruCell {
  static constexpr int kBlocks = 3, kLeft = 4, kInput = 1, kFirst = 2;
  static constexpr bool kCarries = true;
  const F *gates, *before;
  F *d, *e, *sums_d, *sums_e;

  template <int kLanes, class V>
  DPK_INLINE V back(V dh, F*, F* left, const Place& p) const {
    const F* const from = gates + p.row * 4 * p.hidden + p.at;
    const V r = load_part<V, kLanes>(from, p.used);
    const V z = load_part<V, kLanes>(from + p.hidden, p.used);
    const V n = load_part<V, kLanes>(from + 2 * p.hidden, p.used);
    const V v_n = load_part<V, kLanes>(from + 3 * p.hidden, p.used);
    const V d_n = dh * (1 - z) * (1 - n * n);
    const V d_z =
        dh * (load_part<V, kLanes>(before + p.row * p.hidden + p.at, p.used) - n) * (z * (1 - z));
    const V d_r = d_n * v_n * (r * (1 - r)), e_n = d_n * r;
    const V of[kLeft] = {e_n, d_r, d_z, d_n};
#pragma GCC unroll 4
    for (int block = 0; block < kLeft; ++block) {
      if (block > 0) keep<kBlocks, kLanes>(d, sums_d, p, block - 1, of[block]);
      if (block < 3) keep<kBlocks, kLanes>(e, sums_e, p, (block + 2) % 3, of[block]);
      store_part<kLanes>(left + block * p.hidden + p.at, of[block], p.used);
    }
    return dh * z;
  }
};

template <class F>
struct RnnCell {
  static constexpr int kBlocks = 1, kLeft = 1, kInput = 0, kFirst = 0;
  static constexpr bool kCarries = false;
  Nonlinearity nonlinearity;
  const F *before, *last;
  F *d, *sums;

  template <int kLanes, class V>
  DPK_INLINE V back(V dh, F*, F* left, const Place& p) const {
    const V state = state_at<V, kLanes>(p.row_after, before, last, p);
    const V slope = state > 0 ? V{} + 1 : V{};
    const V by = dh * (nonlinearity == Nonlinearity::kTanh ? 1 - state * state : slope);
    keep<kBlocks, kLanes>(d, sums, p, 0, by);
    store_part<kLanes>(left + p.at, by, p.used);
    return V{};
  }
};

// Weights as panels [blocks H, kColumns] of their columns, rows from block `first` on, round.
template <class F, int kBytes>
struct Packed {
  static constexpr int kColumns = Strips<F, kBytes>::kColumns;
  std::int64_t steps;
  F* panels;

  static std::int64_t size(std::int64_t steps, std::int64_t columns) {
    return steps * round_up(columns, kColumns);
  }
  DPK_INLINE void pack(const F* weights, std::int64_t columns, std::int64_t first_row) const {
    const std::int64_t rest = steps - first_row;
    for (std::int64_t column = 0; column < columns; column += kColumns) {
      const std::int64_t wide = std::min<std::int64_t>(kColumns, columns - column);
      F* const to = panels + column * steps;
      ghost::pack_panels<kColumns>(weights + first_row * columns + column, rest, wide, columns,
                                   F{1}, to, 0);
      ghost::pack_panels<kColumns>(weights + column, first_row, wide, columns, F{1},
                                   to + rest * kColumns, 0);
    }
  }
  const F* panel(std::int64_t column) const { return panels + column * steps; }
};

// All time steps of a range of samples, from the last to the first.
template <class Cell, class F, int kBytes>
DPK_INLINE inline void run(const Layer<F>& layer, const Cell& cell,
                           const Packed<F, kBytes>& to_state, const Packed<F, kBytes>& to_input,
                           const F* gc, F* dc, Range samples) {
  using S = Strips<F, kBytes>;
  using V = typename S::V;
  constexpr int kLanes = S::kLanes, kColumns = S::kColumns;
  const std::int64_t count = samples.end - samples.begin, rows = S::rows_for(count);
  const std::int64_t inputs = layer.inputs, hidden = layer.hidden;
  const std::int64_t row = padded_row<kColumns>(Cell::kLeft * hidden);
  const std::int64_t state_row = padded_row<kColumns>(hidden);
  F* const left = scratch<F, kStates>(rows * row);
  F* const state = scratch<F, kCells>(2 * rows * state_row);  // gradients by h, then by c
  F* const kept = state + rows * state_row;
  F* const sums = scratch<F, kSums>(rows * kColumns);
  std::fill_n(left, rows * row, F{0});
  std::fill_n(state, 2 * rows * state_row, F{0});
  for (std::int64_t b = 0; b < count; ++b) {
    const std::int64_t from = (samples.begin + b) * hidden;
    if (layer.gh != nullptr) {
      std::copy(layer.gh + from, layer.gh + from + hidden, state + b * state_row);
    }
    if (gc != nullptr) std::copy(gc + from, gc + from + hidden, kept + b * state_row);
  }
  for (std::int64_t s = layer.steps - 1; s >= 0; --s) {
    const std::int64_t t = time_of(s, layer.steps, layer.reverse);
    for (std::int64_t b = 0; b < count; ++b) {
      const std::int64_t at_t = (samples.begin + b) * layer.steps + t;
      const std::int64_t forth = layer.reverse ? -1 : 1;
      Place place{samples.begin + b,
                  at_t,
                  s > 0 ? at_t - forth : -1,
                  s + 1 < layer.steps ? at_t + forth : -1,
                  0,
                  0,
                  hidden};
      F* const by_state = state + b * state_row;
      for (std::int64_t at = 0; at < hidden; at += kLanes) {
        place.at = at, place.used = hidden - at;
        V dh = load<V>(by_state + at);
        if (layer.gy != nullptr) {
          dh += load_part<V, kLanes>(layer.gy + place.row * hidden + at, place.used);
        }
        const V carried =
            cell.template back<kLanes, V>(dh, kept + b * state_row + at, left + b * row, place);
        __builtin_memcpy(by_state + at, &carried, sizeof(V));
      }
    }
    for (std::int64_t column = 0; column < hidden; column += kColumns) {
      S::template multiply<Cell::kCarries>(left, row, rows, to_state.panel(column), to_state.steps,
                                           state + column, state_row);
    }
    for (std::int64_t column = 0; column < inputs; column += kColumns) {
      S::template multiply<false>(left + Cell::kInput * hidden, row, rows, to_input.panel(column),
                                  to_input.steps, sums, kColumns);
      const std::int64_t wide = std::min<std::int64_t>(kColumns, inputs - column);
      for (std::int64_t b = 0; b < count; ++b) {
        F* const dx = layer.dx + ((samples.begin + b) * layer.steps + t) * inputs + column;
        std::copy(sums + b * kColumns, sums + b * kColumns + wide, dx);
      }
    }
  }
  for (std::int64_t b = 0; b < count; ++b) {
    const std::int64_t to = (samples.begin + b) * hidden;
    std::copy(state + b * state_row, state + b * state_row + hidden, layer.dh + to);
    if (dc != nullptr) std::copy(kept + b * state_row, kept + b * state_row + hidden, dc + to);
  }
}

template <class F, class Cell>
void backward(const Layer<F>& layer, const Cell& cell, const F* gc, F* dc, int threads) {
  const std::int64_t steps = Cell::kBlocks * layer.hidden;
  versioned_by_width([&](auto width) DPK_INLINE {
    constexpr int kBytes = decltype(width)::value;
    using Weights = Packed<F, kBytes>;
    const std::int64_t first = Weights::size(steps, layer.hidden);
    F* const panels = scratch<F, kPanels>(first + Weights::size(steps, layer.inputs));
    const Weights to_state{steps, panels}, to_input{steps, panels + first};
    to_state.pack(layer.w_hh, layer.hidden, Cell::kFirst * layer.hidden);
    to_input.pack(layer.w_ih, layer.inputs, 0);
    const std::int64_t each = steps * (layer.hidden + layer.inputs);
    for_samples(layer.batch, layer.batch * layer.steps * each, threads, [&](Range samples) {
      versioned_by_width([&](auto same) DPK_INLINE {
        if constexpr (decltype(same)::value == kBytes) {
          run(layer, cell, to_state, to_input, gc, dc, samples);
        }
      });
    });
  });
}

}  // namespace

template <class F>
void lstm_backward(const LstmBackward<F>& call, int threads) {
  std::fill_n(call.sums, call.B * call.G, F{0});
  const LstmCell<F> cell{call.gates, call.cells, call.c, call.d, call.sums};
  backward(layer_of<F>(call), cell, call.gc, call.dc, threads);
}
template <class F>
void gru_backward(const GruBackward<F>& call, int threads) {
  std::fill_n(call.sums_d, call.B * call.G, F{0});
  std::fill_n(call.sums_e, call.B * call.G, F{0});
  const GruCell<F> cell{call.gates, call.before, call.d, call.e, call.sums_d, call.sums_e};
  backward(layer_of<F>(call), cell, static_cast<const F*>(nullptr), static_cast<F*>(nullptr),
           threads);
}
template <class F>
void rnn_backward(const RnnBackward<F>& call, int threads) {
  std::fill_n(call.sums, call.B * call.H, F{0});
  const RnnCell<F> cell{call.nonlinearity, call.before, call.last, call.d, call.sums};
  backward(layer_of<F>(call), cell, static_cast<const F*>(nullptr), static_cast<F*>(nullptr),
           threads);
}

template void lstm_backward<float>(const LstmBackward<float>&, int);
template void lstm_backward<double>(const LstmBackward<double>&, int);
template void gru_backward<float>(const GruBackward<float>&, int);
template void gru_backward<double>(const GruBackward<double>&, int);
template void rnn_backward<float>(const RnnBackward<float>&, int);
template void rnn_backward<double>(const RnnBackward<double>&, int);

}  // namespace dpkern::cpu
