// Whether tensors are where they were and look the same, in one call for all of them.

#include "bindings/unchanged.h"

#include <pybind11/pybind11.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/held.h"
#include "bindings/look.h"
#include "bindings/ordinary.h"

namespace py = pybind11;

namespace dpkern::bindings {
namespace {

// What a tensor looked like.
struct Appearance {
  View view;
  std::vector<std::int64_t> shape, strides;
  bool trained;
};

// Whether a tensor needs a gradient; -1 with an error. Private ones must be ordinary here
// (``without_torch_function``).
int is_trained(PyObject* tensor) {
  static PyObject* const name = PyUnicode_InternFromString("requires_grad");
  PyObject* const trained = PyObject_GetAttr(tensor, name);
  Py_XDECREF(trained);
  return trained == nullptr ? -1 : trained == Py_True;
}

View view_of(PyObject* tensor) {
  View view;
  if (torch.exchange->view(tensor, &view) != 0) throw py::error_already_set();
  return view;
}

// Whether a tensor is what a view was of; false where it is no ordinary tensor any more.
bool is_same(PyObject* tensor, const Appearance& before) {
  View now;
  if (torch.exchange->view(tensor, &now) != 0) {
    PyErr_Clear();
    return false;
  }
  const View& then = before.view;
  return now.data == then.data && now.dims == then.dims && now.offset == then.offset &&
         now.device.type == then.device.type && now.device.index == then.device.index &&
         now.dtype.code == then.dtype.code && now.dtype.bits == then.dtype.bits &&
         std::equal(before.shape.begin(), before.shape.end(), now.shape) &&
         std::equal(before.strides.begin(), before.strides.end(), now.strides);
}

class UnchangedTensors {
 public:
  UnchangedTensors(py::list tensors, py::object context)
      : tensors_(std::move(tensors)), context_(std::move(context)) {
    if (torch.exchange == nullptr) throw py::value_error("torch's tensors cannot be seen");
    const Ordinary ordinary(context_.ptr());
    if (!ordinary.entered()) throw py::error_already_set();
    for (const py::handle tensor : tensors_) {
      const View view = view_of(tensor.ptr());
      const int trained = is_trained(tensor.ptr());
      if (trained < 0) throw py::error_already_set();
      before_.push_back({view,
                         {view.shape, view.shape + view.dims},
                         {view.strides, view.strides + view.dims},
                         trained == 1});
    }
  }

  // Whether all are as they were: 1, 0, or -1 with an error.
  int hold() const {
    const Ordinary ordinary(context_.ptr());
    return ordinary.entered() ? compare() : -1;
  }

  // Whether an operand is an ordinary tensor of this shape and dtype on the CPU, trained or not,
  // and all are as they were.
  int hold_beside(PyObject* x, const std::vector<std::int64_t>& shape, int dtype,
                  bool trained) const {
    View view;
    if (Py_TYPE(x) != torch.tensor || torch.exchange->view(x, &view) != 0) {
      PyErr_Clear();
      return 0;
    }
    if (dtype < 0 || find_dtype(view) != dtype || view.device.type != kCpu ||
        !std::equal(shape.begin(), shape.end(), view.shape, view.shape + view.dims)) {
      return 0;
    }
    const Ordinary ordinary(context_.ptr());
    const int is = ordinary.entered() ? is_trained(x) : -1;
    return is < 0 ? -1 : (is == 1) == trained ? compare() : 0;
  }

  int visit(visitproc visit, void* arg) const {
    Py_VISIT(tensors_.ptr());
    Py_VISIT(context_.ptr());
    return 0;
  }

 private:
  int compare() const {
    for (std::size_t i = 0; i < before_.size(); ++i) {
      PyObject* const tensor = PyList_GET_ITEM(tensors_.ptr(), static_cast<Py_ssize_t>(i));
      if (!is_same(tensor, before_[i])) return 0;
      const int trained = is_trained(tensor);
      if (trained < 0) return -1;
      if ((trained == 1) != before_[i].trained) return 0;
    }
    return 1;
  }

  py::list tensors_;
  py::object context_;
  std::vector<Appearance> before_;
};

using HeldTensors = Held<UnchangedTensors>;

PyObject* answer(int found) { return found < 0 ? nullptr : PyBool_FromLong(found); }

PyObject* hold(PyObject* self, PyObject*) { return answer(HeldTensors::of(self)->hold()); }

PyObject* hold_beside(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  if (count != 4) {
    PyErr_SetString(PyExc_TypeError, "hold_beside(x, shape, dtype, trained)");
    return nullptr;
  }
  if (!PyTuple_Check(args[1])) Py_RETURN_FALSE;
  std::vector<std::int64_t> shape;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args[1]); ++i) {
    shape.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(args[1], i)));
  }
  if (PyErr_Occurred() != nullptr) return nullptr;
  return answer(
      HeldTensors::of(self)->hold_beside(args[0], shape, torch.place(args[2]), args[3] == Py_True));
}

PyTypeObject* type_of_tensors() {
  static PyMethodDef methods[] = {
      {"hold", &hold, METH_NOARGS, "hold(): whether all tensors are as they were."},
      {"hold_beside", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&hold_beside)),
       METH_FASTCALL,
       "hold_beside(x, shape, dtype, trained): whether they are, and x is an ordinary tensor of "
       "the CPU that looks like this."},
      {nullptr, nullptr, 0, nullptr}};
  return HeldTensors::type("dpkern._C.UnchangedTensorsObject", methods);
}

py::object make_tensors(py::list tensors, py::object context) {
  return HeldTensors::make(type_of_tensors(), std::make_unique<UnchangedTensors>(
                                                  std::move(tensors), std::move(context)));
}

}  // namespace

int hold_beside(PyObject* looks, PyObject* x, const std::vector<std::int64_t>& shape, int dtype,
                bool trained) {
  if (Py_TYPE(looks) != type_of_tensors()) return 0;
  return HeldTensors::of(looks)->hold_beside(x, shape, dtype, trained);
}

int hold_alone(PyObject* looks) {
  return Py_TYPE(looks) == type_of_tensors() ? HeldTensors::of(looks)->hold() : 0;
}

void add_unchanged(py::module_& m) { m.def("UnchangedTensors", &make_tensors); }

}  // namespace dpkern::bindings
