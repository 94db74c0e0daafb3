#pragma once
// Tensors of subclasses are ordinary ones inside, as in ``with without_torch_function():``.

#include <Python.h>

namespace dpkern::bindings {

class Ordinary {
 public:
  // The context's class; ``entered()`` is false with a Python error.
  explicit Ordinary(PyObject* context) : held_(PyObject_CallNoArgs(context)) {
    static PyObject* const enter = PyUnicode_InternFromString("__enter__");
    PyObject* const done =
        held_ == nullptr ? nullptr : PyObject_VectorcallMethod(enter, &held_, 1, nullptr);
    if (done == nullptr) Py_CLEAR(held_);
    Py_XDECREF(done);
  }
  Ordinary(const Ordinary&) = delete;
  Ordinary& operator=(const Ordinary&) = delete;
  ~Ordinary() {
    if (held_ == nullptr) return;
    static PyObject* const exit = PyUnicode_InternFromString("__exit__");
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyObject* const given[] = {held_, Py_None, Py_None, Py_None};
    PyObject* const done = PyObject_VectorcallMethod(exit, given, 4, nullptr);
    if (done == nullptr) PyErr_WriteUnraisable(held_);
    Py_XDECREF(done);
    PyErr_Restore(type, error, trace);
    Py_DECREF(held_);
  }

  bool entered() const { return held_ != nullptr; }

 private:
  PyObject* held_;
};

}  // namespace dpkern::bindings
