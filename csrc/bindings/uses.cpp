// Uses of private parameters that a program expects, and their gradients, without a frame of
// Python. They decide the common case only: whatever is odd is left to the functions of
// dpkern/engine/program that stand beside them, before anything was changed.

#include "bindings/uses.h"

#include <pybind11/stl.h>

#include <memory>
#include <string>

#include "bindings/bindings.h"

namespace dpkern::bindings {

namespace py = pybind11;

namespace uses {

Nodes nodes;
Known known;

namespace {

PyObject* resize(PyObject* self, PyObject* batch) {
  const long long samples = PyLong_AsLongLong(batch);
  if (PyErr_Occurred() != nullptr) return nullptr;
  HeldUse::of(self)->resize(samples);
  Py_RETURN_NONE;
}

}  // namespace

PyTypeObject* type_of_uses() {
  static PyMethodDef methods[] = {
      {"resize", &resize, METH_O, "resize(batch): expect so many samples from now on."},
      {nullptr, nullptr, 0, nullptr}};
  return HeldUse::type("dpkern._C.ReplayedUse", methods);
}

PyObject* other(PyObject* function, PyObject* const* args, Py_ssize_t count) {
  if (PyErr_Occurred() != nullptr) {
    if (PyErr_ExceptionMatches(PyExc_Exception) == 0) return nullptr;
    PyErr_Clear();
  }
  return PyObject_Vectorcall(function, args, static_cast<std::size_t>(count), nullptr);
}

namespace {

template <PyObject* (*kFunction)(PyObject*, PyObject* const*, Py_ssize_t)>
PyObject* guarded(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  try {
    return kFunction(self, args, count);
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

template <PyObject* (*kFunction)(PyObject*, PyObject* const*, Py_ssize_t)>
PyMethodDef method(const char* name, const char* doc) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&guarded<kFunction>)),
          METH_FASTCALL, doc};
}

PyMethodDef kRunStack = method<&run_stack>("run_stack", "run_stack(stack, module, args, kwargs).");
PyMethodDef kCounted = method<&counted>("counted", "counted(replay, args, kwargs): its result.");
PyMethodDef kFunctions[] = {
    method<&linear>("linear", "linear(args, kwargs): the next use, or what Python says."),
    method<&layer_norm>("layer_norm", "layer_norm(args, kwargs): the next use, or Python's."),
    method<&linear_forward>("linear_forward", "forward(ctx, anchor, run, site, x)."),
    method<&layer_norm_forward>("layer_norm_forward", "forward(ctx, anchor, run, site, x)."),
    method<&linear_backward>("linear_backward", "backward(ctx, g)."),
    method<&layer_norm_backward>("layer_norm_backward", "backward(ctx, g)."),
    method<&stack_forward>("stack_forward", "forward(ctx, anchor, run, stack, x)."),
    method<&stack_backward>("stack_backward", "backward(ctx, g)."),
};

// The compiled form of a function, which calls it where it does not know what to do.
py::object quick(const std::string& name, const py::object& function) {
  for (PyMethodDef& found : kFunctions) {
    if (name == found.ml_name) {
      return py::reinterpret_steal<py::object>(PyCFunction_New(&found, function.ptr()));
    }
  }
  throw py::value_error("no function of this name: " + name);
}

py::object count_nodes(const py::object& counter, const py::object& made) {
  const py::handle type = py::type::handle_of(counter);
  nodes.counter = kept(counter), nodes.made = kept(made);
  nodes.left = Slot(type, "_left"), nodes.depth = Slot(type, "_depth");
  nodes.entered = Slot(type, "_entered"), nodes.wasted = Slot(type, "_wasted");
  nodes.pending = Slot(type, "pending");
  return py::reinterpret_steal<py::object>(PyCFunction_New(&kCounted, nullptr));
}

void connect_uses(const py::dict& given) {
  known.parameter = reinterpret_cast<PyTypeObject*>(kept(given["parameter"]));
  known.run = reinterpret_cast<PyTypeObject*>(kept(given["run"]));
  known.recording = kept(given["recording"]), known.task = kept(given["task"]);
  known.autocast = kept(given["autocast"]), known.transforms = kept(given["transforms"]);
  known.normalize = kept(given["normalize"]);
  known.written_since = kept(given["written_since"]);
  known.add_product = kept(given["add_product"]), known.product = kept(given["product"]);
  known.saved_hooks = kept(given["saved_hooks"]), known.note = kept(given["note"]);
  for (const py::handle table : given["global_hooks"]) known.global_hooks.push_back(kept(table));
  for (const py::handle item : given["unseen"]) {
    const auto row = item.cast<py::tuple>();
    known.unseen.emplace_back(kept(row[0]), kept(row[1]));
  }
  const py::object run = given["run"];
  known.batch_id = Slot(run, "batch_id"), known.sites = Slot(run, "sites");
  known.cursor = Slot(run, "cursor"), known.live = Slot(run, "live");
  known.current_task = Slot(run, "task"), known.held = Slot(run, "held");
  known.order = Slot(run, "order"), known.threads = Slot(run, "threads");
  known.own_products = Slot(run, "own_products");
}

py::object make(const py::dict& given) {
  const auto address = [&](const char* name) {
    return given.contains(name) ? given[name].cast<std::uintptr_t>() : 0;
  };
  const bool linear = given["kind"].cast<std::string>() == "linear";
  auto use = std::make_unique<Use>();
  use->kind = linear ? Kind::kLinear : Kind::kLayerNorm;
  use->index = given["index"].cast<std::size_t>();
  use->weight = given["weight"], use->bias = given["bias"];
  use->plain_weight = given["plain_weight"], use->looks = given["looks"];
  use->dtype = given["dtype"], use->apply = given["apply"];
  use->kinds = given["kinds"].cast<py::tuple>();
  use->nodes_before = given["nodes"].cast<std::int64_t>();
  use->differentiable = given["differentiable"].cast<bool>();
  use->place = torch.place(use->dtype.ptr());
  use->fold = given["fold"].cast<std::int64_t>();
  use->tail = given["tail"].cast<std::vector<std::int64_t>>();
  use->weight_address = address("weight_address");
  if (linear) {
    use->bias_address = address("bias_address");
    use->outputs = given["outputs"].cast<std::int64_t>();
    use->kept = given["kept"].cast<bool>();
    use->calls = given["calls"];
    use->plain_bias = given["plain_bias"], use->turned = given["turned"];
    use->taker = pointer<Taker>(use->calls.attr("taker").cast<std::uintptr_t>());
  } else {
    const auto rows = given["rows"].cast<std::vector<std::uintptr_t>>();
    use->rows[0] = rows.at(0), use->rows[1] = rows.at(1);
    use->arguments = given["arguments"].cast<py::tuple>();
    use->shape_given = use->arguments[0], use->eps = use->arguments[3];
    use->entries = given["entries"].cast<std::int64_t>();
  }
  return HeldUse::make(type_of_uses(), std::move(use));
}

}  // namespace
}  // namespace uses

void add_uses(py::module_& m) {
  m.def("count_nodes", &uses::count_nodes);
  m.def("connect_uses", &uses::connect_uses);
  m.def("quick", &uses::quick);
  m.def("as_method", [](const py::object& function) {
    return py::reinterpret_steal<py::object>(PyInstanceMethod_New(function.ptr()));
  });
  m.def("ReplayedUse", &uses::make);
  m.def("ReplayedStack", &uses::make_stack);
  m.add_object("run_stack",
               py::reinterpret_steal<py::object>(PyCFunction_New(&uses::kRunStack, nullptr)));
}

}  // namespace dpkern::bindings
