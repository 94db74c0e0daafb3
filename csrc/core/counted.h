#pragma once
// A scalar that counts the operations on it, and arrays that count which of their elements are
// read and written: core templates instantiated with these count the code that the kernels run.
// The conventions are those of dpkern/base/counts.py; and further: constants are free, and so
// are numbers that are made once per call; a shift by no bits and a conversion between integers are
// none; a test for finite numbers is one comparison; a branch counts what it runs.
// For the host, one execution at a time: the counters are global.

#include <type_traits>
#include <vector>

#include "core/numeric.h"
#include "core/response.h"

namespace dpkern {

// In the order of PRIMITIVES in dpkern/base/counts.py.
enum Primitive : int {
  kAdd,
  kSub,
  kMul,
  kDiv,
  kSqrt,
  kExp,
  kLog,
  kNot,
  kAnd,
  kOr,
  kXor,
  kShift,
  kMux,
  kCmp,
  kCvt,
  kLoad,
  kStore,
  kRng,
  kPrimitives
};

struct Tally {
  std::int64_t counts[kPrimitives];
  std::int64_t flops;
  std::int64_t bytes_read;
  std::int64_t bytes_written;
};

// Counts go to `*current`, or nowhere if it is null. Those that depend on the noise that was drawn,
// or on the last bits of the data, go to `*by_chance`.
inline Tally* current = nullptr;
inline Tally* by_chance = nullptr;
// Whether the generator's inner operations are counted too, besides its words.
inline bool cipher_is_open = false;

inline void count(Primitive primitive, std::int64_t times = 1) {
  if (current != nullptr) current->counts[primitive] += times;
}
template <class T>
void count_of(Primitive primitive) {
  if (current == nullptr) return;
  current->counts[primitive] += 1;
  if (std::is_floating_point_v<T>) current->flops += 1;
}

// Inside its scope counts go to `target`.
class Counting {
 public:
  explicit Counting(Tally* target) : before_(current) { current = target; }
  ~Counting() { current = before_; }
  Counting(const Counting&) = delete;
  Counting& operator=(const Counting&) = delete;

 private:
  Tally* before_;
};

template <class T>
class Counted {
 public:
  T value{};

  constexpr Counted() = default;
  constexpr Counted(T constant) : value(constant) {}
  template <class U, std::enable_if_t<std::is_arithmetic_v<U>, int> = 0>
  explicit constexpr Counted(U constant) : value(static_cast<T>(constant)) {}
  template <class U, std::enable_if_t<!std::is_same_v<U, T>, int> = 0>
  explicit Counted(const Counted<U>& other) : value(static_cast<T>(other.value)) {
    if constexpr (std::is_floating_point_v<T> || std::is_floating_point_v<U>) count(kCvt);
  }

  friend Counted operator+(Counted a, Counted b) {
    count_of<T>(kAdd);
    return static_cast<T>(a.value + b.value);
  }
  friend Counted operator-(Counted a, Counted b) {
    count_of<T>(kSub);
    return static_cast<T>(a.value - b.value);
  }
  friend Counted operator*(Counted a, Counted b) {
    count_of<T>(kMul);
    return static_cast<T>(a.value * b.value);
  }
  friend Counted operator/(Counted a, Counted b) {
    count_of<T>(kDiv);
    return static_cast<T>(a.value / b.value);
  }
  friend Counted operator-(Counted a) {
    count_of<T>(kSub);
    return static_cast<T>(-a.value);
  }
  friend Counted operator&(Counted a, Counted b) {
    count(kAnd);
    return static_cast<T>(a.value & b.value);
  }
  friend Counted operator|(Counted a, Counted b) {
    count(kOr);
    return static_cast<T>(a.value | b.value);
  }
  friend Counted operator^(Counted a, Counted b) {
    count(kXor);
    return static_cast<T>(a.value ^ b.value);
  }
  friend Counted operator~(Counted a) {
    count(kNot);
    return static_cast<T>(~a.value);
  }
  friend Counted operator<<(Counted a, int bits) {
    if (bits != 0) count(kShift);
    return static_cast<T>(a.value << bits);
  }
  friend Counted operator>>(Counted a, int bits) {
    if (bits != 0) count(kShift);
    return static_cast<T>(a.value >> bits);
  }
  Counted& operator+=(Counted b) { return *this = *this + b; }
  Counted& operator-=(Counted b) { return *this = *this - b; }
  Counted& operator*=(Counted b) { return *this = *this * b; }
  Counted& operator^=(Counted b) { return *this = *this ^ b; }
  Counted& operator|=(Counted b) { return *this = *this | b; }

  friend bool operator<(Counted a, Counted b) { return compared(a.value < b.value); }
  friend bool operator<=(Counted a, Counted b) { return compared(a.value <= b.value); }
  friend bool operator>(Counted a, Counted b) { return compared(a.value > b.value); }
  friend bool operator>=(Counted a, Counted b) { return compared(a.value >= b.value); }
  friend bool operator==(Counted a, Counted b) { return compared(a.value == b.value); }
  friend bool operator!=(Counted a, Counted b) { return compared(a.value != b.value); }

 private:
  static bool compared(bool result) {
    count(kCmp);
    return result;
  }
};

template <class T>
Counted<T> floor(Counted<T> x) {
  count(kCvt);
  return std::floor(x.value);
}
template <class T>
Counted<T> sqrt(Counted<T> x) {
  count_of<T>(kSqrt);
  return std::sqrt(x.value);
}
template <class T>
bool isfinite(Counted<T> x) {
  count(kCmp);
  return std::isfinite(x.value);
}
inline Counted<std::uint64_t> high_product(Counted<std::uint64_t> a, std::uint64_t b) {
  count(kMul);
  return high_product(a.value, b);
}
// A choice between two values that are both at hand.
template <class T>
Counted<T> choose(bool condition, Counted<T> yes, Counted<T> no) {
  count(kMux);
  return condition ? yes : no;
}

// The operations of the core on a word; reads of its tables are free, as the sources price them.
inline std::uint32_t index_of(Counted<std::uint32_t> x) { return x.value; }
template <>
struct SignedTwin<Counted<std::uint32_t>> {
  typedef Counted<std::int32_t> type;
};
template <>
inline Counted<std::uint32_t> broadcast<Counted<std::uint32_t>>(std::uint32_t x) {
  return x;
}
template <class T>
Counted<T> mask_equal(const Counted<T>& a, const Counted<T>& b) {
  return a == b ? static_cast<T>(~T{0}) : T{0};
}
template <class T>
Counted<T> mask_less(const Counted<T>& a, const Counted<T>& b) {
  return a < b ? static_cast<T>(~T{0}) : T{0};
}
template <class T>
Counted<T> select(const Counted<T>& mask, const Counted<T>& yes, const Counted<T>& no) {
  return choose(mask.value != 0, yes, no);
}

// A sum of n terms by n - 1 additions, in any number of lanes.
template <class T>
class Total {
 public:
  void add(Counted<T> term) {
    total_ = empty_ ? term : total_ + term;
    empty_ = false;
  }
  Counted<T> total() const { return total_; }

 private:
  Counted<T> total_{};
  bool empty_ = true;
};

// An operand: each element that is read counts once, however often it is read, unless the op wrote
// it before; each that is written once.
template <class T>
class Operand {
 public:
  Operand(T* data, std::int64_t size) : data_(data), touched_(static_cast<std::size_t>(size), 0) {}

  T raw(std::int64_t i) const {
    if (touched_[static_cast<std::size_t>(i)] == 0) {
      count(kLoad);
      if (current != nullptr) current->bytes_read += static_cast<std::int64_t>(sizeof(T));
    }
    touched_[static_cast<std::size_t>(i)] |= 1;
    return data_[i];
  }
  auto operator[](std::int64_t i) const { return Counted<std::remove_const_t<T>>(raw(i)); }

  void store(std::int64_t i, Counted<std::remove_const_t<T>> x) {
    if ((touched_[static_cast<std::size_t>(i)] & 2) == 0) {
      count(kStore);
      if (current != nullptr) current->bytes_written += static_cast<std::int64_t>(sizeof(T));
    }
    touched_[static_cast<std::size_t>(i)] |= 2;
    data_[i] = x.value;
  }

 private:
  T* data_;
  mutable std::vector<unsigned char> touched_;  // 1: read, 2: written
};

}  // namespace dpkern
