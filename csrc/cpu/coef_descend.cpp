// SGD on the noisy polynomial loss of many small autoencoders, one record of each at every step.
//
// A vector holds one number of every feature: a run's weights stay in registers and the first-level
// cache from its first step to its last, and one run is as quick as one of a hundred.

#include <algorithm>
#include <cstddef>
#include <vector>

#include "core/coef.h"
#include "core/logistic.h"
#include "cpu/isa.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/tiles.h"

namespace dpkern::cpu {
namespace {

constexpr int kLanes = kLossLanes;
constexpr int kHalf = kLanes / 2;
constexpr std::int64_t kGrain = 512;  // visits worth a thread

// Features of one row, or of one column of weights.
template <class T>
struct alignas(kLanes * sizeof(T)) Lanes {
  T of[kLanes];
};

template <class T>
using Row = Vector<T, kLanes>;
template <class T>
using Half = Vector<T, kHalf>;

template <class V, class A>
DPK_INLINE inline V vector_at(const A* from) {
  V x;
  __builtin_memcpy(&x, from, sizeof x);
  return x;
}
template <class V, class A>
DPK_INLINE inline void put_vector(const V& x, A* to) {
  __builtin_memcpy(to, &x, sizeof x);
}

template <class V, class T, int N>
DPK_INLINE inline V sum_of_halves(const Vector<T, N>& x) {
  T lanes[N];
  put_vector(x, lanes);
  return vector_at<V>(lanes) + vector_at<V>(lanes + N / 2);
}

// The sum of all lanes, by halves.
template <class T>
DPK_INLINE inline T sum_of(const Half<T>& eight) {
  const auto four = sum_of_halves<Vector<T, 4>, T, 8>(eight);
  const auto two = sum_of_halves<Vector<T, 2>, T, 4>(four);
  return two[0] + two[1];
}

// Lane k: the sum of all lanes of vector k, by halves.
template <class T>
DPK_INLINE inline Half<T> sums_of(const Row<T> (&x)[kHalf]) {
  using Places = Vector<std::conditional_t<sizeof(T) == 4, std::int32_t, std::int64_t>, kHalf>;
  const auto eight = [&](int k) DPK_INLINE { return sum_of_halves<Half<T>, T, kLanes>(x[k]); };
  // Two vectors become one of half their lanes each.
  const auto fours = [&](const Half<T>& a, const Half<T>& b) DPK_INLINE {
    return __builtin_shuffle(a, b, Places{0, 1, 2, 3, 8, 9, 10, 11}) +
           __builtin_shuffle(a, b, Places{4, 5, 6, 7, 12, 13, 14, 15});
  };
  const auto twos = [&](const Half<T>& a, const Half<T>& b) DPK_INLINE {
    return __builtin_shuffle(a, b, Places{0, 1, 8, 9, 4, 5, 12, 13}) +
           __builtin_shuffle(a, b, Places{2, 3, 10, 11, 6, 7, 14, 15});
  };
  const Half<T> low = twos(fours(eight(0), eight(4)), fours(eight(1), eight(5)));
  const Half<T> high = twos(fours(eight(2), eight(6)), fours(eight(3), eight(7)));
  return __builtin_shuffle(low, high, Places{0, 2, 8, 10, 4, 6, 12, 14}) +
         __builtin_shuffle(low, high, Places{1, 3, 9, 11, 5, 7, 13, 15});
}

// Memory of one run, in lanes. Features and units that fill up the last vectors have weights 0.
template <class T>
struct Room {
  std::vector<Lanes<T>> encoder, decoder;  // [users, units, chunks]
  std::vector<Lanes<T>> inputs, logits;    // [users, chunks]
  std::vector<T> hidden;                   // [users, units]
};

// A run's memory as a kernel wants it, and sizes. `units` and `chunks` are those of the code and of
// the features in whole vectors.
template <class T>
struct Work {
  const Descend<T>& call;
  std::int64_t run;
  int units;
  int chunks;
  Lanes<T>* encoder;
  Lanes<T>* decoder;
  Lanes<T>* inputs;
  Lanes<T>* logits;
  T* hidden;
};

template <class T>
void copy_weights(const Work<T>& w, bool back) {
  const std::int64_t users = w.call.M, n = w.call.n, code = w.call.l;
  for (std::int64_t user = 0; user < users; ++user) {
    const std::int64_t pair = w.run * users + user;
    T* const first = w.call.encoder + pair * n * code;
    T* const second = w.call.decoder + pair * code * n;
    for (std::int64_t r = 0; r < code; ++r) {
      for (std::int64_t i = 0; i < n; ++i) {
        const std::int64_t at = (user * w.units + r) * w.chunks + i / kLanes;
        T& encoded = w.encoder[at].of[i % kLanes];
        T& decoded = w.decoder[at].of[i % kLanes];
        if (back) {
          first[i * code + r] = encoded;
          second[r * n + i] = decoded;
        } else {
          encoded = first[i * code + r];
          decoded = second[r * n + i];
        }
      }
    }
  }
}

// The first `count` lanes from an address, where a whole vector may reach behind the end.
template <class T>
DPK_INLINE inline const T* whole(const T* from, const T* end, int count, Lanes<T>& room) {
  if (end - from >= kLanes) return from;
  for (int i = 0; i < kLanes; ++i) room.of[i] = i < count ? from[i] : T{};
  return room.of;
}

// A thread's work on one run.
template <class T, bool kSmall>
class Run {
 public:
  using V = Row<T>;
  static constexpr int kGroup = kSmall ? kHalf : kLanes;  // units that are summed together

  DPK_INLINE explicit Run(const Work<T>& work)
      : w_(work),
        c_(work.call),
        n_(static_cast<int>(c_.n)),
        constant_(static_cast<T>(c_.constant)),
        scale_(static_cast<T>(c_.scale)),
        growth_(static_cast<T>(c_.growth)),
        limit_(static_cast<T>(c_.limit)),
        rate_(static_cast<T>(c_.lr)),
        per_unit_(1),
        cell_(1) {
    for (int i = 0; i < kLanes; ++i) place_[i] = static_cast<typename Places::Of>(i);
    if (c_.draws != nullptr) at_scale(c_.scale);
  }

  // Visit one record of every user; false: a logit lies beyond the limit, and nothing has changed.
  DPK_INLINE bool step(std::int64_t number) {
    typename Places::Type beyond{};
    for (int user = 0; user < static_cast<int>(c_.M); ++user) beyond |= forward(number, user);
    typename Places::Of lanes[kLanes], any = 0;
    put_vector(beyond, lanes);
    for (int i = 0; i < kLanes; ++i) any |= lanes[i];
    if (any != 0) return false;
    for (int user = 0; user < static_cast<int>(c_.M); ++user) backward(number, user);
    return true;
  }

 private:
  struct Places {
    using Of = std::conditional_t<sizeof(T) == 4, std::int32_t, std::int64_t>;
    using Type = Vector<Of, kLanes>;
  };

  DPK_INLINE int units() const { return kSmall ? kHalf : w_.units; }
  DPK_INLINE int chunks() const { return kSmall ? 1 : w_.chunks; }
  DPK_INLINE int valid(int chunk) const { return std::min(kLanes, n_ - chunk * kLanes); }
  DPK_INLINE V masked(const V& x, int count) const {
    return place_ < static_cast<typename Places::Of>(count) ? x : V{};
  }
  DPK_INLINE std::int64_t pair(int user) const { return w_.run * c_.M + user; }
  // A record's features in a table of rows, which is one for all runs or each run's own.
  DPK_INLINE V record(const T* table, std::int64_t tables, std::int64_t number, int user,
                      int chunk) const {
    const std::int64_t row = c_.order[(number * c_.R + w_.run) * c_.M + user];
    const std::int64_t first = (tables > 1 ? w_.run * c_.N : 0) + row;
    Lanes<T> room;
    const T* const from = table + first * c_.n + chunk * kLanes;
    const int count = valid(chunk);
    return masked(vector_at<V>(whole(from, table + tables * c_.N * c_.n, count, room)), count);
  }
  DPK_INLINE V input(std::int64_t number, int user, int chunk) const {
    V x = record(c_.inputs, c_.P, number, user, chunk);
    if (c_.added != nullptr) {
      const std::int64_t first = (number * c_.R * c_.M + pair(user)) * c_.n + chunk * kLanes;
      Lanes<T> room;
      const T* const end = c_.added + c_.S * c_.R * c_.M * c_.n;
      const int count = valid(chunk);
      x = x + masked(vector_at<V>(whole(c_.added + first, end, count, room)), count);
    }
    return x;
  }

  DPK_INLINE typename Places::Type forward(std::int64_t number, int user) const {
    const int many = chunks();
    const Lanes<T>* const encoder = w_.encoder + user * units() * many;
    const Lanes<T>* const decoder = w_.decoder + user * units() * many;
    Lanes<T>* const inputs = w_.inputs + user * many;
    T* const hidden = w_.hidden + user * units();
    for (int chunk = 0; chunk < many; ++chunk) {
      put_vector(input(number, user, chunk), inputs + chunk);
    }
    Half<T> low{}, high{};
    for (int first = 0; first < units(); first += kHalf) {
      Row<T> sums[kHalf];
      for (int k = 0; k < kHalf; ++k) {
        sums[k] = vector_at<V>(inputs) * vector_at<V>(encoder + (first + k) * many);
        for (int chunk = 1; chunk < many; ++chunk) {
          sums[k] = sums[k] + vector_at<V>(inputs + chunk) *
                                  vector_at<V>(encoder + (first + k) * many + chunk);
        }
      }
      const auto known = vector_at<Half<T>>(kUnitPlaces) < static_cast<T>(c_.l - first);
      const Half<T> h = known ? sigmoid<T>(sums_of<T>(sums)) : Half<T>{};
      put_vector(h, hidden + first);
      (first % kLanes == 0 ? low : high) += h;
    }
    const T shift = constant_ * sum_of<T>(low + high);
    typename Places::Type beyond{};
    for (int chunk = 0; chunk < many; ++chunk) {
      V sums[kGroup];
      for (int k = 0; k < kGroup; ++k)
        sums[k] = hidden[k] * vector_at<V>(decoder + k * many + chunk);
      for (int first = kGroup; first < units(); first += kGroup) {
        for (int k = 0; k < kGroup; ++k) {
          sums[k] =
              sums[k] + hidden[first + k] * vector_at<V>(decoder + (first + k) * many + chunk);
        }
      }
      for (int half = kGroup / 2; half > 0; half /= 2) {
        for (int k = 0; k < half; ++k) sums[k] = sums[k] + sums[k + half];
      }
      const V z = masked(sums[0] + shift, valid(chunk));
      const V size = z < 0 ? -z : z;
      beyond |= ~(size <= limit_);
      put_vector(z, w_.logits + user * many + chunk);
    }
    return beyond;
  }

  // Slopes of the loss by the logits.
  DPK_INLINE V slope(std::int64_t number, int user, int chunk, const V& z) const {
    const V x = record(c_.targets, c_.Q, number, user, chunk);
    Lanes<T> linear, quadratic;
    Lanes<T> targets;
    put_vector(x, &targets);
    for (int i = 0; i < kLanes; ++i) {
      linear.of[i] = linear_coefficient(targets.of[i]);
      quadratic.of[i] = quadratic_coefficient(targets.of[i], c_.form);
    }
    if (c_.draws != nullptr) {
      const std::int64_t part = c_.M * c_.n, all = 2 * c_.R * c_.S * part;
      const std::int64_t first = 2 * (w_.run * c_.S + number) * part + user * c_.n + chunk * kLanes;
      noise(linear, first, all, valid(chunk));
      noise(quadratic, first + part, all, valid(chunk));
    }
    const V a1 = vector_at<V>(&linear), a2 = vector_at<V>(&quadratic);
    return masked(quadratic_slope(a1, a2, z), valid(chunk));
  }
  DPK_INLINE void noise(Lanes<T>& values, std::int64_t first, std::int64_t all, int count) const {
    Lanes<std::int32_t> draw_room;
    Lanes<std::int16_t> bit_room;
    const std::int32_t* const draws = whole(c_.draws + first, c_.draws + all, count, draw_room);
    const std::int16_t* const bits = whole(c_.rounding + first, c_.rounding + all, count, bit_room);
    const T per_unit = per_unit_, cell = cell_;
    for (int i = 0; i < kLanes; ++i) {
      const std::uint32_t rounding = static_cast<std::uint16_t>(bits[i]);
      values.of[i] = noised_coefficient(values.of[i], per_unit, cell, rounding, draws[i]);
    }
  }
  DPK_INLINE void at_scale(double scale) {
    per_unit_ = per_unit_of<T>(scale);
    cell_ = cell_of<T>(scale);
  }

  DPK_INLINE void backward(std::int64_t number, int user) {
    const int many = chunks();
    Lanes<T>* const encoder = w_.encoder + user * units() * many;
    Lanes<T>* const decoder = w_.decoder + user * units() * many;
    const Lanes<T>* const inputs = w_.inputs + user * many;
    Lanes<T>* const slopes = w_.logits + user * many;
    const T* const hidden = w_.hidden + user * units();
    if (c_.draws != nullptr && growth_ > 0) {
      Half<T> low{}, high{};
      for (int first = 0; first < units(); first += kHalf) {
        (first % kLanes == 0 ? low : high) += vector_at<Half<T>>(hidden + first);
      }
      const T shift = constant_ * sum_of<T>(low + high);
      at_scale(static_cast<double>(scale_at(scale_, growth_, shift)));
    }
    V all{};
    for (int chunk = 0; chunk < many; ++chunk) {
      const V g = slope(number, user, chunk, vector_at<V>(slopes + chunk));
      put_vector(g, slopes + chunk);
      all = all + g;
    }
    const T moved = constant_ * sum_of<T>(sum_of_halves<Half<T>, T, kLanes>(all));
    for (int first = 0; first < units(); first += kHalf) {
      V sums[kHalf];
      for (int k = 0; k < kHalf; ++k) {
        sums[k] = vector_at<V>(slopes) * vector_at<V>(decoder + (first + k) * many);
        for (int chunk = 1; chunk < many; ++chunk) {
          sums[k] = sums[k] + vector_at<V>(slopes + chunk) *
                                  vector_at<V>(decoder + (first + k) * many + chunk);
        }
      }
      const auto h = vector_at<Half<T>>(hidden + first);
      const Half<T> code = (sums_of<T>(sums) + moved) * (h - h * h);
      T by_code[kHalf], by_hidden[kHalf];
      put_vector(code * rate_, by_code);
      put_vector(h * rate_, by_hidden);
      for (int k = 0; k < kHalf; ++k) {
        for (int chunk = 0; chunk < many; ++chunk) {
          const int at = (first + k) * many + chunk;
          const V x = vector_at<V>(inputs + chunk), g = vector_at<V>(slopes + chunk);
          put_vector(vector_at<V>(encoder + at) - x * by_code[k], encoder + at);
          put_vector(vector_at<V>(decoder + at) - g * by_hidden[k], decoder + at);
        }
      }
    }
  }

  static constexpr T kUnitPlaces[kHalf] = {0, 1, 2, 3, 4, 5, 6, 7};

  const Work<T> w_;
  const Descend<T>& c_;
  int n_;
  T constant_, scale_, growth_, limit_, rate_, per_unit_, cell_;
  typename Places::Type place_;
};

template <class T, bool kSmall>
void take_steps(const Work<T>& work) {
  bool stopped = false;
  versioned([&]() DPK_INLINE {
    Run<T, kSmall> run(work);
    const std::int64_t steps = work.call.S;
    bool going = true;
    for (std::int64_t number = 0; going && number < steps; ++number) going = run.step(number);
    stopped = !going;
  });
  if (stopped) work.call.stopped[work.run] = 1;
}

}  // namespace

template <class T>
void descend(const Descend<T>& call, int threads) {
  if (call.n == 0 || call.l == 0 || call.M == 0) return;
  const auto whole_of = [](std::int64_t n, int each) {
    return static_cast<int>((n + each - 1) / each) * each;
  };
  const bool small = call.n <= kLanes && call.l <= kHalf;
  const int units = whole_of(call.l, small ? kHalf : kLanes);
  const int chunks = whole_of(call.n, kLanes) / kLanes;
  const auto rows = static_cast<std::size_t>(call.M * chunks);
  const auto codes = static_cast<std::size_t>(call.M * units);
  const std::int64_t grain =
      std::max<std::int64_t>(1, kGrain / std::max<std::int64_t>(1, call.S * call.M));
  parallel_for(call.R, grain, threads, [&](std::int64_t begin, std::int64_t end) {
    Room<T> room;
    for (std::int64_t run = begin; run < end; ++run) {
      if (call.stopped[run] != 0) continue;
      for (auto* weights : {&room.encoder, &room.decoder}) {
        weights->assign(rows * static_cast<std::size_t>(units), Lanes<T>{});
      }
      for (auto* row : {&room.inputs, &room.logits}) row->assign(rows, Lanes<T>{});
      room.hidden.assign(codes, T{});
      const Work<T> work{call,
                         run,
                         units,
                         chunks,
                         room.encoder.data(),
                         room.decoder.data(),
                         room.inputs.data(),
                         room.logits.data(),
                         room.hidden.data()};
      copy_weights(work, false);
      if (small) {
        take_steps<T, true>(work);
      } else {
        take_steps<T, false>(work);
      }
      copy_weights(work, true);
    }
  });
}

template void descend(const Descend<float>&, int);
template void descend(const Descend<double>&, int);

}  // namespace dpkern::cpu
