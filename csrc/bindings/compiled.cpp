#include "bindings/compiled.h"

#include <pybind11/stl.h>

#include <string>

#include "bindings/bindings.h"

namespace py = pybind11;

namespace dpkern::bindings {
namespace {

PyObject* kept_if_any(const py::handle& object) {
  return object.is_none() ? nullptr : kept(object);
}

bool integer_of(PyObject* value, std::int64_t& into) {
  if (!PyLong_CheckExact(value)) return false;
  into = PyLong_AsLongLong(value);
  return into != -1 || PyErr_Occurred() == nullptr;
}

bool float_of(PyObject* value, double& into) {
  if (!PyFloat_CheckExact(value) && !PyLong_CheckExact(value)) return false;
  into = PyFloat_AsDouble(value);
  return into != -1 || PyErr_Occurred() == nullptr;
}

template <class T>
bool list_of(PyObject* value, bool (*number_of)(PyObject*, T&), std::vector<T>& into) {
  if (!PyList_CheckExact(value) && !PyTuple_CheckExact(value)) return false;
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(value);
  into.resize(static_cast<std::size_t>(count));
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* const item = PySequence_Fast_GET_ITEM(value, i);
    if (!number_of(item, into[static_cast<std::size_t>(i)])) return false;
  }
  return true;
}

}  // namespace

Compiled::Compiled(const py::dict& declared) : look(declared) {
  for (const auto& name : declared["kernels"].cast<std::vector<std::string>>()) {
    const Entry* const known = name.empty() ? nullptr : entry(name);
    if (!name.empty() &&
        (known == nullptr || declared["declaration"].cast<std::string>() != known->declaration)) {
      throw py::value_error("the module was built of another declaration of " + name);
    }
    entries_.push_back(known);
  }
  threads_ = kept(declared["threads"]);
}

const Entry* Compiled::kernel(int kind_of_call) const {
  if (entries_.size() == 1) return entries_[0];
  return entries_[kind_of_call < 0 ? torch.dtypes.size() : static_cast<std::size_t>(kind_of_call)];
}

bool Compiled::convert(Seen& seen) const {
  for (std::size_t i = 0; i < look.parameters(); ++i) {
    const Parameter& parameter = look.parameter(i);
    Argument& argument = seen.arguments[i];
    if (parameter.passed == Passed::kNot || (parameter.optional && !argument.given())) continue;
    bool fits = true;
    switch (parameter.passed) {
      case Passed::kInteger:
        fits = integer_of(argument.value, argument.integer);
        break;
      case Passed::kWord:
        fits = PyLong_CheckExact(argument.value);
        argument.word = fits ? PyLong_AsUnsignedLongLong(argument.value) : 0;
        fits = fits && PyErr_Occurred() == nullptr;
        break;
      case Passed::kFloat:
        fits = float_of(argument.value, argument.number);
        break;
      case Passed::kBool:
        argument.integer = argument.value == Py_True;
        fits = argument.value == Py_True || argument.value == Py_False;
        break;
      case Passed::kIntegers:
        fits = list_of<std::int64_t>(argument.value, integer_of, argument.integers);
        break;
      case Passed::kFloats:
        fits = list_of<double>(argument.value, float_of, argument.numbers);
        break;
      default: {
        PyObject* const packed = PyObject_CallOneArg(parameter.pack, argument.value);
        fits = packed != nullptr && PyBytes_CheckExact(seen.own(packed));
        if (fits) {
          argument.bytes = {PyBytes_AS_STRING(packed),
                            static_cast<std::size_t>(PyBytes_GET_SIZE(packed))};
        }
      }
    }
    if (!fits) return false;
  }
  return true;
}

bool Compiled::run(const Entry& kernel, Seen& seen, std::int64_t& counted) const {
  PyObject* const most = PyObject_CallNoArgs(threads_);
  const long team = most == nullptr ? -1 : PyLong_AsLong(most);
  Py_XDECREF(most);
  if (team < 0) return false;
  counted = kernel.run(seen, static_cast<int>(team));
  for (std::size_t i = 0; i < look.parameters(); ++i) {
    const Argument& argument = seen.arguments[i];
    if (!look.parameter(i).written || static_cast<int>(i) == out || !argument.given()) continue;
    if (!note_change(argument.tensors())) return false;
  }
  return true;
}

Caller::Caller(const py::dict& declared) : compiled_(declared) {
  for (const py::handle item : declared["results"]) {
    const auto given = item.cast<py::dict>();
    results_.push_back({static_cast<Group>(given["group"].cast<int>()), given["dtype"].cast<int>(),
                        given["parts"].cast<std::vector<std::vector<int>>>(),
                        given["literals"].cast<std::vector<std::int64_t>>(),
                        given["rest"].cast<int>()});
  }
  if (results_.size() > kMostResults) throw py::value_error("too many results");
  compiled_.out = declared["out"].cast<int>();
  returns_ = static_cast<Returns>(declared["returns"].cast<int>());
  changed_ = declared["changed"].cast<int>();
  made_into_ = kept_if_any(declared["made_into"]);
  found_ = kept_if_any(declared["found"]);
}

PyObject* Caller::make(const Result& result, const Seen& seen) const {
  std::vector<std::int64_t> shape;
  for (std::size_t i = 0; i < result.parts.size(); ++i) {
    std::int64_t extent = result.literals[i];
    for (const int part : result.parts[i]) extent *= seen.size(part);
    shape.push_back(extent);
  }
  if (result.rest != kNoRest) {
    const Shape& rest = seen.sizes[static_cast<std::size_t>(result.rest)].shape;
    shape.insert(shape.end(), rest.sizes, rest.sizes + rest.dims);
  }
  if (result.group == Group::kOwn) return new_tensor(shape, result.dtype);
  const int kind = seen.kind_of_call;
  const bool leads = result.group == Group::kLeading;
  return new_tensor(shape, leads ? kind : torch.dtypes[static_cast<std::size_t>(kind)].sum);
}

PyObject* Caller::answer(const Seen& seen, PyObject* plan, std::int64_t counted,
                         PyObject* made) const {
  if (found_ != nullptr && counted != 0) {
    PyObject* const bound = compiled_.look.bound(seen, plan);
    PyObject* const count = PyLong_FromLongLong(counted);
    PyObject* const said = bound == nullptr || count == nullptr
                               ? nullptr
                               : PyObject_CallFunctionObjArgs(found_, count, bound, made, nullptr);
    Py_XDECREF(bound);
    Py_XDECREF(count);
    Py_XDECREF(said);
    if (said == nullptr) return nullptr;
  }
  switch (returns_) {
    case Returns::kNumber:
      return PyLong_FromLongLong(counted);
    case Returns::kChanged:
      return Py_NewRef(seen.arguments[static_cast<std::size_t>(changed_)].value);
    case Returns::kNothing:
      Py_RETURN_NONE;
    default:
      break;
  }
  if (made_into_ != nullptr) {
    PyObject* const given = PyTuple_Pack(1, made);
    PyObject* const tuple =
        given == nullptr
            ? nullptr
            : PyTuple_Type.tp_new(reinterpret_cast<PyTypeObject*>(made_into_), given, nullptr);
    Py_XDECREF(given);
    return tuple;
  }
  return Py_NewRef(results_.size() == 1 ? PyTuple_GET_ITEM(made, 0) : made);
}

PyObject* Caller::run(Seen& seen) const {
  if (seen.device >= 0 && seen.device != kCpu) Py_RETURN_NOTIMPLEMENTED;
  const Entry* const kernel = compiled_.kernel(seen.kind_of_call);
  if (kernel == nullptr) Py_RETURN_NOTIMPLEMENTED;
  PyObject* const plan = compiled_.look.own_check(seen);
  if (plan == nullptr) return nullptr;
  seen.own(plan);
  if (!compiled_.convert(seen)) {
    PyErr_Clear();
    Py_RETURN_NOTIMPLEMENTED;
  }
  PyObject* const made = PyTuple_New(static_cast<Py_ssize_t>(results_.size()));
  if (made == nullptr) return nullptr;
  seen.own(made);
  const int out = compiled_.out;
  const Argument* const room = out >= 0 && seen.arguments[static_cast<std::size_t>(out)].given()
                                   ? &seen.arguments[static_cast<std::size_t>(out)]
                                   : nullptr;
  const bool several = room != nullptr && PyTuple_Check(room->value);
  if (several && PyTuple_GET_SIZE(room->value) != static_cast<Py_ssize_t>(results_.size())) {
    Py_RETURN_NOTIMPLEMENTED;
  }
  for (std::size_t i = 0; i < results_.size(); ++i) {
    const auto place_of = static_cast<Py_ssize_t>(i);
    PyObject* const result = room == nullptr ? make(results_[i], seen)
                             : several       ? Py_NewRef(PyTuple_GET_ITEM(room->value, place_of))
                                             : Py_NewRef(room->value);
    if (result == nullptr) return nullptr;
    PyTuple_SET_ITEM(made, place_of, result);
    View view;
    // Under some modes of torch new tensors are none, or have no memory.
    if (!torch.is_tensor(result) || torch.exchange->view(result, &view) != 0 ||
        !has_memory(result, view)) {
      PyErr_Clear();
      Py_RETURN_NOTIMPLEMENTED;
    }
    seen.results[i] = view.data;
  }
  if (room != nullptr && !note_change(room->value)) return nullptr;
  std::int64_t counted = 0;
  return compiled_.run(*kernel, seen, counted) ? answer(seen, plan, counted, made) : nullptr;
}

PyObject* Caller::call(PyObject* args, PyObject* names) const {
  const auto seen = compiled_.look.begin();
  if (compiled_.look.arrange(args, names, *seen) && compiled_.look.at(*seen)) return run(*seen);
  PyErr_Clear();
  Py_RETURN_NOTIMPLEMENTED;
}

}  // namespace dpkern::bindings
