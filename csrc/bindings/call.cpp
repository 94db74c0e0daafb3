// Ops as Python calls them: looked at, and where their kernel is compiled run as well, in one call.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>

#include "bindings/bindings.h"
#include "bindings/composed.h"

namespace py = pybind11;

namespace dpkern::bindings {
namespace {

// ``bind(...)``: the call bound, by Python where one look is not enough.
struct Binder {
  Binder(const py::dict& declared, PyObject* python) : look(declared), python(python) {}
  Look look;
  PyObject* python;
};

// The Python objects of all; what they hold lives as long as the process.
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
    const auto seen = binder.look.begin();
    if (binder.look.arrange(args, names, *seen) && binder.look.at(*seen)) {
      PyObject* const plan = binder.look.own_check(*seen);
      return plan == nullptr ? nullptr : binder.look.bound(*seen, seen->own(plan));
    }
  }
  PyErr_Clear();
  return PyObject_Call(binder.python, args, names);
}

template <class T>
PyObject* run(const T& of, PyObject* args, PyObject* names) {
  return of.call(args, names);
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
    py::dict made;
    made["dtype"] = row[2];
    made["device"] = given["cpu"];
    torch.dtypes.push_back({row[0].cast<std::uint8_t>(), row[1].cast<std::uint8_t>(), kept(row[2]),
                            kept(made), row[3].cast<int>()});
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
  torch.has_memory = kept(given["has_memory"]);
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
  const int dtype = torch.place(args[1]);
  if (dtype < 0) PyErr_SetString(PyExc_TypeError, "empty(shape, dtype)");
  return PyErr_Occurred() != nullptr ? nullptr : new_tensor(shape, dtype);
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
    return object<Caller>("dpkern.Caller", &guarded<Caller, run<Caller>>, declared);
  });
  m.def("composed", [](const py::dict& declared) {
    return object<Composed>("dpkern.Composed", &guarded<Composed, run<Composed>>, declared);
  });
}

}  // namespace dpkern::bindings
