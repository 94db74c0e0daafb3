#pragma once
// Python's objects, as callers need them that CPython's own calls cost too much already.

#include <pybind11/pybind11.h>
#include <structmember.h>

#include <utility>

namespace dpkern::bindings {

// A reference that is dropped at the end of its scope; it may be null.
class Owned {
 public:
  Owned(PyObject* object = nullptr) : object_(object) {}  // takes the reference over
  Owned(Owned&& other) noexcept : object_(other.release()) {}
  Owned& operator=(Owned&& other) noexcept {
    PyObject* const before = object_;
    object_ = other.release();
    Py_XDECREF(before);
    return *this;
  }
  ~Owned() { Py_XDECREF(object_); }

  PyObject* get() const { return object_; }
  PyObject* release() {
    PyObject* const given = object_;
    object_ = nullptr;
    return given;
  }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_;
};

// A place in `__slots__`, as fast to read as a field.
class Slot {
 public:
  Slot() = default;
  Slot(const pybind11::handle& type, const char* name) {
    const pybind11::object found = type.attr(name);
    if (Py_TYPE(found.ptr()) != &PyMemberDescr_Type) throw pybind11::type_error("no slot");
    offset_ = reinterpret_cast<PyMemberDescrObject*>(found.ptr())->d_member->offset;
  }
  // Borrowed; null where nothing was put.
  PyObject*& of(PyObject* object) const {
    return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset_);
  }
  long long number(PyObject* object) const { return PyLong_AsLongLong(of(object)); }
  void put(PyObject* object, long long number) const {
    const Owned before(std::exchange(of(object), PyLong_FromLongLong(number)));
  }

 private:
  Py_ssize_t offset_ = 0;
};

}  // namespace dpkern::bindings
