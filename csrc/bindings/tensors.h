#pragma once
// Tensors of torch as C++ sees and makes them, without linking torch.

#include <Python.h>

#include <cstdint>
#include <vector>

#include "bindings/exchange.h"

namespace dpkern::bindings {

// A dtype that ops know.
struct Dtype {
  std::uint8_t code, bits;
  PyObject* object;
  PyObject* given;  // {"dtype": object, "device": the CPU}, for calls that make tensors
  int sum;          // the place of the dtype of its sums
};

// What is known of torch: set once, before the first look.
struct Torch {
  const Exchange* exchange = nullptr;
  std::vector<Dtype> dtypes;
  PyTypeObject* tensor = nullptr;
  PyTypeObject* parameter = nullptr;
  PyTypeObject* size = nullptr;
  PyTypeObject* bound = nullptr;
  PyObject* cpu = nullptr;
  PyObject* is_negated = nullptr;
  PyObject* has_memory = nullptr;
  PyObject* empty_strided = nullptr;
  PyObject* changed = nullptr;

  int place(PyObject* dtype) const;
  bool is_tensor(PyObject* object) const {
    return Py_TYPE(object) == tensor || Py_TYPE(object) == parameter;
  }
};

extern Torch torch;

int find_dtype(const View& view);  // its place, or -1
bool is_contiguous(const View& view);
bool is_transposed(const View& view);
bool is_empty(const View& view);

// Whether an address is one of memory, and not null or a distance from the null of a storage that
// was freed. Those are smaller than any storage is large; of small addresses torch is asked.
bool has_memory(PyObject* tensor, const View& view);

// Whether torch notes, and may note only, that the numbers in its memory are to be negated.
bool is_negated(PyObject* tensor);

// Whether a tensor has the sizes of a tuple.
bool has_shape(const View& view, PyObject* shape);

// Whether these are tensors on the CPU of these shapes, each of one of these dtypes, whose memory
// holds their numbers; false: Python knows better.
bool alike(PyObject* tensors, PyObject* shapes, PyObject* dtypes, bool contiguous);

// A new tensor on the CPU, contiguous and not filled; null with an error.
PyObject* new_tensor(const std::vector<std::int64_t>& shape, int dtype);

// Count up the versions of tensors in a tuple or list; false with an error.
bool note_change(PyObject* tensors);

}  // namespace dpkern::bindings
