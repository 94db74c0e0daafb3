// SGD on the noisy polynomial loss of many small autoencoders, one record of each at every step.
//
// A vector holds one number of every feature: a run's weights stay in registers and the first-level
// cache from its first step to its last, and one run is as quick as one of a hundred.

#include <algorithm>
#include <cstddef>
#include <type_traits>
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
constexpr std::int64_t kAhead = 4;    // steps whose records are on their way to the cache

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

// A run's memory, in lanes. Features and units that fill up the last vectors have weights 0.
template <class T>
struct Room {
  std::int64_t run;
  std::vector<Lanes<T>> encoder, decoder;  // [users, units, chunks]
  std::vector<Lanes<T>> inputs, logits;    // [users, chunks]
  std::vector<T> hidden;                   // [users, units]
};

// Sizes in whole vectors: of the code, and of a record.
struct Whole {
  int units;
  int chunks;
};

template <class T>
void copy_weights(const Descend<T>& call, const Whole& whole, Room<T>& room, bool back) {
  for (std::int64_t user = 0; user < call.M; ++user) {
    const std::int64_t pair = room.run * call.M + user;
    T* const first = call.encoder + pair * call.n * call.l;
    T* const second = call.decoder + pair * call.n * call.l;
    for (std::int64_t r = 0; r < call.l; ++r) {
      for (std::int64_t i = 0; i < call.n; ++i) {
        const auto at =
            static_cast<std::size_t>((user * whole.units + r) * whole.chunks + i / kLanes);
        T& encoded = room.encoder[at].of[i % kLanes];
        T& decoded = room.decoder[at].of[i % kLanes];
        if (back) {
          first[i * call.l + r] = encoded;
          second[r * call.n + i] = decoded;
        } else {
          encoded = first[i * call.l + r];
          decoded = second[r * call.n + i];
        }
      }
    }
  }
}

template <class T>
void begin(const Descend<T>& call, const Whole& whole, std::int64_t run, Room<T>& room) {
  room.run = run;
  const auto rows = static_cast<std::size_t>(call.M * whole.chunks);
  const auto units = static_cast<std::size_t>(whole.units);
  for (auto* weights : {&room.encoder, &room.decoder}) weights->assign(rows * units, Lanes<T>{});
  for (auto* row : {&room.inputs, &room.logits}) row->assign(rows, Lanes<T>{});
  room.hidden.assign(static_cast<std::size_t>(call.M) * units, T{});
  copy_weights(call, whole, room, false);
}

// The first `count` lanes from an address, where a whole vector may reach behind the end.
template <class T>
DPK_INLINE inline const T* readable(const T* from, const T* end, int count, Lanes<T>& room) {
  if (end - from >= kLanes) return from;
  for (int i = 0; i < kLanes; ++i) room.of[i] = i < count ? from[i] : T{};
  return room.of;
}

// The steps of a call's runs. kSmall: a record is one vector, and the code half of one.
template <class T, bool kSmall>
class Steps {
 public:
  using V = Row<T>;
  static constexpr int kGroup = kSmall ? kHalf : kLanes;  // units that are summed together

  DPK_INLINE Steps(const Descend<T>& call, const Whole& whole)
      : c_(call),
        whole_(whole),
        users_(static_cast<int>(call.M)),
        constant_(static_cast<T>(call.constant)),
        limit_(static_cast<T>(call.limit)),
        rate_(static_cast<T>(call.lr)),
        lattice_(call.draws != nullptr ? call.scale : 1.0) {
    for (int i = 0; i < kLanes; ++i) place_[i] = static_cast<typename Places::Of>(i);
  }

  // Pass a record of every user; false: a logit lies beyond the limit.
  DPK_INLINE bool look(Room<T>& room, std::int64_t step) const {
    fetch(room, std::min(step + kAhead, c_.S - 1));
    typename Places::Type beyond{};
    for (int user = 0; user < users_; ++user) beyond |= forward(room, step, user);
    typename Places::Of lanes[kLanes], any = 0;
    put_vector(beyond, lanes);
    for (int i = 0; i < kLanes; ++i) any |= lanes[i];
    return any == 0;
  }
  DPK_INLINE void learn(Room<T>& room, std::int64_t step) const {
    for (int user = 0; user < users_; ++user) backward(room, step, user);
  }

 private:
  struct Places {
    using Of = std::conditional_t<sizeof(T) == 4, std::int32_t, std::int64_t>;
    using Type = Vector<Of, kLanes>;
  };

  DPK_INLINE int units() const { return kSmall ? kHalf : whole_.units; }
  DPK_INLINE int chunks() const { return kSmall ? 1 : whole_.chunks; }
  DPK_INLINE int valid(int chunk) const {
    return std::min(kLanes, static_cast<int>(c_.n) - chunk * kLanes);
  }
  DPK_INLINE V masked(const V& x, int count) const {
    return place_ < static_cast<typename Places::Of>(count) ? x : V{};
  }
  DPK_INLINE V features(const T* from, const T* end, int chunk) const {
    Lanes<T> room;
    const int count = valid(chunk);
    return masked(vector_at<V>(readable(from, end, count, room)), count);
  }
  // Records stand in any order: without this every one is waited for.
  DPK_INLINE void fetch(const Room<T>& room, std::int64_t step) const {
    for (int user = 0; user < users_; ++user) {
      const std::int64_t row = c_.order[visit(room, step, user)];
      fetch(row_of(c_.inputs, c_.P, room, row));
      fetch(row_of(c_.targets, c_.Q, room, row));
    }
  }
  DPK_INLINE void fetch(const T* row) const {
    for (std::int64_t i = 0; i < c_.n; i += kLanes) __builtin_prefetch(row + i);
    __builtin_prefetch(row + c_.n - 1);
  }
  DPK_INLINE std::int64_t visit(const Room<T>& room, std::int64_t step, int user) const {
    return (room.run * c_.S + step) * c_.M + user;
  }
  // A row of a table, which is one for all runs or each run's own.
  DPK_INLINE const T* row_of(const T* table, std::int64_t tables, const Room<T>& room,
                             std::int64_t row) const {
    return table + ((tables > 1 ? room.run * c_.N : 0) + row) * c_.n;
  }
  DPK_INLINE V record(const T* table, std::int64_t tables, const Room<T>& room, std::int64_t step,
                      int user, int chunk) const {
    const T* const row = row_of(table, tables, room, c_.order[visit(room, step, user)]);
    return features(row + chunk * kLanes, table + tables * c_.N * c_.n, chunk);
  }
  DPK_INLINE V input(const Room<T>& room, std::int64_t step, int user, int chunk) const {
    const V x = record(c_.inputs, c_.P, room, step, user, chunk);
    if (c_.added == nullptr) return x;
    const std::int64_t first = visit(room, step, user) * c_.n + chunk * kLanes;
    return x + features(c_.added + first, c_.added + c_.R * c_.S * c_.M * c_.n, chunk);
  }
  DPK_INLINE T shift_of(const T* hidden) const {
    Half<T> sums[2] = {};
    for (int first = 0; first < units(); first += kHalf) {
      sums[first / kHalf % 2] += vector_at<Half<T>>(hidden + first);
    }
    return constant_ * sum_of<T>(sums[0] + sums[1]);
  }
  // Products of one row, [chunks], with that of every unit, [units, chunks]: for kHalf of them.
  DPK_INLINE Half<T> products(const Lanes<T>* row, const Lanes<T>* of_units) const {
    const int many = chunks();
    V sums[kHalf];
    for (int k = 0; k < kHalf; ++k) {
      sums[k] = vector_at<V>(row) * vector_at<V>(of_units + k * many);
      for (int chunk = 1; chunk < many; ++chunk) {
        sums[k] = sums[k] + vector_at<V>(row + chunk) * vector_at<V>(of_units + k * many + chunk);
      }
    }
    return sums_of<T>(sums);
  }

  DPK_INLINE typename Places::Type forward(Room<T>& room, std::int64_t step, int user) const {
    const int many = chunks();
    const Lanes<T>* const encoder = room.encoder.data() + user * units() * many;
    const Lanes<T>* const decoder = room.decoder.data() + user * units() * many;
    Lanes<T>* const inputs = room.inputs.data() + user * many;
    T* const hidden = room.hidden.data() + user * units();
    for (int chunk = 0; chunk < many; ++chunk) {
      put_vector(input(room, step, user, chunk), inputs + chunk);
    }
    for (int first = 0; first < units(); first += kHalf) {
      const auto known = vector_at<Half<T>>(kUnitPlaces) < static_cast<T>(c_.l - first);
      const Half<T> h = sigmoid<T>(products(inputs, encoder + first * many));
      put_vector(known ? h : Half<T>{}, hidden + first);
    }
    const T shift = shift_of(hidden);
    typename Places::Type beyond{};
    for (int chunk = 0; chunk < many; ++chunk) {
      V sums[kGroup];
      for (int k = 0; k < kGroup; ++k) {
        sums[k] = hidden[k] * vector_at<V>(decoder + k * many + chunk);
        for (int r = k + kGroup; r < units(); r += kGroup) {
          sums[k] = sums[k] + hidden[r] * vector_at<V>(decoder + r * many + chunk);
        }
      }
      for (int half = kGroup / 2; half > 0; half /= 2) {
        for (int k = 0; k < half; ++k) sums[k] = sums[k] + sums[k + half];
      }
      const V z = masked(sums[0] + shift, valid(chunk));
      const V size = z < 0 ? -z : z;
      beyond |= ~(size <= limit_);
      put_vector(z, room.logits.data() + user * many + chunk);
    }
    return beyond;
  }

  // Slopes of the loss by the logits.
  DPK_INLINE V slope(const Room<T>& room, std::int64_t step, int user, int chunk, const V& z,
                     const Lattice<T>& lattice) const {
    Lanes<T> targets, linear, quadratic;
    put_vector(record(c_.targets, c_.Q, room, step, user, chunk), &targets);
    for (int i = 0; i < kLanes; ++i) {
      linear.of[i] = linear_coefficient(targets.of[i]);
      quadratic.of[i] = quadratic_coefficient(targets.of[i], c_.form);
    }
    if (c_.draws != nullptr) {
      const std::int64_t part = c_.M * c_.n;
      const std::int64_t first = 2 * (room.run * c_.S + step) * part + user * c_.n;
      add_noise(linear, first, chunk, lattice);
      add_noise(quadratic, first + part, chunk, lattice);
    }
    const V slopes = quadratic_slope(vector_at<V>(&linear), vector_at<V>(&quadratic), z);
    return masked(slopes, valid(chunk));
  }
  DPK_INLINE void add_noise(Lanes<T>& values, std::int64_t first, int chunk,
                            const Lattice<T>& lattice) const {
    const std::int64_t at = first + chunk * kLanes, all = 2 * c_.R * c_.S * c_.M * c_.n;
    Lanes<std::int32_t> draw_room;
    Lanes<std::int16_t> bit_room;
    const int count = valid(chunk);
    const std::int32_t* const draws = readable(c_.draws + at, c_.draws + all, count, draw_room);
    const std::int16_t* const bits = readable(c_.rounding + at, c_.rounding + all, count, bit_room);
    const T per_unit = lattice.per_unit, cell = lattice.cell;
    for (int i = 0; i < kLanes; ++i) {
      const std::uint32_t rounding = static_cast<std::uint16_t>(bits[i]);
      values.of[i] = noised_coefficient(values.of[i], per_unit, cell, rounding, draws[i]);
    }
  }

  DPK_INLINE void backward(Room<T>& room, std::int64_t step, int user) const {
    const int many = chunks();
    Lanes<T>* const encoder = room.encoder.data() + user * units() * many;
    Lanes<T>* const decoder = room.decoder.data() + user * units() * many;
    const Lanes<T>* const inputs = room.inputs.data() + user * many;
    Lanes<T>* const slopes = room.logits.data() + user * many;
    const T* const hidden = room.hidden.data() + user * units();
    Lattice<T> lattice = lattice_;
    if (c_.growth > 0) {
      const T scale =
          scale_at(static_cast<T>(c_.scale), static_cast<T>(c_.growth), shift_of(hidden));
      lattice = Lattice<T>(static_cast<double>(scale));
    }
    V all{};
    for (int chunk = 0; chunk < many; ++chunk) {
      const V g = slope(room, step, user, chunk, vector_at<V>(slopes + chunk), lattice);
      put_vector(g, slopes + chunk);
      all = all + g;
    }
    const T moved = constant_ * sum_of<T>(sum_of_halves<Half<T>, T, kLanes>(all));
    for (int first = 0; first < units(); first += kHalf) {
      const auto h = vector_at<Half<T>>(hidden + first);
      const Half<T> code = (products(slopes, decoder + first * many) + moved) * (h - h * h);
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

  const Descend<T>& c_;
  Whole whole_;
  int users_;
  T constant_, limit_, rate_;
  Lattice<T> lattice_;  // of a scale that is the same for all
  typename Places::Type place_;
};

template <class T, bool kSmall>
void take_steps(const Descend<T>& call, const Whole& whole, Room<T>& room) {
  versioned([&]() DPK_INLINE {
    const Steps<T, kSmall> steps(call, whole);
    for (std::int64_t step = 0; step < call.S; ++step) {
      if (!steps.look(room, step)) {
        call.stopped[room.run] = 1;
        break;
      }
      steps.learn(room, step);
    }
  });
}

}  // namespace

template <class T>
void descend(const Descend<T>& call, int threads) {
  if (call.n == 0 || call.l == 0 || call.M == 0 || call.S == 0) return;
  const auto vectors = [](std::int64_t n, int lanes) {
    return static_cast<int>((n + lanes - 1) / lanes);
  };
  const bool small = call.n <= kLanes && call.l <= kHalf;
  const int units = small ? kHalf : vectors(call.l, kLanes) * kLanes;
  const Whole whole{units, vectors(call.n, kLanes)};
  const std::int64_t grain = std::max<std::int64_t>(1, kGrain / (call.S * call.M));
  parallel_for(call.R, grain, threads, [&](std::int64_t first, std::int64_t last) {
    Room<T> room;
    for (std::int64_t run = first; run < last; ++run) {
      if (call.stopped[run] != 0) continue;
      begin(call, whole, run, room);
      if (small) {
        take_steps<T, true>(call, whole, room);
      } else {
        take_steps<T, false>(call, whole, room);
      }
      copy_weights(call, whole, room, true);
    }
  });
}

template void descend(const Descend<float>&, int);
template void descend(const Descend<double>&, int);

}  // namespace dpkern::cpu
