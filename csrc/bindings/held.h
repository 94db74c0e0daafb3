#pragma once
// C++ objects that Python holds, which hold objects of Python in turn: its collector sees through
// them, so that they keep nothing alive in a ring.

#include <pybind11/pybind11.h>

#include <memory>
#include <utility>

namespace dpkern::bindings {

// T has `int visit(visitproc, void*) const`, which visits all that it holds. Methods are plain ones
// of CPython's, which cost less than pybind11's.
template <class T>
class Held {
 public:
  // The type, which is made at the first call.
  static PyTypeObject* type(const char* name, PyMethodDef* methods) {
    static PyTypeObject* const made = [&] {
      PyType_Slot slots[] = {{Py_tp_methods, methods},
                             {Py_tp_traverse, reinterpret_cast<void*>(&traverse)},
                             {Py_tp_clear, reinterpret_cast<void*>(&clear)},
                             {Py_tp_dealloc, reinterpret_cast<void*>(&destroy)},
                             {0, nullptr}};
      PyType_Spec spec{name, sizeof(Object), 0,
                       Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                       slots};
      return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
    }();
    if (made == nullptr) throw pybind11::error_already_set();
    return made;
  }

  static pybind11::object make(PyTypeObject* type, std::unique_ptr<T> held) {
    PyObject* const made = type->tp_alloc(type, 0);
    if (made == nullptr) throw pybind11::error_already_set();
    reinterpret_cast<Object*>(made)->held = held.release();
    return pybind11::reinterpret_steal<pybind11::object>(made);
  }

  // Of an object of the type; null once the collector has cleared it.
  static T* of(PyObject* self) { return reinterpret_cast<Object*>(self)->held; }

 private:
  struct Object {
    PyObject_HEAD T* held;
  };

  static int traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    const T* const held = of(self);
    return held == nullptr ? 0 : held->visit(visit, arg);
  }

  static int clear(PyObject* self) {
    delete std::exchange(reinterpret_cast<Object*>(self)->held, nullptr);
    return 0;
  }

  static void destroy(PyObject* self) {
    PyTypeObject* const type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    clear(self);
    type->tp_free(self);
    Py_DECREF(type);
  }
};

}  // namespace dpkern::bindings
