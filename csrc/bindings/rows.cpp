// Rows of the usual loop followed in single calls: a batch like the last one leaves the loader, its
// rows enter the module in their order, and a loss takes their mean. Whatever is odd returns None
// and is left to Python (``engine.provenance``), which says what these calls do.

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/ordinary.h"
#include "bindings/owned.h"
#include "bindings/tables.h"
#include "bindings/tensors.h"

namespace py = pybind11;

namespace dpkern::bindings {
namespace {

// What Python has told once; null before.
struct Followed {
  PyTypeObject* tracked = nullptr;          // TrackedTensor
  PyTypeObject* per_record = nullptr;       // PerRecord
  PyTypeObject* batch = nullptr;            // YieldedBatch
  PyTypeObject* record_sum = nullptr;       // RecordSum
  PyObject* written = nullptr;              // storages that writes have changed
  PyObject* writes = nullptr;               // a list of their number
  PyObject* context = nullptr;              // tracked tensors are ordinary in it
  PyObject* one = nullptr;                  // {1}
  PyObject* cross_entropy = nullptr;        // the operation that torch's loss runs
  PyObject* any_negative = nullptr;         // of targets
  PyObject* other_cross_entropy = nullptr;  // what Python makes of other calls
};
Followed followed;

struct Names {
  PyObject* operator()(const char* name) const { return PyUnicode_InternFromString(name); }
};

// The attributes that are read and set here by name.
struct Attributes {
  PyObject *state, *since, *made_of, *klass, *detach, *requires_grad, *grad_fn, *use_count,
      *version;
};

const Attributes& names() {
  static const Attributes made = [] {
    const Names name;
    return Attributes{name("_state"),    name("_since"),     name("_made_of"),
                      name("__class__"), name("detach"),     name("requires_grad"),
                      name("grad_fn"),   name("_use_count"), name("_version")};
  }();
  return made;
}

// Places in the objects of batches and states, which are read without what a name leads through:
// a step has swept that out of the caches.
struct Places {
  Slot each, rows, plain, size, in_pass;             // YieldedBatch
  Slot batch;                                        // PerRecord
  Slot of_sum, reduction, rescaled, shares, scales;  // RecordSum
};
Places at;

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
  PyObject* const batch = at.batch.of(state->ptr());
  if (batch == nullptr || Py_TYPE(batch) != followed.batch) return {};
  if (at.each.of(batch) != state->ptr()) return {};
  return py::reinterpret_borrow<py::object>(batch);
}

PyObject* leave_to_python() {
  PyErr_Clear();
  Py_RETURN_NONE;
}

// The loader makes the alias with which its first tensor enters the module, as torch's code for
// aliases is at hand there. After some that were made in vain it tries but one batch of many.
constexpr int kPatience = 4, kRetry = 64;
int in_vain = 0;

bool is_alias_likely() {
  const bool likely = in_vain < kPatience || in_vain % kRetry == 0;
  in_vain = (in_vain + 1) % (1 << 30);
  return likely;
}

// Whether two tensors are the same numbers in the same memory. Complex ones may be conjugates.
bool is_same_view(PyObject* one, PyObject* other) {
  View a, b;
  if (torch.exchange->view(one, &a) != 0 || torch.exchange->view(other, &b) != 0) {
    PyErr_Clear();
    return false;
  }
  return a.data == b.data && a.dims == b.dims && a.offset == b.offset &&
         a.device.type == b.device.type && a.device.index == b.device.index &&
         a.dtype.code == b.dtype.code && a.dtype.bits == b.dtype.bits && a.dtype.code != kComplex &&
         std::equal(a.shape, a.shape + a.dims, b.shape) &&
         std::equal(a.strides, a.strides + a.dims, b.strides);
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
    if (alias && i == 0 && Py_TYPE(state) == followed.per_record && is_alias_likely()) {
      py::object plain = detached(alias.ptr());
      if (!plain) return nullptr;
      Py_XSETREF(at.plain.of(at.batch.of(state)), plain.release().ptr());
    }
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
  if (!batch) return leave_to_python();
  PyObject* const rows = at.rows.of(batch.ptr());
  // From here on it is this call's alone.
  auto plain = py::reinterpret_steal<py::object>(std::exchange(at.plain.of(batch.ptr()), nullptr));
  {
    const Ordinary ordinary(followed.context);
    if (!ordinary.entered()) return nullptr;
    const py::object trained = attribute(tensor, names().requires_grad);
    if (rows == nullptr || trained.ptr() != Py_False) return leave_to_python();
    if (plain && is_same_view(tensor, plain.ptr())) {
      in_vain = 0;
    } else {
      plain = detached(tensor);
    }
  }
  if (!plain) return nullptr;
  const auto inputs = py::reinterpret_steal<py::object>(PyTuple_Pack(1, plain.ptr()));
  return inputs ? PyTuple_Pack(2, rows, inputs.ptr()) : nullptr;
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

// Whether these are as many as another call has counted.
PyObject* is_held_as(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 2 || !PyTuple_CheckExact(args[1]) || PyTuple_GET_SIZE(args[1]) != 2) {
    PyErr_SetString(PyExc_TypeError, "is_held_as(tensor, holders)");
    return nullptr;
  }
  if (Py_REFCNT(args[0]) != PyLong_AsSsize_t(PyTuple_GET_ITEM(args[1], 0))) Py_RETURN_FALSE;
  const auto behind =
      py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(args[0], names().use_count));
  if (!behind) return nullptr;
  const Py_ssize_t expected = PyLong_AsSsize_t(PyTuple_GET_ITEM(args[1], 1));
  return PyBool_FromLong(PyLong_AsSsize_t(behind.ptr()) == expected);
}

PyMethodDef kHoldersOf{"holders_of", &holders_of, METH_O,
                       "holders_of(tensor): how many references there are to a tensor's object, "
                       "and to what torch keeps behind it."};

PyMethodDef kIsHeldAs{
    "is_held_as", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&is_held_as)),
    METH_FASTCALL, "is_held_as(tensor, holders): whether holders_of says this of a tensor."};

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

using Site = std::vector<std::uintptr_t>;

// The instructions of up to ``depth`` frames of the user's code, behind ``ours`` frames; false with
// an error.
bool find_site(PyObject* is_ours, long ours, long depth, Site& found) {
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
        if (!said) return false;
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
  return true;
}

PyObject* bytes_of(const Site& site) {
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(site.data()),
                                   static_cast<Py_ssize_t>(site.size() * sizeof(site[0])));
}

PyObject* call_site(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 3) {
    PyErr_SetString(PyExc_TypeError, "call_site(is_ours, ours, depth)");
    return nullptr;
  }
  const long ours = PyLong_AsLong(args[1]), depth = PyLong_AsLong(args[2]);
  Site site;
  if (PyErr_Occurred() != nullptr || !find_site(args[0], ours, depth, site)) return nullptr;
  return bytes_of(site);
}

PyMethodDef kCallSite{
    "call_site", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call_site)),
    METH_FASTCALL,
    "call_site(is_ours, ours, depth): up to depth frames of the user's code in which the running "
    "call is, behind ours frames, as bytes that are the same for the same instructions."};

// Whether a loss is scaled by what its call was scaled by before: shares, reduction, scales,
// records in the pass and in the batch; -1 with an error.
int is_scaled_as(PyObject* before, PyObject* state, PyObject* batch) {
  PyObject* const now[] = {at.shares.of(state), at.reduction.of(state), at.scales.of(state),
                           at.in_pass.of(batch), at.size.of(batch)};
  if (!PyTuple_CheckExact(before) || PyTuple_GET_SIZE(before) != 5) return 0;
  for (Py_ssize_t i = 0; i < 5; ++i) {
    if (now[i] == nullptr) return 0;
    const int same = PyObject_RichCompareBool(PyTuple_GET_ITEM(before, i), now[i], Py_EQ);
    if (same != 1) return same;
  }
  return 1;
}

// What a dict says of the first loss of a call; null without an entry, or with an error. Most
// passes ask for the same one as the last, of a dict that has not changed.
PyObject* known_scaling(PyObject* table, const Site& site) {
  struct Last {
    std::uint64_t change = 0;
    Site site;
    PyObject* found = nullptr;  // the dict's own
  };
  static auto* const last = new Last;
  const std::uint64_t change = change_of(table);
  if (change != 0 && change == last->change && site == last->site) return last->found;
  static PyObject* const first = PyLong_FromLong(0);
  const auto bytes = py::reinterpret_steal<py::object>(bytes_of(site));
  const auto key =
      py::reinterpret_steal<py::object>(bytes ? PyTuple_Pack(2, bytes.ptr(), first) : nullptr);
  PyObject* const found = key ? PyDict_GetItemWithError(table, key.ptr()) : nullptr;
  if (found != nullptr) *last = {change, site, found};
  return found;
}

bool has(PyObject* tuple, const PyObject* object) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) {
    if (PyTuple_GET_ITEM(tuple, i) == object) return true;
  }
  return false;
}

PyObject* loss_as_before(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 7 || !PyList_CheckExact(args[0]) || !PyList_CheckExact(args[1]) ||
      !PyDict_CheckExact(args[3]) || !PyTuple_CheckExact(args[4])) {
    PyErr_SetString(PyExc_TypeError,
                    "loss_as_before(losses, states, declared, before, outputs, is_ours, ours)");
    return nullptr;
  }
  if (followed.tracked == nullptr || PyList_GET_SIZE(args[0]) != 1 ||
      PyList_GET_SIZE(args[1]) != 1) {
    Py_RETURN_FALSE;
  }
  PyObject *const loss = PyList_GET_ITEM(args[0], 0), *const state = PyList_GET_ITEM(args[1], 0);
  if (Py_TYPE(state) != followed.record_sum) Py_RETURN_FALSE;
  PyObject* const batch = at.of_sum.of(state);
  if (batch == nullptr || Py_TYPE(batch) != followed.batch) Py_RETURN_FALSE;
  PyObject *const reduction = at.reduction.of(state), *const in_pass = at.in_pass.of(batch);
  const py::object made_of = attribute(loss, names().made_of);
  const py::object version = made_of ? attribute(loss, names().version) : py::object();
  if (reduction == nullptr || in_pass == nullptr || !version || !PyLong_CheckExact(in_pass) ||
      PyLong_AsLong(in_pass) < 2 || PyLong_AsLong(version.ptr()) != 0 ||
      PyObject_RichCompareBool(reduction, args[2], Py_EQ) != 1 || !has(args[4], made_of.ptr())) {
    PyErr_Clear();
    Py_RETURN_FALSE;
  }
  Site site;
  if (!find_site(args[5], PyLong_AsLong(args[6]), kSiteDepth, site)) return nullptr;
  PyObject* const before = known_scaling(args[3], site);
  const int same = before == nullptr ? 0 : is_scaled_as(before, state, batch);
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

// RecordSum(batch, "mean", False, ONE), without its ``__init__``.
PyObject* mean_over(PyObject* batch) {
  static PyObject* const word = PyUnicode_InternFromString("mean");
  PyObject* const made = followed.record_sum->tp_alloc(followed.record_sum, 0);
  if (made == nullptr) return nullptr;
  at.of_sum.of(made) = Py_NewRef(batch);
  at.reduction.of(made) = Py_NewRef(word);
  at.rescaled.of(made) = Py_NewRef(Py_False);
  at.shares.of(made) = Py_NewRef(followed.one);
  at.scales.of(made) = Py_NewRef(Py_None);
  return made;
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
  py::object state;
  const py::object batch = whole_batch(x, &state);
  if (!batch || Py_TYPE(target) != followed.tracked) return unsaid();
  const py::object other = attribute(target, names().state);
  PyObject *const size = at.size.of(batch.ptr()), *const in_pass = at.in_pass.of(batch.ptr());
  if (other.ptr() != state.ptr() || size == nullptr || in_pass == nullptr ||
      PyObject_RichCompareBool(size, in_pass, Py_EQ) != 1) {
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
  const auto sum = py::reinterpret_steal<py::object>(mean_over(batch.ptr()));
  if (!sum || !retrack(loss.ptr(), sum.ptr())) return nullptr;
  const py::object node =
      attribute(x, names().grad_fn);  // targets that are classes need no gradient
  if (!node || PyObject_SetAttr(loss.ptr(), names().made_of, node.ptr()) != 0) return nullptr;
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
  followed.batch = type("batch");
  followed.record_sum = type("record_sum");
  const auto place = [&](const char* of, const char* name) { return Slot(given[of], name); };
  at.each = place("batch", "each");
  at.rows = place("batch", "rows");
  at.plain = place("batch", "plain");
  at.size = place("batch", "size");
  at.in_pass = place("batch", "in_pass");
  at.batch = place("per_record", "batch");
  at.of_sum = place("record_sum", "batch");
  at.reduction = place("record_sum", "reduction");
  at.rescaled = place("record_sum", "rescaled");
  at.shares = place("record_sum", "shares");
  at.scales = place("record_sum", "scales");
  followed.one = kept(given["one"]);
  followed.cross_entropy = kept(given["cross_entropy"]);
  followed.any_negative = kept(given["any_negative"]);
  followed.other_cross_entropy = kept(given["other_cross_entropy"]);
  followed.tracked = type("tracked");
}

}  // namespace

void add_rows(py::module_& m) {
  m.def("follow_rows", &follow_rows);
  for (PyMethodDef* const made : {&kTrackedAlike, &kEntered, &kHoldersOf, &kIsHeldAs, &kLeft,
                                  &kCallSite, &kLossAsBefore, &kUsualCrossEntropy}) {
    m.add_object(made->ml_name, py::reinterpret_steal<py::object>(PyCFunction_New(made, nullptr)));
  }
}

}  // namespace dpkern::bindings
