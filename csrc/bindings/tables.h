#pragma once
// Tables of Python objects, compared by identity.

#include <Python.h>

#include <cstdint>

namespace dpkern::bindings {

// Whether a dict holds the keys and values of a tuple (key, value, key, value, ...), as the same
// objects in the same order; with an error where an order of its own cannot be walked.
bool holds(PyObject* table, PyObject* entries);

// Whether each dict of a list holds the tuple at the same place of the other list.
bool hold(PyObject* tables, PyObject* entries);

// A number that no other dict has had, nor this one with other entries; 0 where Python keeps none:
// 3.11 has them (PEP 509), later versions do not.
#if PY_VERSION_HEX < 0x030C0000
inline std::uint64_t change_of(PyObject* table) {
  return reinterpret_cast<const PyDictObject*>(table)->ma_version_tag;
}
#else
inline std::uint64_t change_of(PyObject*) { return 0; }
#endif

}  // namespace dpkern::bindings
