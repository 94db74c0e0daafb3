#pragma once
// Tables of Python objects, compared by identity.

#include <Python.h>

namespace dpkern::bindings {

// Whether a dict holds the keys and values of a tuple (key, value, key, value, ...), as the same
// objects in the same order; with an error where an order of its own cannot be walked.
bool holds(PyObject* table, PyObject* entries);

// Whether each dict of a list holds the tuple at the same place of the other list.
bool hold(PyObject* tables, PyObject* entries);

}  // namespace dpkern::bindings
