// Recurrent layers over odd sizes and offsets: near a plain double computation, the same bits for
// every number of threads.

#include <cmath>
#include <map>
#include <random>
#include <type_traits>

#include "check.h"
#include "cpu/ops.h"

namespace dpkern::test {
namespace {

using Size = std::int64_t;
using Reals = std::vector<double>;

template <class F>
constexpr double kRounding = std::is_same_v<F, float> ? 2e-5 : 1e-13;

enum class Kind { kLstm, kGru, kTanh, kRelu };

struct Sizes {
  Kind kind;
  bool reverse;
  Size batch, steps, inputs, hidden;
  Size blocks() const { return kind == Kind::kLstm ? 4 : kind == Kind::kGru ? 3 : 1; }
  bool gated() const { return blocks() > 1; }
  Size time(Size s) const { return reverse ? steps - 1 - s : s; }
};

std::size_t at(Size i) { return static_cast<std::size_t>(i); }
double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// Arguments of one layer; what does not belong to its kind is not used.
template <class F>
struct Given {
  std::vector<F> x, h, c, w_ih, w_hh, b_ih, b_hh, gy, gh, gc;
};
// Results of both passes.
template <class T>
struct Made {
  std::vector<T> y, before, gates, cells, d, e, sums, sums_e, dx, dh, dc;

  explicit Made(const Sizes& n)
      : y(at(n.batch * n.steps * n.hidden)),
        before(y.size()),
        gates(n.gated() ? 4 * y.size() : 0),
        cells(y.size()),
        d(y.size() * at(n.blocks())),
        e(d.size()),
        sums(at(n.batch * n.hidden * n.blocks())),
        sums_e(sums.size()),
        dx(at(n.batch * n.steps * n.inputs)),
        dh(at(n.batch * n.hidden)),
        dc(dh.size()) {}
  std::vector<T> all() const {
    std::vector<T> joined;
    for (const auto* part : {&y, &before, &gates, &cells, &d, &e, &sums, &sums_e, &dx, &dh, &dc}) {
      joined.insert(joined.end(), part->begin(), part->end());
    }
    return joined;
  }
};

template <class F>
Given<F> random_layer(const Sizes& n) {
  std::mt19937 random(7);
  std::normal_distribution<double> normal(0, 1);
  const auto draw = [&](Size count, double scale) {
    std::vector<F> values(at(count));
    for (F& value : values) value = static_cast<F>(scale * normal(random));
    return values;
  };
  const Size rows = n.blocks() * n.hidden, states = n.batch * n.hidden;
  const double small = 1 / std::sqrt(static_cast<double>(n.hidden));
  return {draw(n.batch * n.steps * n.inputs, 1),
          draw(states, 1),
          draw(states, 1),
          draw(rows * n.inputs, small),
          draw(rows * n.hidden, small),
          draw(rows, small),
          draw(rows, small),
          draw(states * n.steps, 1),
          draw(states, 1),
          draw(states, 1)};
}

// One sample by the formulas, in double.
template <class F>
void run_sample(const Sizes& n, const Given<F>& given, Size b, Made<double>& made) {
  const Size hidden = n.hidden, rows = n.blocks() * hidden;
  const auto entry = [](const std::vector<F>& v, Size i) { return static_cast<double>(v[at(i)]); };
  Reals h(at(hidden)), c(at(hidden));
  for (Size j = 0; j < hidden; ++j) h[at(j)] = entry(given.h, b * hidden + j);
  for (Size j = 0; j < hidden; ++j) c[at(j)] = entry(given.c, b * hidden + j);
  const Reals start_c = c;
  for (Size s = 0; s < n.steps; ++s) {
    const Size row = b * n.steps + n.time(s);
    Reals from_x(at(rows)), from_h(at(rows));
    for (Size r = 0; r < rows; ++r) {
      from_x[at(r)] = entry(given.b_ih, r), from_h[at(r)] = entry(given.b_hh, r);
      for (Size k = 0; k < n.inputs; ++k) {
        from_x[at(r)] += entry(given.w_ih, r * n.inputs + k) * entry(given.x, row * n.inputs + k);
      }
      for (Size k = 0; k < hidden; ++k) {
        from_h[at(r)] += entry(given.w_hh, r * hidden + k) * h[at(k)];
      }
    }
    Reals next(at(hidden));
    for (Size j = 0; j < hidden; ++j) {
      const auto total = [&](Size block) {
        return from_x[at(block * hidden + j)] + from_h[at(block * hidden + j)];
      };
      double* const gates = made.gates.data() + row * 4 * hidden + j;
      if (n.kind == Kind::kLstm) {
        gates[0] = sigmoid(total(0)), gates[hidden] = sigmoid(total(1));
        gates[2 * hidden] = std::tanh(total(2)), gates[3 * hidden] = sigmoid(total(3));
        c[at(j)] = gates[hidden] * c[at(j)] + gates[0] * gates[2 * hidden];
        made.cells[at(row * hidden + j)] = c[at(j)];
        next[at(j)] = gates[3 * hidden] * std::tanh(c[at(j)]);
      } else if (n.kind == Kind::kGru) {
        const double v_n = from_h[at(2 * hidden + j)];
        gates[0] = sigmoid(total(0)), gates[hidden] = sigmoid(total(1));
        gates[2 * hidden] = std::tanh(from_x[at(2 * hidden + j)] + gates[0] * v_n);
        gates[3 * hidden] = v_n;
        next[at(j)] = (1 - gates[hidden]) * gates[2 * hidden] + gates[hidden] * h[at(j)];
      } else {
        next[at(j)] = n.kind == Kind::kTanh ? std::tanh(total(0)) : std::fmax(total(0), 0);
      }
      made.before[at(row * hidden + j)] = h[at(j)];
      made.y[at(row * hidden + j)] = next[at(j)];
    }
    h = next;
  }
  Reals dh(at(hidden)), dc(at(hidden));
  for (Size j = 0; j < hidden; ++j) dh[at(j)] = entry(given.gh, b * hidden + j);
  for (Size j = 0; j < hidden; ++j) dc[at(j)] = entry(given.gc, b * hidden + j);
  for (Size s = n.steps - 1; s >= 0; --s) {
    const Size row = b * n.steps + n.time(s);
    double* const d = made.d.data() + row * rows;
    double* const e = made.e.data() + row * rows;
    for (Size j = 0; j < hidden; ++j) {
      const double g = dh[at(j)] + entry(given.gy, row * hidden + j);
      const double* const gates = made.gates.data() + row * 4 * hidden + j;
      double carried = 0;
      if (n.kind == Kind::kLstm) {
        const double i = gates[0], f = gates[hidden], u = gates[2 * hidden], o = gates[3 * hidden];
        const double tanh_c = std::tanh(made.cells[at(row * hidden + j)]);
        const double before =
            s == 0 ? start_c[at(j)] : made.cells[at((b * n.steps + n.time(s - 1)) * hidden + j)];
        const double by_c = dc[at(j)] + g * o * (1 - tanh_c * tanh_c);
        d[j] = by_c * u * i * (1 - i), d[hidden + j] = by_c * before * f * (1 - f);
        d[2 * hidden + j] = by_c * i * (1 - u * u);
        d[3 * hidden + j] = g * tanh_c * o * (1 - o);
        dc[at(j)] = by_c * f;
      } else if (n.kind == Kind::kGru) {
        const double r = gates[0], z = gates[hidden], u = gates[2 * hidden];
        const double by_n = g * (1 - z) * (1 - u * u);
        d[j] = e[j] = by_n * gates[3 * hidden] * r * (1 - r);
        d[hidden + j] = e[hidden + j] = g * (made.before[at(row * hidden + j)] - u) * z * (1 - z);
        d[2 * hidden + j] = by_n, e[2 * hidden + j] = by_n * r;
        carried = g * z;
      } else {
        const double y = made.y[at(row * hidden + j)];
        d[j] = g * (n.kind == Kind::kTanh ? 1 - y * y : static_cast<double>(y > 0));
      }
      dh[at(j)] = carried;
    }
    const double* const by_state = n.kind == Kind::kGru ? e : d;
    for (Size r = 0; r < rows; ++r) {
      made.sums[at(b * rows + r)] += d[r];
      if (n.kind == Kind::kGru) made.sums_e[at(b * rows + r)] += e[r];
      for (Size k = 0; k < hidden; ++k) {
        dh[at(k)] += by_state[r] * entry(given.w_hh, r * hidden + k);
      }
      for (Size k = 0; k < n.inputs; ++k) {
        made.dx[at(row * n.inputs + k)] += d[r] * entry(given.w_ih, r * n.inputs + k);
      }
    }
  }
  std::copy(dh.begin(), dh.end(), made.dh.begin() + b * hidden);
  if (n.kind == Kind::kLstm) std::copy(dc.begin(), dc.end(), made.dc.begin() + b * hidden);
}

template <class F>
Made<F> run_kernels(const Sizes& n, const Given<F>& given, int threads) {
  Made<F> made(n);
  Shifted<F> x(given.x, 1), h(given.h, 3), c(given.c, 1), w_ih(given.w_ih, 1), w_hh(given.w_hh, 2);
  Shifted<F> b_ih(given.b_ih, 1), b_hh(given.b_hh, 1), gy(given.gy, 1), gh(given.gh, 3);
  Shifted<F> gc(given.gc, 1);
  Shifted<F> y(made.y, 1), before(made.before, 1), gates(made.gates, 3), cells(made.cells, 1);
  Shifted<F> d(made.d, 1), e(made.e, 3), sums(made.sums, 1), sums_e(made.sums_e, 1);
  Shifted<F> dx(made.dx, 1), dh(made.dh, 1), dc(made.dc, 2);
  const Size rows = n.blocks() * n.hidden;
  const cpu::Nonlinearity function =
      n.kind == Kind::kTanh ? cpu::Nonlinearity::kTanh : cpu::Nonlinearity::kRelu;
  if (n.kind == Kind::kLstm) {
    cpu::lstm<F>({x.data(), h.data(), c.data(), w_ih.data(), w_hh.data(), b_ih.data(), b_hh.data(),
                  n.reverse, y.data(), before.data(), gates.data(), cells.data(), n.batch, n.steps,
                  n.inputs, n.hidden, rows},
                 threads);
    cpu::lstm_backward<F>(
        {gates.data(), cells.data(), c.data(), w_ih.data(), w_hh.data(), gy.data(), gh.data(),
         gc.data(), n.reverse, d.data(), sums.data(), dx.data(), dh.data(), dc.data(), n.batch,
         n.steps, rows, n.hidden, n.inputs},
        threads);
  } else if (n.kind == Kind::kGru) {
    cpu::gru<F>({x.data(), h.data(), w_ih.data(), w_hh.data(), b_ih.data(), b_hh.data(), n.reverse,
                 y.data(), before.data(), gates.data(), n.batch, n.steps, n.inputs, n.hidden, rows},
                threads);
    cpu::gru_backward<F>(
        {gates.data(), before.data(), w_ih.data(), w_hh.data(), gy.data(), gh.data(), n.reverse,
         d.data(), e.data(), sums.data(), sums_e.data(), dx.data(), dh.data(), n.batch, n.steps,
         4 * n.hidden, n.hidden, rows, n.inputs},
        threads);
  } else {
    cpu::rnn<F>({x.data(), h.data(), w_ih.data(), w_hh.data(), b_ih.data(), b_hh.data(), function,
                 n.reverse, y.data(), before.data(), n.batch, n.steps, n.inputs, n.hidden},
                threads);
    std::vector<F> last(at(n.batch * n.hidden));
    for (Size b = 0; b < n.batch; ++b) {
      const F* const row = y.data() + (b * n.steps + n.time(n.steps - 1)) * n.hidden;
      std::copy(row, row + n.hidden, last.begin() + b * n.hidden);
    }
    cpu::rnn_backward<F>({before.data(), last.data(), w_ih.data(), w_hh.data(), gy.data(),
                          gh.data(), function, n.reverse, d.data(), sums.data(), dx.data(),
                          dh.data(), n.batch, n.steps, n.hidden, n.inputs},
                         threads);
  }
  made.y = y.values(), made.before = before.values(), made.gates = gates.values();
  made.cells = cells.values(), made.d = d.values(), made.e = e.values();
  made.sums = sums.values(), made.sums_e = sums_e.values(), made.dx = dx.values();
  made.dh = dh.values(), made.dc = dc.values();
  return made;
}

template <class F>
Size test_layer(const Sizes& n) {
  const Given<F> given = random_layer<F>(n);
  Made<double> wanted(n);
  for (Size b = 0; b < n.batch; ++b) run_sample(n, given, b, wanted);
  const Reals want = wanted.all();
  Size cases = 0;
  std::map<cpu::Isa, std::vector<F>> first;
  for_every_setting([&](int threads, const std::string& setting) {
    const std::vector<F> got = run_kernels(n, given, threads).all();
    for (std::size_t i = 0; i < got.size(); ++i) {
      const double off = std::fabs(static_cast<double>(got[i]) - want[i]);
      check(off <= kRounding<F> * (10 + std::fabs(want[i])),
            "recurrent" + setting + ": element " + std::to_string(i));
    }
    const auto seen = first.emplace(cpu::isa(), got).first;
    check_same(got, seen->second, "recurrent" + setting);
    ++cases;
  });
  return cases;
}

template <class F>
Size test_type() {
  Size cases = 0;
  for (const Kind kind : {Kind::kLstm, Kind::kGru, Kind::kTanh, Kind::kRelu}) {
    for (const bool reverse : {false, true}) {
      for (const Size hidden : {1, 7, 16, 37})
        cases += test_layer<F>({kind, reverse, 3, 4, 5, hidden});
      cases +=
          test_layer<F>({kind, reverse, 0, 4, 5, 3}) + test_layer<F>({kind, reverse, 55, 3, 1, 9});
      cases += test_layer<F>({kind, reverse, 2, 3, 0, 9}) +
               test_layer<F>({kind, reverse, 21, 2, 33, 33});
    }
  }
  return cases;
}

}  // namespace

std::int64_t test_recurrent() { return test_type<float>() + test_type<double>(); }

}  // namespace dpkern::test
