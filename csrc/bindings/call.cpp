// Ops as Python calls them: looked at, and where their kernel is compiled run as well, in one call.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>

#include "bindings/bindings.h"
#include "bindings/look.h"

namespace py = pybind11;

namespace dpkern::bindings {
namespace {

// A result that is made here.
struct Result {
  Group group;
  int dtype;                            // of a group of one
  std::vector<std::vector<int>> parts;  // each dimension: the sizes that it is the product of
  std::vector<std::int64_t> literals;   // and a number
  int rest;                             // place of *S behind them, or kNoRest
};

enum class Returns { kNothing, kResults, kNumber, kChanged };

struct Declared {
  explicit Declared(const py::dict& declared) : look(declared) {}
  Look look;
};

// ``bind(...)``: the call bound, by Python where one look is not enough.
struct Binder : Declared {
  Binder(const py::dict& declared, PyObject* python) : Declared(declared), python(python) {}
  PyObject* python;
};

// ``run(...)``: what the kernel returns, or NotImplemented where one look is not enough.
struct Caller : Declared {
  explicit Caller(const py::dict& declared);

  PyObject* run(Seen& seen) const;

 private:
  bool convert(Seen& seen) const;
  PyObject* make(const Result& result, const Seen& seen) const;
  bool note_changes(const Seen& seen) const;
  PyObject* answer(const Seen& seen, PyObject* plan, std::int64_t counted, PyObject* made) const;

  std::vector<const Entry*> entries;  // by dtype; one behind them for a call without
  std::vector<Result> results;
  int out = -1;
  Returns returns = Returns::kNothing;
  int changed = -1;
  PyObject* made_into = nullptr;
  PyObject* found = nullptr;
  PyObject* threads = nullptr;
  PyObject* python = nullptr;  // a kernel in Python, which takes the bound call
};

PyObject* kept(const py::handle& object) {
  return object.is_none() ? nullptr : object.inc_ref().ptr();
}

Caller::Caller(const py::dict& declared) : Declared(declared) {
  if (declared.contains("python")) {
    python = kept(declared["python"]);
    return;
  }
  const auto kernels = declared["kernels"].cast<std::vector<std::string>>();
  for (const std::string& name : kernels) {
    const Entry* const known = name.empty() ? nullptr : entry(name);
    if (!name.empty() &&
        (known == nullptr || declared["declaration"].cast<std::string>() != known->declaration)) {
      throw py::value_error("the module was built of another declaration of " + name);
    }
    entries.push_back(known);
  }
  for (const py::handle item : declared["results"]) {
    const auto given = item.cast<py::dict>();
    results.push_back({static_cast<Group>(given["group"].cast<int>()), given["dtype"].cast<int>(),
                       given["parts"].cast<std::vector<std::vector<int>>>(),
                       given["literals"].cast<std::vector<std::int64_t>>(),
                       given["rest"].cast<int>()});
  }
  if (results.size() > kMostResults) throw py::value_error("too many results");
  out = declared["out"].cast<int>();
  returns = static_cast<Returns>(declared["returns"].cast<int>());
  changed = declared["changed"].cast<int>();
  made_into = kept(declared["made_into"]);
  found = kept(declared["found"]);
  threads = kept(declared["threads"]);
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

bool Caller::convert(Seen& seen) const {
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

PyObject* numbers(const std::vector<std::int64_t>& values) {
  PyObject* const made = PyTuple_New(static_cast<Py_ssize_t>(values.size()));
  for (std::size_t i = 0; made != nullptr && i < values.size(); ++i) {
    PyTuple_SET_ITEM(made, static_cast<Py_ssize_t>(i), PyLong_FromLongLong(values[i]));
  }
  return made;
}

// A new tensor, contiguous and not filled; empty_strided reads its arguments sooner than empty.
PyObject* made(const std::vector<std::int64_t>& shape, PyObject* dtype) {
  std::vector<std::int64_t> strides(shape.size());
  std::int64_t stride = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= std::max<std::int64_t>(shape[i], 1);
  }
  static PyObject* const names = Py_BuildValue("(ss)", "dtype", "device");
  PyObject* given[] = {nullptr, numbers(shape), numbers(strides), dtype, torch.cpu};
  PyObject* const tensor = PyObject_Vectorcall(torch.empty_strided, given + 1,
                                               2 | PY_VECTORCALL_ARGUMENTS_OFFSET, names);
  Py_XDECREF(given[1]);
  Py_XDECREF(given[2]);
  return tensor;
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
  int dtype = result.dtype;
  if (result.group != Group::kOwn) {
    dtype = seen.kind_of_call;
    if (result.group == Group::kSum) dtype = torch.dtypes[static_cast<std::size_t>(dtype)].sum;
  }
  return made(shape, torch.dtypes[static_cast<std::size_t>(dtype)].object);
}

// Count up the versions of what the kernel has written.
bool Caller::note_changes(const Seen& seen) const {
  for (std::size_t i = 0; i < look.parameters(); ++i) {
    const Argument& argument = seen.arguments[i];
    if (!look.parameter(i).written || static_cast<int>(i) == out) continue;
    PyObject* const given = argument.items != nullptr ? argument.items : argument.value;
    PyObject* const done = PyObject_CallOneArg(torch.changed, given);
    Py_XDECREF(done);
    if (done == nullptr) return false;
  }
  return true;
}

PyObject* Caller::answer(const Seen& seen, PyObject* plan, std::int64_t counted,
                         PyObject* made) const {
  if (found != nullptr && counted != 0) {
    PyObject* const bound = look.bound(seen, plan);
    PyObject* const count = PyLong_FromLongLong(counted);
    PyObject* const said = bound == nullptr || count == nullptr
                               ? nullptr
                               : PyObject_CallFunctionObjArgs(found, count, bound, made, nullptr);
    Py_XDECREF(bound);
    Py_XDECREF(count);
    Py_XDECREF(said);
    if (said == nullptr) return nullptr;
  }
  switch (returns) {
    case Returns::kNumber:
      return PyLong_FromLongLong(counted);
    case Returns::kChanged:
      return Py_NewRef(seen.arguments[static_cast<std::size_t>(changed)].value);
    case Returns::kNothing:
      Py_RETURN_NONE;
    default:
      break;
  }
  if (made_into != nullptr) {
    PyObject* const given = PyTuple_Pack(1, made);
    PyObject* const tuple =
        given == nullptr
            ? nullptr
            : PyTuple_Type.tp_new(reinterpret_cast<PyTypeObject*>(made_into), given, nullptr);
    Py_XDECREF(given);
    return tuple;
  }
  return Py_NewRef(results.size() == 1 ? PyTuple_GET_ITEM(made, 0) : made);
}

PyObject* Caller::run(Seen& seen) const {
  if (seen.device >= 0 && seen.device != kCpu) Py_RETURN_NOTIMPLEMENTED;
  if (python != nullptr) {
    PyObject* const plan = look.own_check(seen);
    if (plan == nullptr) return nullptr;
    PyObject* const bound = look.bound(seen, seen.own(plan));
    return bound == nullptr ? nullptr : PyObject_CallOneArg(python, seen.own(bound));
  }
  const std::size_t place =
      seen.kind_of_call < 0 ? torch.dtypes.size() : static_cast<std::size_t>(seen.kind_of_call);
  const Entry* const kernel = entries.size() == 1 ? entries[0] : entries[place];
  if (kernel == nullptr) Py_RETURN_NOTIMPLEMENTED;
  PyObject* const plan = look.own_check(seen);
  if (plan == nullptr) return nullptr;
  seen.own(plan);
  if (!convert(seen)) {
    PyErr_Clear();
    Py_RETURN_NOTIMPLEMENTED;
  }
  PyObject* const made = PyTuple_New(static_cast<Py_ssize_t>(results.size()));
  if (made == nullptr) return nullptr;
  seen.own(made);
  const Argument* const room = out >= 0 && seen.arguments[static_cast<std::size_t>(out)].given()
                                   ? &seen.arguments[static_cast<std::size_t>(out)]
                                   : nullptr;
  const bool several = room != nullptr && PyTuple_CheckExact(room->value);
  if (several && PyTuple_GET_SIZE(room->value) != static_cast<Py_ssize_t>(results.size())) {
    Py_RETURN_NOTIMPLEMENTED;
  }
  for (std::size_t i = 0; i < results.size(); ++i) {
    const auto place_of = static_cast<Py_ssize_t>(i);
    PyObject* const result = room == nullptr ? make(results[i], seen)
                             : several       ? Py_NewRef(PyTuple_GET_ITEM(room->value, place_of))
                                             : Py_NewRef(room->value);
    if (result == nullptr) return nullptr;
    PyTuple_SET_ITEM(made, place_of, result);
    View view;
    // Under some modes of torch new tensors are none.
    if (Py_TYPE(result) != torch.tensor && Py_TYPE(result) != torch.parameter) {
      Py_RETURN_NOTIMPLEMENTED;
    }
    if (torch.exchange->view(result, &view) != 0) {
      PyErr_Clear();
      Py_RETURN_NOTIMPLEMENTED;
    }
    seen.results[i] = view.data;
  }
  if (room != nullptr) {
    PyObject* const done = PyObject_CallOneArg(torch.changed, room->value);
    Py_XDECREF(done);
    if (done == nullptr) return nullptr;
  }
  PyObject* const most = PyObject_CallNoArgs(threads);
  const long team = most == nullptr ? -1 : PyLong_AsLong(most);
  Py_XDECREF(most);
  if (team < 0) return nullptr;
  const std::int64_t counted = kernel->run(seen, static_cast<int>(team));
  return note_changes(seen) ? answer(seen, plan, counted, made) : nullptr;
}

// The Python objects of both; what they hold lives as long as the process.
template <class T>
struct Object {
  PyObject_HEAD T* of;
};

template <class T>
void destroy(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  delete reinterpret_cast<Object<T>*>(self)->of;
  type->tp_free(self);
  Py_DECREF(type);
}

// A call of Python's; no exception of C++ leaves it.
template <class T, PyObject* (*run)(const T& of, PyObject* args, PyObject* names)>
PyObject* guarded(PyObject* self, PyObject* args, PyObject* names) {
  try {
    return run(*reinterpret_cast<Object<T>*>(self)->of, args, names);
  } catch (const py::builtin_exception& error) {
    error.set_error();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

PyObject* call_binder(const Binder& binder, PyObject* args, PyObject* names) {
  {
    Seen seen(binder.look.parameters(), binder.look.named());
    if (binder.look.arrange(args, names, seen) && binder.look.at(seen)) {
      PyObject* const plan = binder.look.own_check(seen);
      return plan == nullptr ? nullptr : binder.look.bound(seen, seen.own(plan));
    }
  }
  PyErr_Clear();
  return PyObject_Call(binder.python, args, names);
}

PyObject* call_caller(const Caller& caller, PyObject* args, PyObject* names) {
  Seen seen(caller.look.parameters(), caller.look.named());
  if (caller.look.arrange(args, names, seen) && caller.look.at(seen)) return caller.run(seen);
  PyErr_Clear();
  Py_RETURN_NOTIMPLEMENTED;
}

template <class T, class... Given>
py::object object(const char* name, ternaryfunc call, Given&&... given) {
  static PyTypeObject* const type = [&] {
    PyType_Slot slots[] = {{Py_tp_call, reinterpret_cast<void*>(call)},
                           {Py_tp_dealloc, reinterpret_cast<void*>(&destroy<T>)},
                           {0, nullptr}};
    PyType_Spec spec{name, sizeof(Object<T>), 0,
                     Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
    return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  }();
  if (type == nullptr) throw py::error_already_set();
  auto of = std::make_unique<T>(std::forward<Given>(given)...);
  PyObject* const made = type->tp_alloc(type, 0);
  if (made == nullptr) throw py::error_already_set();
  reinterpret_cast<Object<T>*>(made)->of = of.release();
  return py::reinterpret_steal<py::object>(made);
}

// Take what is needed of torch; whether its exchange works as it is used here.
bool connect(const py::dict& given) {
  const py::object capsule = given["exchange"];
  if (PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api") == 0) return false;
  torch.exchange =
      static_cast<const Exchange*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (torch.exchange->major != kExchangeMajor || torch.exchange->view == nullptr) return false;
  torch.dtypes.clear();
  for (const py::handle item : given["dtypes"]) {
    const auto row = item.cast<py::tuple>();
    torch.dtypes.push_back({row[0].cast<std::uint8_t>(), row[1].cast<std::uint8_t>(), kept(row[2]),
                            row[3].cast<int>()});
  }
  const auto type = [&](const char* name) {
    return reinterpret_cast<PyTypeObject*>(kept(given[name]));
  };
  torch.tensor = type("tensor");
  torch.parameter = type("parameter");
  torch.size = type("size");
  torch.bound = type("bound");
  torch.cpu = kept(given["cpu"]);
  torch.is_negated = kept(given["is_negated"]);
  torch.empty_strided = kept(given["empty_strided"]);
  torch.changed = kept(given["changed"]);
  return true;
}

// What the exchange says of a tensor: address, shape, strides, dtype's place, device's type.
py::tuple viewed(const py::object& tensor) {
  View view;
  if (torch.exchange->view(tensor.ptr(), &view) != 0) throw py::error_already_set();
  py::list shape, strides;
  for (int i = 0; i < view.dims; ++i) {
    shape.append(view.shape[i]);
    strides.append(view.strides[i]);
  }
  return py::make_tuple(reinterpret_cast<std::uintptr_t>(view.data), py::tuple(shape),
                        py::tuple(strides), view.dtype.code, view.dtype.bits, view.dtype.lanes,
                        view.device.type, view.offset);
}

PyObject* call_alike(PyObject*, PyObject* const* args, Py_ssize_t count) {
  const bool made = count == 4 && alike(args[0], args[1], args[2], args[3] == Py_True);
  PyErr_Clear();
  return PyBool_FromLong(made);
}

PyMethodDef kAlike{"alike",
                   reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call_alike)),
                   METH_FASTCALL, "alike(tensors, shapes, dtypes, contiguous)"};

PyObject* empty(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 2 || !PyTuple_Check(args[0])) {
    PyErr_SetString(PyExc_TypeError, "empty(shape, dtype)");
    return nullptr;
  }
  std::vector<std::int64_t> shape(static_cast<std::size_t>(PyTuple_GET_SIZE(args[0])));
  for (std::size_t i = 0; i < shape.size(); ++i) {
    shape[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(args[0], static_cast<Py_ssize_t>(i)));
  }
  return PyErr_Occurred() != nullptr ? nullptr : made(shape, args[1]);
}

PyMethodDef kEmpty{"empty", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&empty)),
                   METH_FASTCALL,
                   "empty(shape, dtype): a new tensor on the CPU, contiguous and not filled."};

}  // namespace

void add_calls(py::module_& m) {
  m.add_object("empty", py::reinterpret_steal<py::object>(PyCFunction_New(&kEmpty, nullptr)));
  m.def("connect", &connect);
  m.add_object("alike", py::reinterpret_steal<py::object>(PyCFunction_New(&kAlike, nullptr)));
  m.def("viewed", &viewed);
  m.def("binder", [](const py::dict& declared, const py::object& python) {
    return object<Binder>("dpkern.Binder", &guarded<Binder, call_binder>, declared,
                          python.inc_ref().ptr());
  });
  m.def("caller", [](const py::dict& declared) {
    return object<Caller>("dpkern.Caller", &guarded<Caller, call_caller>, declared);
  });
}

}  // namespace dpkern::bindings
