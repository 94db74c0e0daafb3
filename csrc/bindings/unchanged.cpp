// Whether tensors are where they were and look the same, in one call for all of them.

#include <pybind11/pybind11.h>

#include <algorithm>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/look.h"

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

class UnchangedTensors {
 public:
  explicit UnchangedTensors(py::list tensors) : tensors_(std::move(tensors)) {
    if (torch.exchange == nullptr) throw py::value_error("torch's tensors cannot be seen");
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

  bool hold() const {
    for (std::size_t i = 0; i < before_.size(); ++i) {
      PyObject* const tensor = PyList_GET_ITEM(tensors_.ptr(), static_cast<Py_ssize_t>(i));
      const Appearance& before = before_[i];
      View now;
      if (torch.exchange->view(tensor, &now) != 0) {
        PyErr_Clear();  // no ordinary tensor any more
        return false;
      }
      const View& then = before.view;
      if (now.data != then.data || now.dims != then.dims || now.offset != then.offset ||
          now.device.type != then.device.type || now.device.index != then.device.index ||
          now.dtype.code != then.dtype.code || now.dtype.bits != then.dtype.bits ||
          !std::equal(before.shape.begin(), before.shape.end(), now.shape) ||
          !std::equal(before.strides.begin(), before.strides.end(), now.strides)) {
        return false;
      }
      const int trained = is_trained(tensor);
      if (trained < 0) throw py::error_already_set();
      if ((trained == 1) != before.trained) return false;
    }
    return true;
  }

 private:
  py::list tensors_;
  std::vector<Appearance> before_;
};

}  // namespace

void add_unchanged(py::module_& m) {
  py::class_<UnchangedTensors>(m, "UnchangedTensors")
      .def(py::init<py::list>())
      .def("hold", &UnchangedTensors::hold);
}

}  // namespace dpkern::bindings
