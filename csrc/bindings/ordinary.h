#pragma once
// Tensors of subclasses are ordinary ones inside, as in ``with without_torch_function():``.

#include <pybind11/pybind11.h>

#include <utility>
#include <vector>

namespace dpkern::bindings {

// The context that torch has for it, entered and left by its own functions. To look these up and to
// make a context each time takes longer than what they do, above all where a step's kernels have
// swept Python's code out of the caches. Contexts of another kind are entered by name.
class Ordinary {
 public:
  // The context's class; ``entered()`` is false with a Python error.
  explicit Ordinary(PyObject* context) : known_(known(context)), held_(known_.take()) {
    PyObject* const done = held_ == nullptr ? nullptr : known_.entered(held_);
    if (done == nullptr) Py_CLEAR(held_);
    Py_XDECREF(done);
  }
  Ordinary(const Ordinary&) = delete;
  Ordinary& operator=(const Ordinary&) = delete;
  ~Ordinary() {
    if (held_ == nullptr) return;
    PyObject *type = nullptr, *error = nullptr, *trace = nullptr;
    const bool failed = PyErr_Occurred() != nullptr;
    if (failed) PyErr_Fetch(&type, &error, &trace);
    PyObject* const done = known_.left(held_);
    if (done == nullptr) PyErr_WriteUnraisable(held_);
    Py_XDECREF(done);
    if (failed) PyErr_Restore(type, error, trace);
    known_.unused.push_back(held_);
  }

  bool entered() const { return held_ != nullptr; }

 private:
  // A class of contexts, and those of them that nothing is inside of now: whoever holds Python's
  // lock takes one, as a context knows one thing only, what was in force around it.
  struct Known {
    explicit Known(PyObject* context)
        : type(context),
          enter(function(context, "__enter__", METH_NOARGS)),
          exit(function(context, "__exit__", METH_VARARGS)),
          nothing(PyTuple_Pack(3, Py_None, Py_None, Py_None)) {}

    static PyCFunction function(PyObject* context, const char* name, int flags) {
      const auto found =
          pybind11::reinterpret_steal<pybind11::object>(PyObject_GetAttrString(context, name));
      if (!found) PyErr_Clear();
      if (!found || Py_TYPE(found.ptr()) != &PyMethodDescr_Type) return nullptr;
      const PyMethodDef* const method =
          reinterpret_cast<PyMethodDescrObject*>(found.ptr())->d_method;
      return method->ml_flags == flags ? method->ml_meth : nullptr;
    }

    PyObject* entered(PyObject* held) const {
      if (enter != nullptr) return enter(held, nullptr);
      return PyObject_CallMethod(held, "__enter__", nullptr);
    }
    PyObject* left(PyObject* held) const {
      if (exit != nullptr) return exit(held, nothing);
      return PyObject_CallMethod(held, "__exit__", "OOO", Py_None, Py_None, Py_None);
    }

    // A new reference; null with an error.
    PyObject* take() {
      if (unused.empty()) return PyObject_CallNoArgs(type);
      PyObject* const taken = unused.back();
      unused.pop_back();
      return taken;
    }

    PyObject* type;
    PyCFunction enter, exit;
    PyObject* nothing;
    std::vector<PyObject*> unused;
  };

  // There is one class of contexts, torch's.
  static Known& known(PyObject* context) {
    static Known* const made = new Known(pybind11::handle(context).inc_ref().ptr());
    return *made;
  }

  Known& known_;
  PyObject* held_;
};

}  // namespace dpkern::bindings
