// Looks that a replayed step takes at its end, each in one call. They decide the common case only:
// whatever is odd is left to Python.

#include <pybind11/pybind11.h>

#include "bindings/bindings.h"
#include "bindings/owned.h"

namespace py = pybind11;

namespace dpkern::bindings {
namespace {

// Whether two lists hold the same objects in the same order.
bool same_objects(PyObject* now, PyObject* then) {
  if (!PyList_CheckExact(now) || PyList_GET_SIZE(now) != PyList_GET_SIZE(then)) return false;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(then); ++i) {
    if (PyList_GET_ITEM(now, i) != PyList_GET_ITEM(then, i)) return false;
  }
  return true;
}

PyObject* answer(bool found) {
  if (PyErr_Occurred() != nullptr) return nullptr;
  return PyBool_FromLong(found ? 1 : 0);
}

// no_gradients(tensors): private ones must be ordinary here.
PyObject* no_gradients(PyObject*, PyObject* tensors) {
  static PyObject* const name = PyUnicode_InternFromString("grad");
  const Owned held(PySequence_Fast(tensors, "no_gradients(tensors)"));
  if (!held) return nullptr;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(held.get()); ++i) {
    const Owned gradient(PyObject_GetAttr(PySequence_Fast_GET_ITEM(held.get(), i), name));
    if (gradient.get() != Py_None) return answer(false);
  }
  return answer(true);
}

bool is_of_version(PyObject* tensor, PyObject* version) {
  static PyObject* const name = PyUnicode_InternFromString("_version");
  const Owned now(PyObject_GetAttr(tensor, name));
  return now && PyObject_RichCompareBool(now.get(), version, Py_EQ) == 1;
}

// unwritten(held): operands that uses hold as (x, g, version of x, version of g, ...).
PyObject* unwritten(PyObject*, PyObject* held) {
  if (!PyList_CheckExact(held)) return answer(false);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(held); ++i) {
    PyObject* const each = PyList_GET_ITEM(held, i);
    if (each == Py_None) continue;
    if (!PyTuple_CheckExact(each)) return answer(false);
    if (PyTuple_GET_SIZE(each) == 0 || PyTuple_GET_ITEM(each, 0) == Py_None) continue;
    const bool same = PyTuple_GET_SIZE(each) >= 4 &&
                      is_of_version(PyTuple_GET_ITEM(each, 0), PyTuple_GET_ITEM(each, 2)) &&
                      is_of_version(PyTuple_GET_ITEM(each, 1), PyTuple_GET_ITEM(each, 3));
    if (!same) return answer(false);
  }
  return answer(true);
}

// same_groups(groups, params): whether groups of an optimizer hold these parameters.
PyObject* same_groups(PyObject*, PyObject* const* args, Py_ssize_t count) {
  static PyObject* const name = PyUnicode_InternFromString("params");
  if (count != 2 || !PyList_CheckExact(args[0]) || !PyList_CheckExact(args[1])) {
    return answer(false);
  }
  const Py_ssize_t groups = PyList_GET_SIZE(args[1]);
  if (PyList_GET_SIZE(args[0]) != groups) return answer(false);
  for (Py_ssize_t i = 0; i < groups; ++i) {
    PyObject* const group = PyList_GET_ITEM(args[0], i);
    PyObject* const now = PyDict_Check(group) ? PyDict_GetItemWithError(group, name) : nullptr;
    if (now == nullptr || !same_objects(now, PyList_GET_ITEM(args[1], i))) return answer(false);
  }
  return answer(true);
}

// same_state(state, keys, values): whether a dict holds these objects in this order.
PyObject* same_state(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 3 || !PyDict_Check(args[0])) return answer(false);
  const Py_ssize_t size = PyList_GET_SIZE(args[1]);
  if (PyDict_GET_SIZE(args[0]) != size || PyList_GET_SIZE(args[2]) != size) return answer(false);
  PyObject *key, *value;
  Py_ssize_t next = 0;
  for (Py_ssize_t at = 0; PyDict_Next(args[0], &at, &key, &value) != 0; ++next) {
    if (PyList_GET_ITEM(args[1], next) != key || PyList_GET_ITEM(args[2], next) != value) {
      return answer(false);
    }
  }
  return answer(true);
}

template <class F>
PyMethodDef method(const char* name, F* function, int kind, const char* doc) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), kind, doc};
}

PyMethodDef kLooks[] = {
    method("no_gradients", &no_gradients, METH_O,
           "no_gradients(tensors): whether .grad of every tensor is None."),
    method("unwritten", &unwritten, METH_O,
           "unwritten(held): whether operands have the versions that are held with them."),
    method("same_groups", &same_groups, METH_FASTCALL,
           "same_groups(groups, params): whether an optimizer's groups hold these parameters."),
    method("same_state", &same_state, METH_FASTCALL,
           "same_state(state, keys, values): whether a dict holds these objects in this order."),
};

}  // namespace

void add_step_looks(py::module_& m) {
  for (PyMethodDef& look : kLooks) {
    m.add_object(look.ml_name, py::reinterpret_steal<py::object>(PyCFunction_New(&look, nullptr)));
  }
}

}  // namespace dpkern::bindings
