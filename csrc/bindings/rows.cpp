// Rows of the usual loop followed in single calls: a batch like the last one leaves the loader, its
// rows enter the module in their order, and a loss takes their mean. Whatever is odd returns None
// and is left to Python (``engine.provenance``), which says what these calls do.

#include <pybind11/pybind11.h>

#include <cstring>
#include <unordered_map>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/ordinary.h"
#include "bindings/tensors.h"

namespace py = pybind11;

namespace dpkern::bindings {
namespace {

// What Python has told once; null before.
struct Followed {
  PyTypeObject* tracked = nullptr;          // TrackedTensor
  PyTypeObject* per_record = nullptr;       // PerRecord
  PyObject* written = nullptr;              // storages that writes have changed
  PyObject* writes = nullptr;               // a list of their number
  PyObject* context = nullptr;              // tracked tensors are ordinary in it
  PyObject* record_sum = nullptr;           // RecordSum
  PyObject* one = nullptr;                  // {1}
  PyObject* cross_entropy = nullptr;        // the operation that torch's loss runs
  PyObject* any_negative = nullptr;         // of targets
  PyObject* other_cross_entropy = nullptr;  // what Python makes of other calls
};
Followed followed;

struct Names {
  PyObject* operator()(const char* name) const { return PyUnicode_InternFromString(name); }
};

// The attributes that are read and set here.
struct Attributes {
  PyObject *state, *since, *made_of, *klass, *batch, *each, *rows, *size, *in_pass, *detach;
  PyObject *requires_grad, *grad_fn, *use_count, *version, *reduction, *shares, *scales;
};

const Attributes& names() {
  static const Attributes made = [] {
    const Names name;
    return Attributes{name("_state"),     name("_since"),        name("_made_of"),
                      name("__class__"),  name("batch"),         name("each"),
                      name("rows"),       name("size"),          name("in_pass"),
                      name("detach"),     name("requires_grad"), name("grad_fn"),
                      name("_use_count"), name("_version"),      name("reduction"),
                      name("shares"),     name("scales")};
  }();
  return made;
}

py::object attribute(PyObject* object, PyObject* name) {
  return py::reinterpret_steal<py::object>(PyObject_GetAttr(object, name));
}

// An ordinary tensor becomes a tracked one; false with an error.
bool retrack(PyObject* tensor, PyObject* state) {
  const Attributes& of = names();
  if (Py_TYPE(tensor) != followed.tracked &&
      PyObject_SetAttr(tensor, of.klass, reinterpret_cast<PyObject*>(followed.tracked)) != 0) {
    return false;
  }
  if (PyObject_SetAttr(tensor, of.state, state) != 0) return false;
  PyObject* const writes = PyList_GET_ITEM(followed.writes, 0);
  return PyLong_AsLong(writes) == 0 || PyObject_SetAttr(tensor, of.since, writes) == 0;
}

// An alias that is not differentiated; null with an error.
py::object detached(PyObject* tensor) {
  return py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(tensor, names().detach));
}

// The batch whose records are the rows of a tracked tensor, in their order; null for other tensors.
py::object whole_batch(PyObject* tensor, py::object* state) {
  if (Py_TYPE(tensor) != followed.tracked) return {};
  *state = attribute(tensor, names().state);
  if (!*state || Py_TYPE(state->ptr()) != followed.per_record) return {};
  py::object batch = attribute(state->ptr(), names().batch);
  const py::object each = batch ? attribute(batch.ptr(), names().each) : py::object();
  if (!each || each.ptr() != state->ptr()) return {};
  return batch;
}

PyObject* leave_to_python() {
  PyErr_Clear();
  Py_RETURN_NONE;
}

bool is_alike(PyObject* tensor, PyObject* shape, std::int64_t rows) {
  View view;
  if (Py_TYPE(tensor) != torch.tensor || torch.exchange->view(tensor, &view) != 0) return false;
  if (view.dims == 0 || view.shape[0] != rows || !has_shape(view, shape)) return false;
  const py::object trained = attribute(tensor, names().requires_grad);
  return trained.ptr() == Py_False;
}

PyObject* tracked_alike(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 4) {
    PyErr_SetString(PyExc_TypeError, "tracked_alike(tree, shapes, state, rows)");
    return nullptr;
  }
  PyObject *const tree = args[0], *const shapes = args[1], *const state = args[2];
  const bool is_list = PyList_CheckExact(tree);
  if (followed.tracked == nullptr || torch.exchange == nullptr || !PyList_CheckExact(shapes) ||
      (!is_list && !PyTuple_CheckExact(tree))) {
    Py_RETURN_NONE;
  }
  // Another thread may change the list while an alias is made.
  const auto items = py::reinterpret_steal<py::object>(PySequence_Tuple(tree));
  if (!items) return nullptr;
  const Py_ssize_t size = PyTuple_GET_SIZE(items.ptr());
  const std::int64_t rows = PyLong_AsLongLong(args[3]);
  if (PyErr_Occurred() != nullptr) return nullptr;
  if (size == 0 || PyList_GET_SIZE(shapes) != size) Py_RETURN_NONE;
  for (Py_ssize_t i = 0; i < size; ++i) {
    if (!is_alike(PyTuple_GET_ITEM(items.ptr(), i), PyList_GET_ITEM(shapes, i), rows)) {
      return leave_to_python();
    }
  }
  // Tensors that nothing else holds need no alias: the loader's two variables and this call hold
  // the tree, the tree and the items each tensor.
#if PY_VERSION_HEX < 0x030e0000
  const bool alone = Py_REFCNT(tree) <= (is_list ? 3 : 4);
#else  // variables may borrow there
  const bool alone = false;
#endif
  auto made = py::reinterpret_steal<py::object>(is_list ? PyList_New(size) : PyTuple_New(size));
  for (Py_ssize_t i = 0; made && i < size; ++i) {
    PyObject* const item = PyTuple_GET_ITEM(items.ptr(), i);
    const bool own = alone && Py_REFCNT(item) == (is_list ? 2 : 1);
    py::object alias = own ? py::reinterpret_borrow<py::object>(item) : detached(item);
    if (!alias || !retrack(alias.ptr(), state)) return nullptr;
    if (is_list) {
      PyList_SET_ITEM(made.ptr(), i, alias.release().ptr());
    } else {
      PyTuple_SET_ITEM(made.ptr(), i, alias.release().ptr());
    }
  }
  return made.release().ptr();
}

PyMethodDef kTrackedAlike{
    "tracked_alike", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&tracked_alike)),
    METH_FASTCALL,
    "tracked_alike(tree, shapes, state, rows): a list or tuple of tensors of these shapes, which "
    "need no gradient and have this number of rows, tracked with this state: themselves where "
    "nothing else holds them, else aliases; None for any other tree."};

PyObject* entered(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 2 || !PyTuple_CheckExact(args[0]) || !PyDict_CheckExact(args[1])) {
    PyErr_SetString(PyExc_TypeError, "entered(args, kwargs)");
    return nullptr;
  }
  if (followed.tracked == nullptr || PyTuple_GET_SIZE(args[0]) != 1 ||
      PyDict_GET_SIZE(args[1]) != 0 || PyDict_GET_SIZE(followed.written) != 0) {
    Py_RETURN_NONE;
  }
  PyObject* const tensor = PyTuple_GET_ITEM(args[0], 0);
  py::object state;
  const py::object batch = whole_batch(tensor, &state);
  const py::object rows = batch ? attribute(batch.ptr(), names().rows) : py::object();
  if (!rows) return leave_to_python();
  py::object plain;
  {
    const Ordinary ordinary(followed.context);
    if (!ordinary.entered()) return nullptr;
    const py::object trained = attribute(tensor, names().requires_grad);
    if (trained.ptr() != Py_False) return leave_to_python();
    plain = detached(tensor);
  }
  if (!plain) return nullptr;
  const auto inputs = py::reinterpret_steal<py::object>(PyTuple_Pack(1, plain.ptr()));
  return inputs ? PyTuple_Pack(2, rows.ptr(), inputs.ptr()) : nullptr;
}

PyMethodDef kEntered{
    "entered", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&entered)), METH_FASTCALL,
    "entered(args, kwargs): the rows of a module's only argument, if they are the records of a "
    "batch in their order, and the arguments as ordinary tensors; None for other arguments."};

// Count the references to a tensor's object, and those to what torch keeps behind it.
PyObject* holders_of(PyObject*, PyObject* tensor) {
  const auto behind =
      py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(tensor, names().use_count));
  const auto own = py::reinterpret_steal<py::object>(PyLong_FromSsize_t(Py_REFCNT(tensor)));
  return behind && own ? PyTuple_Pack(2, own.ptr(), behind.ptr()) : nullptr;
}

PyMethodDef kHoldersOf{"holders_of", &holders_of, METH_O,
                       "holders_of(tensor): how many references there are to a tensor's object, "
                       "and to what torch keeps behind it."};

PyObject* left(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 3) {
    PyErr_SetString(PyExc_TypeError, "left(output, state, rows)");
    return nullptr;
  }
  PyObject* const output = args[0];
  View view;
  if (followed.tracked == nullptr || torch.exchange == nullptr || Py_TYPE(output) != torch.tensor ||
      torch.exchange->view(output, &view) != 0 || view.dims == 0 ||
      view.shape[0] != PyLong_AsLongLong(args[2])) {
    return leave_to_python();
  }
  py::object node = attribute(output, names().grad_fn);
  if (!node || node.is_none()) return leave_to_python();
  return retrack(output, args[1]) ? node.release().ptr() : nullptr;
}

PyMethodDef kLeft{
    "left", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&left)), METH_FASTCALL,
    "left(output, state, rows): track this tensor, which has a graph and this number of rows, and "
    "return its node in the graph; None for any other output."};

// Frames of the user's code that tell one call of a loss from another.
constexpr long kSiteDepth = 4;

// Where user's code is: for every code object, whether it is none of theirs.
std::unordered_map<PyObject*, bool>& codes() {
  static auto* const known = new std::unordered_map<PyObject*, bool>;
  return *known;
}

// The instructions of up to ``depth`` frames of the user's code, behind ``ours`` frames.
PyObject* site_of(PyObject* is_ours, long ours, long depth) {
  std::vector<std::uintptr_t> found;
  found.reserve(2 * static_cast<std::size_t>(depth));
  auto frame = py::reinterpret_steal<py::object>(
      reinterpret_cast<PyObject*>(PyThreadState_GetFrame(PyThreadState_Get())));
  for (long skipped = 0; frame && static_cast<long>(found.size()) < 2 * depth; ++skipped) {
    auto* const at = reinterpret_cast<PyFrameObject*>(frame.ptr());
    if (skipped >= ours) {
      const auto code =
          py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(at)));
      auto known = codes().find(code.ptr());
      if (known == codes().end()) {
        const auto said =
            py::reinterpret_steal<py::object>(PyObject_CallOneArg(is_ours, code.ptr()));
        if (!said) return nullptr;
        // It is kept, so that no other one gets the same address.
        known = codes().emplace(kept(code), said.ptr() == Py_True).first;
      }
      if (!known->second) {
        found.push_back(reinterpret_cast<std::uintptr_t>(code.ptr()));
        found.push_back(static_cast<std::uintptr_t>(PyFrame_GetLasti(at)));
      }
    }
    frame = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetBack(at)));
  }
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(found.data()),
                                   static_cast<Py_ssize_t>(found.size() * sizeof(found[0])));
}

PyObject* call_site(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 3) {
    PyErr_SetString(PyExc_TypeError, "call_site(is_ours, ours, depth)");
    return nullptr;
  }
  const long ours = PyLong_AsLong(args[1]), depth = PyLong_AsLong(args[2]);
  return PyErr_Occurred() != nullptr ? nullptr : site_of(args[0], ours, depth);
}

PyMethodDef kCallSite{
    "call_site", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call_site)),
    METH_FASTCALL,
    "call_site(is_ours, ours, depth): up to depth frames of the user's code in which the running "
    "call is, behind ours frames, as bytes that are the same for the same instructions."};

// What decides whether a loss is scaled as its call has scaled it before.
py::object scaling_of(PyObject* state, PyObject* batch) {
  const Attributes& of = names();
  const py::object parts[] = {attribute(state, of.shares), attribute(state, of.reduction),
                              attribute(state, of.scales), attribute(batch, of.in_pass),
                              attribute(batch, of.size)};
  for (const py::object& part : parts) {
    if (!part) return {};
  }
  return py::reinterpret_steal<py::object>(PyTuple_Pack(
      5, parts[0].ptr(), parts[1].ptr(), parts[2].ptr(), parts[3].ptr(), parts[4].ptr()));
}

PyObject* loss_as_before(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 7 || !PyList_CheckExact(args[0]) || !PyList_CheckExact(args[1]) ||
      !PyDict_CheckExact(args[3]) || !PyAnySet_CheckExact(args[4])) {
    PyErr_SetString(PyExc_TypeError,
                    "loss_as_before(losses, states, declared, before, outputs, is_ours, ours)");
    return nullptr;
  }
  const Attributes& of = names();
  if (followed.tracked == nullptr || PyList_GET_SIZE(args[0]) != 1 ||
      PyList_GET_SIZE(args[1]) != 1) {
    Py_RETURN_FALSE;
  }
  PyObject *const loss = PyList_GET_ITEM(args[0], 0), *const state = PyList_GET_ITEM(args[1], 0);
  if (reinterpret_cast<PyObject*>(Py_TYPE(state)) != followed.record_sum) Py_RETURN_FALSE;
  const py::object batch = attribute(state, of.batch);
  const py::object reduction = attribute(state, of.reduction);
  const py::object made_of = attribute(loss, of.made_of), version = attribute(loss, of.version);
  const py::object in_pass = batch ? attribute(batch.ptr(), of.in_pass) : py::object();
  if (!reduction || !made_of || !version || !in_pass || !PyLong_CheckExact(in_pass.ptr()) ||
      PyLong_AsLong(in_pass.ptr()) < 2 || PyLong_AsLong(version.ptr()) != 0 ||
      PyObject_RichCompareBool(reduction.ptr(), args[2], Py_EQ) != 1 ||
      PySet_Contains(args[4], made_of.ptr()) != 1) {
    PyErr_Clear();
    Py_RETURN_FALSE;
  }
  const py::object scaling = scaling_of(state, batch.ptr());
  const auto site = py::reinterpret_steal<py::object>(
      scaling ? site_of(args[5], PyLong_AsLong(args[6]), kSiteDepth) : nullptr);
  static PyObject* const first = PyLong_FromLong(0);
  const auto key =
      py::reinterpret_steal<py::object>(site ? PyTuple_Pack(2, site.ptr(), first) : nullptr);
  PyObject* const before = key ? PyDict_GetItemWithError(args[3], key.ptr()) : nullptr;
  const int same = before == nullptr ? 0 : PyObject_RichCompareBool(before, scaling.ptr(), Py_EQ);
  if (same < 0 || PyErr_Occurred() != nullptr) return nullptr;
  return PyBool_FromLong(same);
}

PyMethodDef kLossAsBefore{
    "loss_as_before", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&loss_as_before)),
    METH_FASTCALL,
    "loss_as_before(losses, states, declared, before, outputs, is_ours, ours): whether there is "
    "one loss, made of one of these outputs alone, a sum over records that is reduced as declared "
    "and scaled as the same call has scaled it before."};

// Whether a loss is the plain mean of torch's: one argument after the other as it gives them.
bool is_mean(PyObject* names, PyObject** ignored, PyObject** smoothing) {
  static const Names name;
  static PyObject* const plain[] = {name("weight"), name("size_average"), name("reduce")};
  static PyObject *const reduction = name("reduction"), *const index = name("ignore_index"),
                         *const smooth = name("label_smoothing");
  if (PyDict_GET_SIZE(names) != 6) return false;
  for (PyObject* const each : plain) {
    if (PyDict_GetItemWithError(names, each) != Py_None) return false;
  }
  PyObject* const given = PyDict_GetItemWithError(names, reduction);
  *ignored = PyDict_GetItemWithError(names, index);
  *smoothing = PyDict_GetItemWithError(names, smooth);
  return given != nullptr && PyUnicode_CheckExact(given) &&
         PyUnicode_CompareWithASCIIString(given, "mean") == 0 && *ignored != nullptr &&
         PyLong_CheckExact(*ignored) && *smoothing != nullptr && PyFloat_CheckExact(*smoothing);
}

PyObject* unsaid() {
  PyErr_Clear();
  return nullptr;
}

// The loss; null without an error where Python has to follow it.
PyObject* plain_mean(PyObject* const* args) {
  PyObject *const given = args[1], *ignored = nullptr, *smoothing = nullptr;
  if (followed.tracked == nullptr || PyDict_GET_SIZE(followed.written) != 0 ||
      !PyTuple_CheckExact(given) || PyTuple_GET_SIZE(given) != 2 || !PyDict_CheckExact(args[2]) ||
      !is_mean(args[2], &ignored, &smoothing)) {
    return unsaid();
  }
  PyObject *const x = PyTuple_GET_ITEM(given, 0), *const target = PyTuple_GET_ITEM(given, 1);
  py::object state, other;
  const Attributes& of = names();
  const py::object batch = whole_batch(x, &state);
  if (!batch || Py_TYPE(target) != followed.tracked) return unsaid();
  other = attribute(target, of.state);
  const py::object size = attribute(batch.ptr(), of.size);
  const py::object in_pass = attribute(batch.ptr(), of.in_pass);
  if (other.ptr() != state.ptr() || !size || !in_pass ||
      PyObject_RichCompareBool(size.ptr(), in_pass.ptr(), Py_EQ) != 1) {
    return unsaid();
  }
  const Ordinary ordinary(followed.context);
  if (!ordinary.entered()) return nullptr;
  // Classes as a list on the CPU, which has no negative one, and so none that is ignored.
  View view;
  const bool listed = torch.exchange != nullptr && torch.exchange->view(x, &view) == 0 &&
                      view.dims == 2 && PyLong_AsLongLong(ignored) < 0;
  const auto negative = py::reinterpret_steal<py::object>(
      listed ? PyObject_CallOneArg(followed.any_negative, target) : Py_NewRef(Py_None));
  if (negative.ptr() != Py_False) return unsaid();
  static PyObject* const mean = PyLong_FromLong(1);
  PyObject* const call[] = {x, target, Py_None, mean, ignored, smoothing};
  const auto loss = py::reinterpret_steal<py::object>(
      PyObject_Vectorcall(followed.cross_entropy, call, 6, nullptr));
  if (!loss) return nullptr;
  static PyObject* const word = PyUnicode_InternFromString("mean");
  PyObject* const parts[] = {batch.ptr(), word, Py_False, followed.one};
  const auto sum = py::reinterpret_steal<py::object>(
      PyObject_Vectorcall(followed.record_sum, parts, 4, nullptr));
  if (!sum || !retrack(loss.ptr(), sum.ptr())) return nullptr;
  const py::object node = attribute(x, of.grad_fn);  // targets that are classes need no gradient
  if (!node || PyObject_SetAttr(loss.ptr(), of.made_of, node.ptr()) != 0) return nullptr;
  return Py_NewRef(loss.ptr());
}

PyObject* usual_cross_entropy(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 3) {
    PyErr_SetString(PyExc_TypeError, "usual_cross_entropy(func, args, kwargs)");
    return nullptr;
  }
  PyObject* const loss = plain_mean(args);
  if (loss != nullptr || PyErr_Occurred() != nullptr) return loss;
  return PyObject_Vectorcall(followed.other_cross_entropy, args, 3, nullptr);
}

PyMethodDef kUsualCrossEntropy{
    "usual_cross_entropy",
    reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&usual_cross_entropy)),
    METH_FASTCALL,
    "usual_cross_entropy(func, args, kwargs): the mean over all records of a batch in their order, "
    "of which each has one class that is not ignored; other calls as Python follows them."};

void follow_rows(const py::dict& given) {
  const auto type = [&](const char* name) {
    return reinterpret_cast<PyTypeObject*>(kept(given[name]));
  };
  followed.per_record = type("per_record");
  followed.written = kept(given["written"]);
  followed.writes = kept(given["writes"]);
  followed.context = kept(given["context"]);
  followed.record_sum = kept(given["record_sum"]);
  followed.one = kept(given["one"]);
  followed.cross_entropy = kept(given["cross_entropy"]);
  followed.any_negative = kept(given["any_negative"]);
  followed.other_cross_entropy = kept(given["other_cross_entropy"]);
  followed.tracked = type("tracked");
}

}  // namespace

void add_rows(py::module_& m) {
  m.def("follow_rows", &follow_rows);
  for (PyMethodDef* const made : {&kTrackedAlike, &kEntered, &kHoldersOf, &kLeft, &kCallSite,
                                  &kLossAsBefore, &kUsualCrossEntropy}) {
    m.add_object(made->ml_name, py::reinterpret_steal<py::object>(PyCFunction_New(made, nullptr)));
  }
}

}  // namespace dpkern::bindings
