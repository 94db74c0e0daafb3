// Looks that the engine's guards take in every step, as single calls. They decide the common case
// only: whatever is odd is left to Python.

#include <pybind11/pybind11.h>

#include "bindings/bindings.h"
#include "bindings/look.h"
#include "bindings/tables.h"
#include "bindings/tensors.h"

namespace py = pybind11;

namespace dpkern::bindings {

namespace {

// The same of an OrderedDict or another subclass, whose order is its own.
bool holds_in_its_order(PyObject* table, PyObject* entries) {
  const py::object keys = py::reinterpret_steal<py::object>(PyObject_GetIter(table));
  Py_ssize_t next = 0;
  while (keys) {
    const py::object key = py::reinterpret_steal<py::object>(PyIter_Next(keys.ptr()));
    if (!key) break;
    if (next == PyTuple_GET_SIZE(entries) || PyTuple_GET_ITEM(entries, next) != key.ptr() ||
        PyDict_GetItemWithError(table, key.ptr()) != PyTuple_GET_ITEM(entries, next + 1)) {
      return false;
    }
    next += 2;
  }
  return PyErr_Occurred() == nullptr && next == PyTuple_GET_SIZE(entries);
}

}  // namespace

bool holds(PyObject* table, PyObject* entries) {
  if (!PyDict_Check(table) || !PyTuple_CheckExact(entries)) return false;
  const Py_ssize_t count = PyTuple_GET_SIZE(entries);
  if (2 * PyDict_GET_SIZE(table) != count) return false;
  if (count > 0 && !PyDict_CheckExact(table)) return holds_in_its_order(table, entries);
  PyObject* key;
  PyObject* value;
  Py_ssize_t next = 0;
  for (Py_ssize_t at = 0; PyDict_Next(table, &at, &key, &value) != 0; next += 2) {
    if (PyTuple_GET_ITEM(entries, next) != key) return false;
    if (PyTuple_GET_ITEM(entries, next + 1) != value) return false;
  }
  return true;
}

bool hold(PyObject* tables, PyObject* entries) {
  const Py_ssize_t count = PyList_GET_SIZE(tables);
  if (PyList_GET_SIZE(entries) != count) return false;
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (!holds(PyList_GET_ITEM(tables, i), PyList_GET_ITEM(entries, i))) return false;
  }
  return true;
}

namespace {

template <class F>
PyCFunction method(F* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyObject* same_entries(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 2 || !PyList_CheckExact(args[0]) || !PyList_CheckExact(args[1])) {
    PyErr_SetString(PyExc_TypeError, "same_entries(tables, entries)");
    return nullptr;
  }
  const bool same = hold(args[0], args[1]);
  return PyErr_Occurred() != nullptr ? nullptr : PyBool_FromLong(same);
}

PyMethodDef kSameEntries{
    "same_entries", method(&same_entries), METH_FASTCALL,
    "same_entries(tables, entries): whether every dict holds the keys and values of its tuple "
    "(key, value, key, value, ...), as the same objects in the same order."};

PyObject* read(PyObject*, PyObject* const* args, Py_ssize_t count) {
  const descrgetfunc get = count == 2 ? Py_TYPE(args[0])->tp_descr_get : nullptr;
  if (get == nullptr || !PyList_CheckExact(args[1])) {
    PyErr_SetString(PyExc_TypeError, "read(attribute, objects)");
    return nullptr;
  }
  PyObject* const values = PyList_New(PyList_GET_SIZE(args[1]));
  for (Py_ssize_t i = 0; values != nullptr && i < PyList_GET_SIZE(values); ++i) {
    PyObject* const object = PyList_GET_ITEM(args[1], i);
    PyObject* const value = get(args[0], object, reinterpret_cast<PyObject*>(Py_TYPE(object)));
    if (value == nullptr) {
      Py_DECREF(values);
      return nullptr;
    }
    PyList_SET_ITEM(values, i, value);
  }
  return values;
}

PyMethodDef kRead{"read", method(&read), METH_FASTCALL,
                  "read(attribute, objects): a list of what the descriptor of an attribute says of "
                  "each object of a list."};

// None where the tensor is no contiguous one of int64 on the CPU.
PyObject* any_negative(PyObject*, PyObject* tensor) {
  View view;
  if (torch.exchange == nullptr) Py_RETURN_NONE;
  if (torch.exchange->view(tensor, &view) != 0) {
    PyErr_Clear();
    Py_RETURN_NONE;
  }
  const bool plain = view.device.type == kCpu && view.dims == 1 && view.strides[0] == 1 &&
                     view.offset == 0 && view.dtype.lanes == 1 && view.dtype.code == 0 &&
                     view.dtype.bits == 64;
  if (!plain) Py_RETURN_NONE;
  const auto* const first = static_cast<const std::int64_t*>(view.data);
  std::int64_t signs = 0;
  for (std::int64_t i = 0; i < view.shape[0]; ++i) signs |= first[i];
  return PyBool_FromLong(signs < 0);
}

PyMethodDef kAnyNegative{
    "any_negative", method(&any_negative), METH_O,
    "any_negative(tensor): whether a number of a list of int64 on the CPU is negative; None for "
    "any other tensor."};

// None where the tensor is no single float of 32 or 64 bits on the CPU.
PyObject* holds_number(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 2 || !PyLong_Check(args[1])) {
    PyErr_SetString(PyExc_TypeError, "holds_number(tensor, number)");
    return nullptr;
  }
  View view;
  if (torch.exchange == nullptr) Py_RETURN_NONE;
  if (torch.exchange->view(args[0], &view) != 0) {
    PyErr_Clear();
    Py_RETURN_NONE;
  }
  constexpr std::uint8_t kFloat = 2;
  const bool plain = view.device.type == kCpu && view.dims == 0 && view.offset == 0 &&
                     view.dtype.lanes == 1 && view.dtype.code == kFloat &&
                     (view.dtype.bits == 32 || view.dtype.bits == 64);
  if (!plain || !has_memory(args[0], view)) Py_RETURN_NONE;
  const double number = PyLong_AsDouble(args[1]);
  if (PyErr_Occurred() != nullptr) return nullptr;
  const double held = view.dtype.bits == 32 ? static_cast<double>(*static_cast<float*>(view.data))
                                            : *static_cast<double*>(view.data);
  return PyBool_FromLong(held == number);
}

PyMethodDef kHoldsNumber{
    "holds_number", method(&holds_number), METH_FASTCALL,
    "holds_number(tensor, number): whether a float on the CPU is this integer; None for any other "
    "tensor."};

}  // namespace

void add_guards(py::module_& m) {
  for (PyMethodDef* const made : {&kSameEntries, &kRead, &kAnyNegative, &kHoldsNumber}) {
    m.add_object(made->ml_name, py::reinterpret_steal<py::object>(PyCFunction_New(made, nullptr)));
  }
}

}  // namespace dpkern::bindings
