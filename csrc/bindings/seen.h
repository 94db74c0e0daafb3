#pragma once
// A call that was looked at, as the generated calls of kernels read it: arguments by their place in
// the op's signature, sizes by theirs in the order in which they are bound.

#include <Python.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

namespace dpkern::bindings {

constexpr int kMostResults = 8;

// The shape of a tensor, or the end of it; the memory is the tensor's.
struct Shape {
  const std::int64_t* sizes = nullptr;
  int dims = 0;

  std::int64_t product() const {
    std::int64_t made = 1;
    for (int i = 0; i < dims; ++i) made *= sizes[i];
    return made;
  }
  bool operator==(const Shape& other) const {
    return dims == other.dims &&
           (dims == 0 || std::memcmp(sizes, other.sizes, sizeof(*sizes) * dims) == 0);
  }
};

// A size of the signature: a number, ``*S`` of a tensor, or one ``*S`` for each tensor of a list.
struct Size {
  bool bound = false;
  std::int64_t number = 0;
  Shape shape;
  std::vector<Shape> shapes;
};

struct Argument {
  PyObject* value = nullptr;  // borrowed of the call, or of what the call owns
  void* data = nullptr;
  std::vector<void*> many;
  PyObject* items = nullptr;  // a list as a tuple
  std::int64_t integer = 0;   // also a choice's place among its options
  std::uint64_t word = 0;
  double number = 0;
  std::vector<std::int64_t> integers;
  std::vector<double> numbers;
  std::string_view bytes;
  int kind = -1;
  bool transposed = false;
  bool binds = false;  // a list whose shapes others must have
  bool packed = true;  // every tensor is contiguous
  bool made = false;   // of the call's own memory

  bool given() const { return value != Py_None; }
  PyObject* tensors() const { return items != nullptr ? items : value; }
  // As new, but for the memory of its lists.
  void clear() {
    Argument next;
    many.clear(), integers.clear(), numbers.clear();
    next.many.swap(many), next.integers.swap(integers), next.numbers.swap(numbers);
    *this = std::move(next);
  }
};

class Seen {
 public:
  Seen(std::size_t parameters, std::size_t named) : arguments(parameters), sizes(named) {}
  Seen(const Seen&) = delete;
  Seen& operator=(const Seen&) = delete;
  ~Seen() { clear(); }

  // As new, for the next call.
  void clear() {
    for (Argument& argument : arguments) argument.clear();
    for (Size& size : sizes) {
      Size next;
      size.shapes.clear();
      next.shapes.swap(size.shapes);
      size = std::move(next);
    }
    results.fill(nullptr);
    first = nullptr;
    kind_of_call = device = device_index = -1;
    for (PyObject* object : owned_) Py_DECREF(object);
    owned_.clear();
  }

  // Keep a new object until the call has ended.
  PyObject* own(PyObject* object) {
    owned_.push_back(object);
    return object;
  }

  template <class T>
  T* pointer(int i) const {
    return static_cast<T*>(arguments[i].data);
  }
  template <class T>
  std::vector<T*> pointers(int i) const {
    std::vector<T*> made;
    made.reserve(arguments[i].many.size());
    for (void* data : arguments[i].many) made.push_back(static_cast<T*>(data));
    return made;
  }
  template <class T>
  T result(int i) const {
    return static_cast<T>(results[i]);
  }
  template <class T>
  T code(int i) const {
    return static_cast<T>(arguments[i].integer);
  }
  // The place of a tensor's dtype in its group; of an empty list the last but one, as good as any.
  template <class T>
  T kind(int i) const {
    return static_cast<T>(arguments[i].kind < 0 ? 2 : arguments[i].kind);
  }
  bool transposed(int i) const { return arguments[i].transposed; }
  bool flag(int i) const { return arguments[i].integer != 0; }
  std::int64_t integer(int i) const { return arguments[i].integer; }
  std::uint64_t word(int i) const { return arguments[i].word; }
  double number(int i) const { return arguments[i].number; }
  std::optional<std::int64_t> any_integer(int i) const {
    return arguments[i].given() ? std::optional(arguments[i].integer) : std::nullopt;
  }
  std::optional<double> any_number(int i) const {
    return arguments[i].given() ? std::optional(arguments[i].number) : std::nullopt;
  }
  const std::vector<std::int64_t>& integers(int i) const { return arguments[i].integers; }
  const std::vector<double>& numbers(int i) const { return arguments[i].numbers; }
  std::string_view bytes(int i) const { return arguments[i].bytes; }
  std::int64_t size(int i) const { return sizes[i].number; }
  std::int64_t product(int i) const { return sizes[i].shape.product(); }
  std::vector<std::int64_t> products(int i) const {
    std::vector<std::int64_t> made;
    made.reserve(sizes[i].shapes.size());
    for (const Shape& shape : sizes[i].shapes) made.push_back(shape.product());
    return made;
  }

  std::vector<Argument> arguments;
  std::vector<Size> sizes;
  std::array<void*, kMostResults> results{};
  PyObject* first = nullptr;  // the first tensor
  int kind_of_call = -1;      // its place among the dtypes
  std::int32_t device = -1, device_index = -1;

 private:
  std::vector<PyObject*> owned_;
};

// Other threads of Python run while a kernel does.
class Unlocked {
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;
  ~Unlocked() { PyEval_RestoreThread(state_); }

 private:
  PyThreadState* state_;
};

// A kernel's call, and the declaration that it was generated from.
struct Entry {
  const char* name;
  const char* declaration;
  std::int64_t (*run)(const Seen& at, int threads);
};

const Entry* entry(std::string_view name);  // generated; null: there is none

}  // namespace dpkern::bindings
