#include "bindings/tensors.h"

#include <algorithm>

namespace dpkern::bindings {

Torch torch;

int Torch::place(PyObject* dtype) const {
  for (std::size_t i = 0; i < dtypes.size(); ++i) {
    if (dtypes[i].object == dtype) return static_cast<int>(i);
  }
  return -1;
}

int find_dtype(const View& view) {
  if (view.dtype.lanes != 1) return -1;
  for (std::size_t i = 0; i < torch.dtypes.size(); ++i) {
    const Dtype& known = torch.dtypes[i];
    if (known.code == view.dtype.code && known.bits == view.dtype.bits) return static_cast<int>(i);
  }
  return -1;
}

bool is_contiguous(const View& view) {
  std::int64_t expected = 1;
  bool packed = true;
  for (int i = view.dims - 1; i >= 0; --i) {
    if (view.shape[i] == 0) return true;
    if (view.shape[i] == 1) continue;
    packed = packed && view.strides[i] == expected;
    expected *= view.shape[i];
  }
  return packed;
}

bool is_transposed(const View& view) {
  if (view.dims != 2) return false;
  const std::int64_t shape[2] = {view.shape[1], view.shape[0]};
  const std::int64_t strides[2] = {view.strides[1], view.strides[0]};
  View turned = view;
  turned.shape = shape;
  turned.strides = strides;
  return is_contiguous(turned);
}

bool is_empty(const View& view) {
  return std::find(view.shape, view.shape + view.dims, 0) != view.shape + view.dims;
}

bool has_memory(PyObject* tensor, const View& view) {
  constexpr std::uintptr_t kLargestStorage = std::uintptr_t{1} << 40;
  if (reinterpret_cast<std::uintptr_t>(view.data) >= kLargestStorage || is_empty(view)) return true;
  if (view.data == nullptr) return false;
  PyObject* const held = PyObject_CallOneArg(torch.has_memory, tensor);
  Py_XDECREF(held);
  return held == Py_True;
}

// Whether torch notes, and may note only, that the numbers in its memory are to be negated.
bool is_negated(PyObject* tensor) {
  PyObject* negated = PyObject_CallOneArg(torch.is_negated, tensor);
  Py_XDECREF(negated);
  return negated != Py_False;
}

namespace {

PyObject* numbers(const std::vector<std::int64_t>& values) {
  PyObject* const made = PyTuple_New(static_cast<Py_ssize_t>(values.size()));
  for (std::size_t i = 0; made != nullptr && i < values.size(); ++i) {
    PyTuple_SET_ITEM(made, static_cast<Py_ssize_t>(i), PyLong_FromLongLong(values[i]));
  }
  return made;
}

}  // namespace

// empty_strided reads its arguments sooner than empty.
PyObject* new_tensor(const std::vector<std::int64_t>& shape, int dtype) {
  std::vector<std::int64_t> strides(shape.size());
  std::int64_t stride = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= std::max<std::int64_t>(shape[i], 1);
  }
  PyObject* const args = PyTuple_New(2);
  if (args == nullptr) return nullptr;
  PyTuple_SET_ITEM(args, 0, numbers(shape));
  PyTuple_SET_ITEM(args, 1, numbers(strides));
  PyObject* made = nullptr;
  if (PyTuple_GET_ITEM(args, 0) != nullptr && PyTuple_GET_ITEM(args, 1) != nullptr) {
    const Dtype& known = torch.dtypes[static_cast<std::size_t>(dtype)];
    made = PyObject_Call(torch.empty_strided, args, known.given);
  }
  Py_DECREF(args);
  return made;
}

bool note_change(PyObject* tensors) {
  PyObject* const done = PyObject_CallOneArg(torch.changed, tensors);
  Py_XDECREF(done);
  return done != nullptr;
}

bool has_shape(const View& view, PyObject* shape) {
  if (!PyTuple_Check(shape) || PyTuple_GET_SIZE(shape) != view.dims) return false;
  for (int i = 0; i < view.dims; ++i) {
    if (PyLong_AsLongLong(PyTuple_GET_ITEM(shape, i)) != view.shape[i]) return false;
  }
  return true;
}

bool alike(PyObject* tensors, PyObject* shapes, PyObject* dtypes, bool contiguous) {
  const auto is_list = [](PyObject* x) { return PyList_CheckExact(x) || PyTuple_CheckExact(x); };
  if (!is_list(tensors) || !is_list(shapes) || !PyTuple_CheckExact(dtypes)) return false;
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(tensors);
  if (PySequence_Fast_GET_SIZE(shapes) != count) return false;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* const tensor = PySequence_Fast_GET_ITEM(tensors, i);
    if (!torch.is_tensor(tensor)) return false;
    View view;
    if (torch.exchange->view(tensor, &view) != 0 || view.device.type != kCpu) return false;
    if (view.offset != 0 || !has_memory(tensor, view)) return false;
    const int dtype = find_dtype(view);
    if (dtype < 0 || PySequence_Contains(dtypes, torch.dtypes[dtype].object) != 1) return false;
    if (!has_shape(view, PySequence_Fast_GET_ITEM(shapes, i))) return false;
    if ((contiguous && !is_contiguous(view)) || is_negated(tensor)) return false;
  }
  return true;
}

}  // namespace dpkern::bindings
