#include "bindings/look.h"

#include <pybind11/stl.h>

#include <algorithm>

#include "bindings/bindings.h"

namespace py = pybind11;

namespace dpkern::bindings {

namespace {

PyObject* size_of(const Shape& shape) {
  PyObject* const made = torch.size->tp_alloc(torch.size, shape.dims);
  for (int i = 0; made != nullptr && i < shape.dims; ++i) {
    PyTuple_SET_ITEM(made, i, PyLong_FromLongLong(shape.sizes[i]));
  }
  return made;
}

PyObject* object_of(const Size& size, int kind) {
  if (kind == 0) return PyLong_FromLongLong(size.number);
  if (kind == 1) return size_of(size.shape);
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(size.shapes.size()));
  for (std::size_t i = 0; list != nullptr && i < size.shapes.size(); ++i) {
    PyObject* const made = size_of(size.shapes[i]);
    PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), made);
    if (made == nullptr) Py_CLEAR(list);
  }
  return list;
}

}  // namespace

Look::Look(const py::dict& declared) {
  sizes_ = declared["sizes"].cast<std::size_t>();
  size_kinds_ = declared["kinds_of_sizes"].cast<std::vector<int>>();
  trusts_ = declared["trusts"].cast<bool>();
  if (!declared["check"].is_none()) check_ = kept(declared["check"]);
  for (const py::handle item : declared["parameters"]) {
    const auto given = item.cast<py::dict>();
    Parameter made;
    made.name = kept(given["name"]);
    PyUnicode_InternInPlace(&made.name);
    if (given.contains("standard")) made.standard = kept(given["standard"]);
    made.is = static_cast<Is>(given["is"].cast<int>());
    made.passed = static_cast<Passed>(given["passed"].cast<int>());
    made.by_name = given["by_name"].cast<bool>();
    if (!made.by_name) ++positional_;
    made.optional = given["optional"].cast<bool>();
    if (made.is == Is::kTensor) {
      made.written = given["written"].cast<bool>();
      made.filled = given["filled"].cast<bool>();
      made.group = static_cast<Group>(given["group"].cast<int>());
      made.dims = given["dims"].cast<std::vector<int>>();
      made.literals = given["literals"].cast<std::vector<std::int64_t>>();
      made.rest = given["rest"].cast<int>();
      made.layout = static_cast<Layout>(given["layout"].cast<int>());
      made.many = given["many"].cast<bool>();
      made.repeated = given["repeated"].cast<bool>();
      made.one_dtype = given["one_dtype"].cast<bool>();
      made.alone = given["alone"].cast<bool>();
      made.may_be_empty = given["may_be_empty"].cast<bool>();
    }
    if (made.is == Is::kTensor || made.is == Is::kDtype) {
      made.dtypes = given["dtypes"].cast<std::vector<int>>();
    }
    if (made.is == Is::kChoice) {
      for (const py::handle option : given["options"]) made.options.push_back(kept(option));
    }
    if (made.is == Is::kInteger) {
      made.least_integer = given["least"].cast<std::int64_t>();
      made.most_integer = given["most"].cast<std::int64_t>();
    }
    if (made.is == Is::kFloat) {
      made.least = given["least"].cast<double>();
      made.most = given["most"].cast<double>();
      made.above = given["above"].cast<bool>();
    }
    made.size = given["size"].cast<int>();
    if (made.passed == Passed::kBytes) made.pack = kept(given["pack"]);
    parameters_.push_back(made);
  }
}

bool Look::arrange(PyObject* args, PyObject* names, Seen& seen) const {
  const auto count = static_cast<std::size_t>(PyTuple_GET_SIZE(args));
  if (count > positional_) return false;
  for (std::size_t i = 0; i < count; ++i) {
    seen.arguments[i].value = PyTuple_GET_ITEM(args, static_cast<Py_ssize_t>(i));
  }
  if (names != nullptr) {
    PyObject* name;
    PyObject* value;
    for (Py_ssize_t at = 0; PyDict_Next(names, &at, &name, &value) != 0;) {
      std::size_t i = 0;
      while (i < parameters_.size() && parameters_[i].name != name) ++i;
      if (i == parameters_.size()) {  // a name that was made at run time, or none of ours
        for (i = 0; i < parameters_.size(); ++i) {
          if (PyUnicode_Compare(parameters_[i].name, name) == 0) break;
        }
      }
      if (i == parameters_.size() || seen.arguments[i].value != nullptr) return false;
      seen.arguments[i].value = value;
    }
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (seen.arguments[i].value != nullptr) continue;
    if (parameters_[i].standard == nullptr) return false;
    seen.arguments[i].value = parameters_[i].standard;
  }
  return true;
}

bool Look::at(Seen& seen) const {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!at(i, seen)) return false;
  }
  return true;
}

bool Look::at(std::size_t place, Seen& seen) const {
  const Parameter& parameter = parameters_[place];
  Argument& argument = seen.arguments[place];
  if (parameter.is == Is::kObject) return true;
  if (parameter.optional && argument.value == Py_None) return true;
  if (parameter.is != Is::kTensor) return value(parameter, argument, seen);
  // What may be missing decides for no other.
  const int kind = seen.kind_of_call;
  const std::int32_t device = seen.device, index = seen.device_index;
  PyObject* const first = seen.first;
  if (!tensors(parameter, argument, seen)) return false;
  if (parameter.optional) {
    seen.kind_of_call = kind;
    seen.device = device, seen.device_index = index;
    seen.first = first;
  }
  return true;
}

bool Look::tensors(const Parameter& parameter, Argument& argument, Seen& seen) const {
  if (!parameter.many) return tensor(parameter, argument.value, 0, argument, seen);
  PyTypeObject* const type = Py_TYPE(argument.value);
  if (parameter.alone && (type == torch.tensor || type == torch.parameter)) {
    PyObject* const list = PyTuple_Pack(1, argument.value);
    if (list == nullptr) return false;
    argument.value = seen.own(list);
  } else if (type == &PyList_Type) {
    // Another thread may change the list while the kernel runs.
    PyObject* const held = PyList_AsTuple(argument.value);
    if (held == nullptr) return false;
    seen.own(held);
    argument.items = held;
  } else if (type != &PyTuple_Type) {
    return false;
  }
  PyObject* const items = argument.tensors();
  const auto count = static_cast<std::size_t>(PyTuple_GET_SIZE(items));
  if (count == 0 && !parameter.may_be_empty) return false;
  argument.many.reserve(count);
  if (parameter.rest >= 0) {
    Size& rest = seen.sizes[parameter.rest];
    const std::size_t known = rest.shapes.size();
    const bool again = parameter.repeated && known != 0 && count % known == 0;
    if (rest.bound && known != count && !again) return false;
    argument.binds = !rest.bound;
    if (argument.binds) rest.shapes.reserve(count);
  }
  for (std::size_t i = 0; i < count; ++i) {
    PyObject* const item = PyTuple_GET_ITEM(items, static_cast<Py_ssize_t>(i));
    if (!tensor(parameter, item, i, argument, seen)) return false;
  }
  if (parameter.rest >= 0) seen.sizes[parameter.rest].bound = true;
  return true;
}

bool Look::tensor(const Parameter& parameter, PyObject* value, std::size_t item, Argument& argument,
                  Seen& seen) const {
  if (!torch.is_tensor(value)) return false;
  View view;
  if (torch.exchange->view(value, &view) != 0) return false;
  if (view.offset != 0 || !has_memory(value, view)) return false;
  if (!trusts_ && is_negated(value)) return false;

  const int dtype = find_dtype(view);
  const auto& allowed = parameter.dtypes;
  if (parameter.group == Group::kLeading && seen.kind_of_call >= 0) {
    if (dtype != seen.kind_of_call) return false;
  } else if (parameter.group == Group::kSum && seen.kind_of_call >= 0) {
    if (dtype != torch.dtypes[seen.kind_of_call].sum) return false;
  } else {
    const auto found = std::find(allowed.begin(), allowed.end(), dtype);
    if (found == allowed.end()) return false;
    if (parameter.group == Group::kLeading) seen.kind_of_call = dtype;
    const int place = static_cast<int>(found - allowed.begin());
    if (item == 0) argument.kind = place;
    if (parameter.one_dtype && place != argument.kind) return false;
  }

  if (seen.device < 0) {
    seen.device = view.device.type;
    seen.device_index = view.device.index;
    seen.first = value;
  } else if (view.device.type != seen.device || view.device.index != seen.device_index) {
    return false;
  }

  const int fixed = static_cast<int>(parameter.dims.size());
  if (parameter.rest == kNoRest ? view.dims != fixed : view.dims < fixed) return false;
  for (int i = 0; i < fixed; ++i) {
    const std::int64_t extent = view.shape[i];
    if (parameter.literals[i] >= 0) {
      if (extent != parameter.literals[i]) return false;
    } else if (parameter.dims[i] != kAnySize) {
      Size& size = seen.sizes[parameter.dims[i]];
      if (size.bound && size.number != extent) return false;
      size.bound = true;
      size.number = extent;
    }
  }
  if (parameter.rest >= 0) {
    const Shape rest{view.shape + fixed, view.dims - fixed};
    Size& size = seen.sizes[parameter.rest];
    if (parameter.many) {
      if (argument.binds) {
        size.shapes.push_back(rest);
      } else if (!(size.shapes[item % size.shapes.size()] == rest)) {
        return false;
      }
    } else if (!size.bound) {
      size.bound = true;
      size.shape = rest;
    } else if (!(size.shape == rest)) {
      return false;
    }
  }

  const bool packed = is_contiguous(view);
  if (parameter.layout == Layout::kContiguous && !packed) return false;
  if (parameter.layout == Layout::kTransposable && !packed && !is_transposed(view)) return false;
  argument.transposed = !packed;
  argument.packed = argument.packed && packed;
  if (parameter.many) {
    argument.many.push_back(view.data);
  } else {
    argument.data = view.data;
  }
  return true;
}

bool Look::value(const Parameter& parameter, Argument& argument, Seen& seen) const {
  PyObject* const given = argument.value;
  switch (parameter.is) {
    case Is::kChoice: {
      if (Py_TYPE(given) != Py_TYPE(parameter.options[0])) return false;
      for (std::size_t i = 0; i < parameter.options.size(); ++i) {
        const int same = given == parameter.options[i]
                             ? 1
                             : PyObject_RichCompareBool(given, parameter.options[i], Py_EQ);
        if (same < 0) return false;
        if (same == 1) {
          argument.integer = static_cast<std::int64_t>(i);
          return true;
        }
      }
      return false;
    }
    case Is::kInteger: {
      if (!PyLong_CheckExact(given)) return false;
      int overflow = 0;
      const std::int64_t number = PyLong_AsLongLongAndOverflow(given, &overflow);
      if (overflow != 0 || number < parameter.least_integer || number > parameter.most_integer) {
        return false;
      }
      argument.integer = number;
      if (parameter.size >= 0) {
        seen.sizes[parameter.size].bound = true;
        seen.sizes[parameter.size].number = number;
      }
      return true;
    }
    case Is::kFloat: {
      if (!PyFloat_CheckExact(given)) return false;
      const double number = PyFloat_AS_DOUBLE(given);
      const bool large = parameter.above ? number > parameter.least : number >= parameter.least;
      return large && number <= parameter.most;
    }
    case Is::kBool:
      return given == Py_True || given == Py_False;
    case Is::kDtype: {
      const int dtype = torch.place(given);
      if (std::find(parameter.dtypes.begin(), parameter.dtypes.end(), dtype) ==
          parameter.dtypes.end()) {
        return false;
      }
      seen.kind_of_call = dtype;
      return true;
    }
    case Is::kDevice:
      // Whether other devices exist is nothing for one look.
      if (PyUnicode_CheckExact(given)) {
        if (PyUnicode_CompareWithASCIIString(given, "cpu") != 0) return false;
      } else if (Py_TYPE(given) != Py_TYPE(torch.cpu) ||
                 PyObject_RichCompareBool(given, torch.cpu, Py_EQ) != 1) {
        return false;
      }
      seen.device = kCpu;
      seen.device_index = 0;
      return true;
    default:
      return true;
  }
}

PyObject* Look::own_check(const Seen& seen) const {
  if (check_ == nullptr) Py_RETURN_NONE;
  std::vector<PyObject*> values;
  values.reserve(parameters_.size());
  for (const Argument& argument : seen.arguments) values.push_back(argument.value);
  return PyObject_Vectorcall(check_, values.data(), values.size(), nullptr);
}

PyObject* Look::bound(const Seen& seen, PyObject* plan) const {
  const auto count = static_cast<Py_ssize_t>(parameters_.size());
  PyObject* const args = PyTuple_New(count);
  if (args == nullptr) return nullptr;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyTuple_SET_ITEM(args, i, Py_NewRef(seen.arguments[static_cast<std::size_t>(i)].value));
  }
  PyObject* sizes = PyTuple_New(static_cast<Py_ssize_t>(size_kinds_.size()));
  for (std::size_t i = 0; sizes != nullptr && i < size_kinds_.size(); ++i) {
    PyObject* const made = object_of(seen.sizes[i], size_kinds_[i]);
    PyTuple_SET_ITEM(sizes, static_cast<Py_ssize_t>(i), made);
    if (made == nullptr) Py_CLEAR(sizes);
  }
  PyObject* const kind =
      Py_NewRef(seen.kind_of_call < 0 ? Py_None : torch.dtypes[seen.kind_of_call].object);
  PyObject* const device = seen.device < 0 || seen.device == kCpu
                               ? Py_NewRef(torch.cpu)
                               : PyObject_GetAttrString(seen.first, "device");
  PyObject* const made =
      sizes == nullptr || device == nullptr ? nullptr : torch.bound->tp_alloc(torch.bound, 5);
  if (made == nullptr) {
    Py_DECREF(args);
    Py_XDECREF(sizes);
    Py_DECREF(kind);
    Py_XDECREF(device);
    return nullptr;
  }
  PyTuple_SET_ITEM(made, 0, args);
  PyTuple_SET_ITEM(made, 1, sizes);
  PyTuple_SET_ITEM(made, 2, kind);
  PyTuple_SET_ITEM(made, 3, device);
  PyTuple_SET_ITEM(made, 4, Py_NewRef(plan));
  return made;
}

}  // namespace dpkern::bindings
