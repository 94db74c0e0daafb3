#include "bindings/composed.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <array>

#include "bindings/bindings.h"

namespace py = pybind11;

namespace dpkern::bindings {

Composed::Composed(const py::dict& declared)
    : look_(declared["op"].cast<py::dict>()),
      function_(declared["function"].cast<py::dict>()),
      arguments_(declared["arguments"].cast<std::vector<int>>()),
      sizes_(declared["sizes"].cast<std::vector<int>>()),
      finish_(kept(declared["finish"])),
      refusal_(kept(declared["refusal"])) {}

// Make the tensors that the function fills, of the only dtype that they may have, or else of the
// dtype of the call's sums; ``value`` is None, or another dtype. False: Python knows better.
bool Composed::fill(std::size_t place, Seen& inner) const {
  const Parameter& parameter = function_.look.parameter(place);
  Argument& argument = inner.arguments[place];
  int dtype = torch.place(argument.value);
  if (argument.value == Py_None) {
    dtype = parameter.dtypes.size() == 1
                ? parameter.dtypes[0]
                : torch.dtypes[static_cast<std::size_t>(inner.kind_of_call)].sum;
  }
  const auto found = std::find(parameter.dtypes.begin(), parameter.dtypes.end(), dtype);
  if (found == parameter.dtypes.end()) return false;
  argument.kind = static_cast<int>(found - parameter.dtypes.begin());
  argument.made = true;

  std::vector<std::int64_t> fixed;
  for (std::size_t i = 0; i < parameter.dims.size(); ++i) {
    fixed.push_back(inner.size(parameter.dims[i]));
  }
  const auto make = [&](const Shape& rest) -> PyObject* {
    std::vector<std::int64_t> shape = fixed;
    shape.insert(shape.end(), rest.sizes, rest.sizes + rest.dims);
    PyObject* const made = new_tensor(shape, dtype);
    View view;
    // Under some modes of torch new tensors are none.
    const bool seen = made != nullptr && torch.is_tensor(made) &&
                      torch.exchange->view(made, &view) == 0 && has_memory(made, view);
    if (seen) (parameter.many ? argument.many.emplace_back() : argument.data) = view.data;
    if (!seen) Py_XDECREF(made);
    return seen ? made : nullptr;
  };
  if (!parameter.many) {
    PyObject* const made = make({});
    if (made != nullptr) argument.value = inner.own(made);
    return made != nullptr;
  }
  const auto& shapes = inner.sizes[static_cast<std::size_t>(parameter.rest)].shapes;
  PyObject* const list = PyTuple_New(static_cast<Py_ssize_t>(shapes.size()));
  if (list == nullptr) return false;
  argument.value = inner.own(list);
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    PyObject* const made = make(shapes[i]);
    if (made == nullptr) return false;
    PyTuple_SET_ITEM(list, static_cast<Py_ssize_t>(i), made);
  }
  return true;
}

// Put the function's arguments at their places, and look at those that are new.
bool Composed::take(Seen& seen, Seen& inner, PyObject* prepared) const {
  inner.kind_of_call = seen.kind_of_call;
  inner.device = seen.device;
  inner.device_index = seen.device_index;
  inner.first = seen.first;
  for (std::size_t i = 0; i < sizes_.size(); ++i) {
    if (sizes_[i] >= 0) std::swap(inner.sizes[i], seen.sizes[static_cast<std::size_t>(sizes_[i])]);
  }
  Py_ssize_t next = 0;
  for (std::size_t i = 0; i < arguments_.size(); ++i) {
    const Parameter& parameter = function_.look.parameter(i);
    Argument& argument = inner.arguments[i];
    if (arguments_[i] >= 0) {
      const auto place = static_cast<std::size_t>(arguments_[i]);
      std::swap(argument, seen.arguments[place]);
      if (look_.parameter(place).is != Is::kObject) {
        if (parameter.layout == Layout::kContiguous && !argument.packed) return false;
        continue;
      }
    } else {
      if (next == PyTuple_GET_SIZE(prepared)) return false;
      argument.value = PyTuple_GET_ITEM(prepared, next++);
      if (parameter.filled && (argument.value == Py_None || torch.place(argument.value) >= 0)) {
        if (!fill(i, inner)) return false;
        continue;
      }
    }
    if (!function_.look.at(i, inner)) return false;
  }
  return function_.convert(inner);
}

// ``finish(prepared, *filled, counted)``
PyObject* Composed::finish(PyObject* prepared, const Seen& inner, std::int64_t counted) const {
  std::array<PyObject*, 2 + kMostResults> given{prepared};
  std::size_t count = 1;
  for (std::size_t i = 0; i < function_.look.parameters(); ++i) {
    if (function_.look.parameter(i).filled) given[count++] = inner.arguments[i].tensors();
  }
  PyObject* const number = given[count++] = PyLong_FromLongLong(counted);
  if (number == nullptr) return nullptr;
  PyObject* const made = PyObject_Vectorcall(finish_, given.data(), count, nullptr);
  Py_DECREF(number);
  return made;
}

PyObject* Composed::run(Seen& seen, Seen& inner) const {
  const Entry* const kernel = function_.kernel(seen.kind_of_call);
  if (seen.device != kCpu || kernel == nullptr) Py_RETURN_NOTIMPLEMENTED;
  PyObject* const prepared = look_.own_check(seen);
  if (prepared == nullptr) {
    const bool odd = PyErr_ExceptionMatches(PyExc_Exception) != 0;
    if (!odd || PyErr_ExceptionMatches(refusal_) != 0) return nullptr;
    PyErr_Clear();
    Py_RETURN_NOTIMPLEMENTED;
  }
  seen.own(prepared);
  if (!PyTuple_CheckExact(prepared) || !take(seen, inner, prepared)) {
    PyErr_Clear();
    Py_RETURN_NOTIMPLEMENTED;
  }
  for (std::size_t i = 0; i < function_.look.parameters(); ++i) {
    const Argument& argument = inner.arguments[i];
    const bool given = function_.look.parameter(i).filled && !argument.made;
    if (given && !note_change(argument.tensors())) return nullptr;
  }
  std::int64_t counted = 0;
  return function_.run(*kernel, inner, counted) ? finish(prepared, inner, counted) : nullptr;
}

PyObject* Composed::call(PyObject* args, PyObject* names) const {
  const auto seen = look_.begin(), inner = function_.look.begin();
  if (look_.arrange(args, names, *seen) && look_.at(*seen)) return run(*seen, *inner);
  PyErr_Clear();
  Py_RETURN_NOTIMPLEMENTED;
}

}  // namespace dpkern::bindings
