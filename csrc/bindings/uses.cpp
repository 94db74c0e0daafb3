// Uses of private parameters that a program expects, and their gradients, without a frame of
// Python. They decide the common case only: whatever is odd is left to the functions of
// dpkern/engine/program that stand beside them, before anything was changed.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <structmember.h>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/held.h"
#include "bindings/replay.h"
#include "bindings/tensors.h"
#include "bindings/unchanged.h"
#include "cpu/ops.h"

namespace py = pybind11;

namespace dpkern::bindings {
namespace {

// A reference that is dropped at the end of its scope; it may be null.
class Owned {
 public:
  Owned(PyObject* object = nullptr) : object_(object) {}  // takes the reference over
  Owned(Owned&& other) noexcept : object_(other.release()) {}
  Owned& operator=(Owned&& other) noexcept {
    PyObject* const before = object_;
    object_ = other.release();
    Py_XDECREF(before);
    return *this;
  }
  ~Owned() { Py_XDECREF(object_); }

  PyObject* get() const { return object_; }
  PyObject* release() {
    PyObject* const given = object_;
    object_ = nullptr;
    return given;
  }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_;
};

// A place in `__slots__`, as fast to read as a field.
class Slot {
 public:
  Slot() = default;
  Slot(const py::handle& type, const char* name) {
    const py::object found = type.attr(name);
    if (Py_TYPE(found.ptr()) != &PyMemberDescr_Type) throw py::type_error("no slot");
    offset_ = reinterpret_cast<PyMemberDescrObject*>(found.ptr())->d_member->offset;
  }
  // Borrowed; null where nothing was put.
  PyObject*& of(PyObject* object) const {
    return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset_);
  }
  long long number(PyObject* object) const { return PyLong_AsLongLong(of(object)); }
  void put(PyObject* object, long long number) const {
    const Owned before(std::exchange(of(object), PyLong_FromLongLong(number)));
  }

 private:
  Py_ssize_t offset_ = 0;
};

// The counter of nodes_between.py: number of autograd nodes between uses.
struct Nodes {
  PyObject* counter = nullptr;
  PyObject* made = nullptr;
  Slot left, depth, entered, wasted, pending;

  // -1 with an error.
  long long number() const {
    const Owned found(PyObject_CallNoArgs(made));
    return found ? PyLong_AsLongLong(found.get()) : -1;
  }
} nodes;

constexpr long long kNoUse = -1;  // _NONE of nodes_between.py

// What uses ask of torch and of the engine: set once, before the first use.
struct Known {
  PyTypeObject* parameter = nullptr;
  PyTypeObject* run = nullptr;
  PyObject *recording, *task, *autocast, *transforms;  // functions without arguments
  PyObject *normalize, *written_since;
  Slot batch_id, sites, cursor, live, current_task, held, order, threads, own_products;
} known;

// Interned names.
struct Names {
#define DPK_NAME(name) PyObject* const name = PyUnicode_InternFromString(#name)
  DPK_NAME(_private);
  DPK_NAME(_public);
  DPK_NAME(_sequence_nr);
  DPK_NAME(_skipped);
  DPK_NAME(_ticket);
  DPK_NAME(_version);
  DPK_NAME(admits);
  DPK_NAME(anchor);
  DPK_NAME(begin);
  DPK_NAME(bias);
  DPK_NAME(capture);
  DPK_NAME(compiled);
  DPK_NAME(contiguous);
  DPK_NAME(enters);
  DPK_NAME(eps);
  DPK_NAME(grad_fn);
  DPK_NAME(guard);
  DPK_NAME(materialize_grads);
  DPK_NAME(next_functions);
  DPK_NAME(program);
  DPK_NAME(run);
  DPK_NAME(running);
  DPK_NAME(saved_tensors);
  DPK_NAME(site);
  DPK_NAME(statistics);
  DPK_NAME(to_save);
  DPK_NAME(version);
  DPK_NAME(weight);
#undef DPK_NAME
};
const Names& names() {
  static const Names made;
  return made;
}

Owned get(PyObject* object, PyObject* name) { return PyObject_GetAttr(object, name); }

// Whether a function without arguments returns this object; false with an error, too.
bool answers(PyObject* function, PyObject* wanted) {
  const Owned found(PyObject_CallNoArgs(function));
  return found.get() == wanted;
}

// Whether an attribute is this object.
bool is(PyObject* object, PyObject* name, PyObject* wanted) {
  return get(object, name).get() == wanted;
}

// Whether no backward pass runs, no transform and no autocast of any device.
bool is_usual_pass() {
  if (!answers(known.autocast, Py_False) || !answers(known.transforms, Py_None)) return false;
  const Owned task(PyObject_CallNoArgs(known.task));
  return task && PyLong_AsLongLong(task.get()) == -1;
}

// ---- a use ----

enum class Kind { kLinear, kLayerNorm };

// What a use is in every step, and its operands' sizes in this one.
struct Use {
  Kind kind;
  std::size_t index;
  py::object weight, bias, plain_weight, looks, dtype, calls, apply;
  py::tuple kinds;  // of the nodes in front of it
  bool differentiable;
  bool kept;                  // what its gradient leaves with the run is nothing
  int place;                  // of its dtype
  std::int64_t nodes_before;  // how many
  std::int64_t fold, outputs;
  std::vector<std::int64_t> tail;
  std::uintptr_t weight_address, bias_address;
  Taker* taker;                 // linear
  std::uintptr_t rows[2];       // layer norm: where gradients of scale and shift are written
  py::object shape_given, eps;  // layer norm
  py::tuple arguments;          // layer norm: those behind the input
  std::int64_t entries = 0;     // layer norm: that are normalised together

  std::vector<std::int64_t> shape{}, out_shape{};
  std::int64_t positions = 0, inputs = 0, batch = 0;

  void resize(std::int64_t samples) {
    batch = samples;
    shape.assign(1, samples * fold);
    shape.insert(shape.end(), tail.begin(), tail.end());
    out_shape = shape;
    positions = 1;
    for (std::size_t i = 0; i + 1 < shape.size(); ++i) positions *= shape[i];
    inputs = shape.back();
    if (kind == Kind::kLinear) out_shape.back() = outputs;
  }
  int visit(visitproc visit, void* arg) const {
    for (const py::object* part :
         {&weight, &bias, &plain_weight, &looks, &dtype, &calls, &apply, &shape_given, &eps}) {
      Py_VISIT(part->ptr());
    }
    Py_VISIT(kinds.ptr());
    Py_VISIT(arguments.ptr());
    return 0;
  }
  bool is_double() const { return torch.dtypes[static_cast<std::size_t>(place)].bits == 64; }
};

using HeldUse = Held<Use>;

PyObject* resize(PyObject* self, PyObject* batch) {
  const long long samples = PyLong_AsLongLong(batch);
  if (PyErr_Occurred() != nullptr) return nullptr;
  HeldUse::of(self)->resize(samples);
  Py_RETURN_NONE;
}

PyTypeObject* type_of_uses() {
  static PyMethodDef methods[] = {
      {"resize", &resize, METH_O, "resize(batch): expect so many samples from now on."},
      {nullptr, nullptr, 0, nullptr}};
  return HeldUse::type("dpkern._C.ReplayedUse", methods);
}

// The use of a site, which lives as long as this; empty where Python alone knows it.
class Found {
 public:
  Found() = default;
  Found(PyObject* site, Kind kind) : object_(get(site, names().compiled)) {
    if (!object_ || Py_TYPE(object_.get()) != type_of_uses()) return;
    const Use* const use = HeldUse::of(object_.get());
    if (use != nullptr && use->kind == kind) use_ = use;
  }

  explicit operator bool() const { return use_ != nullptr; }
  const Use& operator*() const { return *use_; }
  const Use* operator->() const { return use_; }

 private:
  Owned object_;
  const Use* use_ = nullptr;
};

// ---- the next use of a pass ----

// Whether the nodes on the way back from an operand are of the kinds that were recorded; false with
// an error, too.
bool are_expected(const Use& use, PyObject* x) {
  const long long pending = nodes.pending.number(nodes.counter);
  const Py_ssize_t expected = PyTuple_GET_SIZE(use.kinds.ptr());
  Py_ssize_t count = 0;
  const long long left = nodes.left.number(nodes.counter);
  const long long entered = nodes.entered.number(nodes.counter);
  Owned node;
  if (pending > 0) node = get(x, names().grad_fn);
  while (node && node.get() != Py_None) {
    const Owned made(PyObject_CallMethodNoArgs(node.get(), names()._sequence_nr));
    const long long number = made ? PyLong_AsLongLong(made.get()) : -1;
    if (PyErr_Occurred() != nullptr || number < left) break;
    if (number < entered) {
      const bool same = count < expected && PyTuple_GET_ITEM(use.kinds.ptr(), count) ==
                                                reinterpret_cast<PyObject*>(Py_TYPE(node.get()));
      if (!same) return false;
      ++count;
    }
    if (count == pending) break;
    const Owned following = get(node.get(), names().next_functions);
    if (!following || PyTuple_GET_SIZE(following.get()) == 0) break;
    PyObject* const next = PyTuple_GET_ITEM(PyTuple_GET_ITEM(following.get(), 0), 0);
    Py_INCREF(next);
    node = Owned(next);
  }
  return PyErr_Occurred() == nullptr && count == expected;
}

struct Next {
  Owned capture, run;
  PyObject* site = nullptr;
  Found use;
};

// Whether the pass that runs is watched; false with an error, too.
bool is_watched(PyObject* capture) {
  const Owned guard = get(capture, names().guard);
  return guard && is(guard.get(), names().running, Py_False) &&
         is(capture, names()._public, Py_False) && is(capture, names()._skipped, Py_False);
}

// Look whether a use is the one that its pass expects next; null: Python knows better, with or
// without an error. Nothing is changed, but that the first use of a pass begins its run.
std::optional<Next> next_use(PyObject* weight, PyObject* bias, PyObject* x, Kind kind) {
  if (Py_TYPE(weight) != known.parameter || !answers(known.recording, Py_True)) return {};
  const Owned source = get(weight, names()._private);
  if (!source) return {};
  Next next;
  if (!(next.capture = get(source.get(), names().capture))) return {};
  PyObject* const capture = next.capture.get();
  const Owned program = get(capture, names().program), ticket = get(capture, names()._ticket);
  if (!program || !ticket || !is_watched(capture)) return {};
  next.run = get(program.get(), names().run);
  if (!next.run || Py_TYPE(next.run.get()) != known.run) return {};
  if (PyLong_AsLongLong(ticket.get()) != known.batch_id.number(next.run.get())) {
    next.run = PyObject_CallMethodNoArgs(program.get(), names().begin);
    if (!next.run) return {};
  }
  PyObject* const run = next.run.get();
  if (known.live.of(run) != Py_True) return {};
  PyObject* const sites = known.sites.of(run);
  const long long cursor = known.cursor.number(run);
  if (!PyList_CheckExact(sites) || cursor < 0 || cursor >= PyList_GET_SIZE(sites)) return {};
  next.site = PyList_GET_ITEM(sites, static_cast<Py_ssize_t>(cursor));
  next.use = Found(next.site, kind);
  const Found& use = next.use;
  if (!use || use->weight.ptr() != weight || use->bias.ptr() != bias) return {};
  if (nodes.pending.number(nodes.counter) != use->nodes_before || !is_usual_pass()) return {};
  const bool same =
      hold_beside(use->looks.ptr(), x, use->shape, use->place, use->differentiable) == 1;
  if (!same || !are_expected(*use, x)) return {};
  if (!use->differentiable) {
    const Owned admitted(PyObject_CallMethodOneArg(next.site, names().admits, x));
    if (admitted.get() != Py_True) return {};
  }
  return next;
}

// Run the use as the function that stands in its forward pass.
PyObject* run_next(const Next& next, PyObject* x) {
  PyObject* const run = next.run.get();
  nodes.pending.put(nodes.counter, 0);
  known.cursor.put(run, known.cursor.number(run) + 1);
  const Owned anchor = get(next.capture.get(), names().anchor);
  if (!anchor) return nullptr;
  PyObject* const given[] = {anchor.get(), run, next.site, x};
  return PyObject_Vectorcall(next.use->apply.ptr(), given, 4, nullptr);
}

// Let the function of Python's that stands beside do it, as if nothing had been asked; but who
// interrupts the program means it.
PyObject* other(PyObject* function, PyObject* const* args, Py_ssize_t count) {
  if (PyErr_Occurred() != nullptr) {
    if (PyErr_ExceptionMatches(PyExc_Exception) == 0) return nullptr;
    PyErr_Clear();
  }
  return PyObject_Vectorcall(function, args, static_cast<std::size_t>(count), nullptr);
}

// linear(args, kwargs) of program/linear.py.
PyObject* linear(PyObject* function, PyObject* const* args, Py_ssize_t count) {
  if (count != 2 || !PyTuple_CheckExact(args[0])) return other(function, args, count);
  const Py_ssize_t given = PyTuple_GET_SIZE(args[0]);
  if (given < 2 || given > 3 || PyObject_Size(args[1]) != 0) return other(function, args, count);
  PyObject* const x = PyTuple_GET_ITEM(args[0], 0);
  const std::optional<Next> next =
      next_use(PyTuple_GET_ITEM(args[0], 1), given == 3 ? PyTuple_GET_ITEM(args[0], 2) : Py_None, x,
               Kind::kLinear);
  return next ? run_next(*next, x) : other(function, args, count);
}

// layer_norm(args, kwargs) of program/norm.py.
PyObject* layer_norm(PyObject* function, PyObject* const* args, Py_ssize_t count) {
  const bool usual = count == 2 && PyTuple_CheckExact(args[0]) && PyDict_CheckExact(args[1]) &&
                     PyTuple_GET_SIZE(args[0]) == 2 && PyDict_GET_SIZE(args[1]) == 3;
  if (!usual) return other(function, args, count);
  PyObject* const weight = PyDict_GetItemWithError(args[1], names().weight);
  PyObject* const bias = PyDict_GetItemWithError(args[1], names().bias);
  PyObject* const eps = PyDict_GetItemWithError(args[1], names().eps);
  if (weight == nullptr || bias == nullptr || eps == nullptr) return other(function, args, count);
  PyObject* const x = PyTuple_GET_ITEM(args[0], 0);
  const std::optional<Next> next = next_use(weight, bias, x, Kind::kLayerNorm);
  const auto same = [](PyObject* a, const py::object& b) {
    return PyObject_RichCompareBool(a, b.ptr(), Py_EQ) == 1;
  };
  const bool expected = next && same(PyTuple_GET_ITEM(args[0], 1), next->use->shape_given) &&
                        same(eps, next->use->eps);
  return expected ? run_next(*next, x) : other(function, args, count);
}

// ---- forward and backward passes ----

// The shape of what a run's use sees, and its address; false: no contiguous tensor of the dtype.
bool view_of(PyObject* tensor, const Use& use, View* view) {
  return torch.exchange->view(tensor, view) == 0 && find_dtype(*view) == use.place &&
         is_contiguous(*view);
}

template <class F>
F* data(const View& view) {
  return static_cast<F*>(view.data);
}

// Whether the products of this run are the compiled ones.
bool own_products(PyObject* run, const Use& use) {
  return PySet_Contains(known.own_products.of(run), use.dtype.ptr()) == 1;
}

int threads_of(PyObject* run) { return static_cast<int>(known.threads.number(run)); }

// Note on the node what its backward pass needs; false with an error.
bool note(PyObject* ctx, PyObject* run, PyObject* site, PyObject* x, const Use& use) {
  const Owned version = get(use.plain_weight.ptr(), names()._version);
  const Owned saved(PyTuple_Pack(1, x));
  return version && saved && PyObject_SetAttr(ctx, names().run, run) == 0 &&
         PyObject_SetAttr(ctx, names().site, site) == 0 &&
         PyObject_SetAttr(ctx, names().version, version.get()) == 0 &&
         PyObject_SetAttr(ctx, names().materialize_grads, Py_False) == 0 &&
         PyObject_SetAttr(ctx, names().to_save, saved.get()) == 0;
}

template <class F>
void multiply(const View& x, const Use& use, bool turned, const View& out, int threads) {
  const std::int64_t in = turned ? use.inputs : use.outputs;
  const std::int64_t to = turned ? use.outputs : use.inputs;
  const py::gil_scoped_release unlocked;
  cpu::matmul<F>(
      {data<const F>(x), pointer<const F>(use.weight_address), turned,
       turned ? pointer<const F>(use.bias_address) : nullptr, data<F>(out), use.positions, in, to},
      threads);
}

// A new tensor of a shape, with the product in it; null with an error.
PyObject* product(PyObject* run, const View& x, const Use& use, bool turned) {
  Owned out(new_tensor(turned ? use.out_shape : use.shape, use.place));
  View view;
  if (!out || torch.exchange->view(out.get(), &view) != 0) return nullptr;
  (use.is_double() ? &multiply<double> : &multiply<float>)(x, use, turned, view, threads_of(run));
  return out.release();
}

// forward(ctx, anchor, run, site, x)
PyObject* linear_forward(PyObject* function, PyObject* const* args, Py_ssize_t count) {
  const Found use = count == 5 ? Found(args[3], Kind::kLinear) : Found();
  View view;
  if (!use || !own_products(args[2], *use) || !view_of(args[4], *use, &view)) {
    return other(function, args, count);
  }
  if (!note(args[0], args[2], args[3], args[4], *use)) return nullptr;
  return product(args[2], view, *use, true);
}

PyObject* layer_norm_forward(PyObject* function, PyObject* const* args, Py_ssize_t count) {
  const Found use = count == 5 ? Found(args[3], Kind::kLayerNorm) : Found();
  if (!use) return other(function, args, count);
  PyObject* const rest = use->arguments.ptr();
  PyObject* const given[] = {args[4], PyTuple_GET_ITEM(rest, 0), PyTuple_GET_ITEM(rest, 1),
                             PyTuple_GET_ITEM(rest, 2), PyTuple_GET_ITEM(rest, 3)};
  const Owned made(PyObject_Vectorcall(known.normalize, given, 5, nullptr));
  if (!made) return nullptr;
  const Owned statistics(PyTuple_GetSlice(made.get(), 1, 3));
  if (!statistics || PyObject_SetAttr(args[0], names().statistics, statistics.get()) != 0 ||
      !note(args[0], args[2], args[3], args[4], *use)) {
    return nullptr;
  }
  PyObject* const out = PyTuple_GET_ITEM(made.get(), 0);
  Py_INCREF(out);
  return out;
}

// An operand that was saved, contiguous; null where it is not what the use has seen, such as what
// hooks of saved tensors may make of it, or with an error.
Owned operand_of(PyObject* x, const Use& use, View* view) {
  if (Py_TYPE(x) != torch.tensor || torch.exchange->view(x, view) != 0) return {};
  const bool same =
      find_dtype(*view) == use.place && view->device.type == kCpu &&
      std::equal(use.shape.begin(), use.shape.end(), view->shape, view->shape + view->dims);
  if (!same) return {};
  if (!is_contiguous(*view)) {
    Owned copy(PyObject_CallMethodNoArgs(x, names().contiguous));
    return copy && torch.exchange->view(copy.get(), view) == 0 ? std::move(copy) : Owned();
  }
  Py_INCREF(x);
  return x;
}

// A backward pass that takes its gradient for the run.
struct Arrival {
  Owned site, run;
  Found use;
  Owned operand;
  View x, g;
  Owned entered;  // what the run says of the first gradient of a pass
};

// Look whether a gradient is the one that is expected; null: Python knows better.
std::optional<Arrival> expected(PyObject* ctx, PyObject* x, PyObject* g, Kind kind) {
  if (Py_TYPE(g) != torch.tensor || !answers(known.recording, Py_False)) return {};
  Arrival found;
  if (!(found.site = get(ctx, names().site)) || !(found.run = get(ctx, names().run))) return {};
  found.use = Found(found.site.get(), kind);
  PyObject* const run = found.run.get();
  if (!found.use || Py_TYPE(run) != known.run) return {};
  const Use& use = *found.use;
  if (known.live.of(run) != Py_True) return {};
  PyObject* const held = known.held.of(run);
  if (!PyList_CheckExact(held) || static_cast<Py_ssize_t>(use.index) >= PyList_GET_SIZE(held) ||
      PyList_GET_ITEM(held, static_cast<Py_ssize_t>(use.index)) != Py_None) {
    return {};
  }
  if (kind == Kind::kLinear && !own_products(run, use)) return {};
  if (!view_of(g, use, &found.g) || !(found.operand = operand_of(x, use, &found.x))) return {};
  const Owned task(PyObject_CallNoArgs(known.task));
  const int same =
      task ? PyObject_RichCompareBool(task.get(), known.current_task.of(run), Py_EQ) : -1;
  if (same < 0) return {};
  if (same == 0) {
    PyObject* const given[] = {run, found.site.get(), g};
    found.entered = PyObject_VectorcallMethod(names().enters, given, 3, nullptr);
  }
  return found;
}

// Leave with the run what a gradient was; false with an error.
bool hold(const Arrival& arrival, Owned held) {
  PyObject* const run = arrival.run.get();
  const auto index = static_cast<Py_ssize_t>(arrival.use->index);
  const Owned number(PyLong_FromSsize_t(index));
  PyObject* const order = known.order.of(run);
  if (!held || !number) return false;
  return PyList_SetItem(known.held.of(run), index, held.release()) == 0 &&
         PyList_Append(order, number.get()) == 0;
}

// The gradients of a function whose other arguments are no tensors to differentiate.
PyObject* gradients(Owned gx) {
  return gx ? PyTuple_Pack(4, Py_None, Py_None, Py_None, gx.get()) : nullptr;
}

Owned none() {
  Py_INCREF(Py_None);
  return Py_None;
}

// Whether the weight is as the forward pass saw it; false with an error.
bool is_unwritten(PyObject* ctx, const Use& use) {
  const Owned now = get(use.plain_weight.ptr(), names()._version);
  const Owned then = get(ctx, names().version);
  if (!now || !then) return false;
  if (PyLong_AsLongLong(now.get()) == PyLong_AsLongLong(then.get())) return true;
  const Owned raised(PyObject_CallNoArgs(known.written_since));
  return false;
}

// What follows where the gradient of a linear map has arrived.
PyObject* linear_gradient(const Arrival& arrival, PyObject* ctx, PyObject* g) {
  const Use& use = *arrival.use;
  PyObject* const x = arrival.operand.get();
  use.taker->take(use.index, reinterpret_cast<std::uintptr_t>(arrival.x.data),
                  reinterpret_cast<std::uintptr_t>(arrival.g.data));
  if (use.kept) {
    if (!hold(arrival, PyTuple_New(0))) return nullptr;
  } else {
    const Owned before = get(x, names()._version), after = get(g, names()._version);
    if (!before || !after) return nullptr;
    if (!hold(arrival, PyTuple_Pack(4, x, g, before.get(), after.get()))) {
      return nullptr;
    }
  }
  if (!use.differentiable) return gradients(none());
  if (!is_unwritten(ctx, use)) return nullptr;
  return gradients(product(arrival.run.get(), arrival.g, use, false));
}

template <class F>
void differentiate(const View& g, const View& x, const View& mean, const View& rstd, const Use& use,
                   const View& dx, int threads) {
  const std::int64_t all = use.positions * use.inputs;
  const py::gil_scoped_release unlocked;
  cpu::layer_norm_backward<F>(
      {data<const F>(g), data<const F>(x), data<const F>(mean), data<const F>(rstd),
       pointer<const F>(use.weight_address), data<F>(dx), pointer<F>(use.rows[0]),
       pointer<F>(use.rows[1]), use.batch, all / use.batch / use.entries, use.entries},
      threads);
}

PyObject* layer_norm_gradient(const Arrival& arrival, PyObject* ctx, PyObject*) {
  const Use& use = *arrival.use;
  if (!is_unwritten(ctx, use)) return nullptr;
  View mean, rstd, dx;
  const Owned statistics = get(ctx, names().statistics);
  if (!statistics) return nullptr;
  Owned made(new_tensor(use.shape, use.place));
  if (!made || torch.exchange->view(made.get(), &dx) != 0 ||
      torch.exchange->view(PyTuple_GET_ITEM(statistics.get(), 0), &mean) != 0 ||
      torch.exchange->view(PyTuple_GET_ITEM(statistics.get(), 1), &rstd) != 0) {
    return nullptr;
  }
  (use.is_double() ? &differentiate<double> : &differentiate<float>)(arrival.g, arrival.x, mean,
                                                                     rstd, use, dx,
                                                                     threads_of(arrival.run.get()));
  return hold(arrival, PyTuple_New(0)) ? gradients(std::move(made)) : nullptr;
}

// backward(ctx, g), where `function(ctx, x, g)` is told what was saved, which is read only once,
// and what the run has said of the gradient, if it was asked.
PyObject* backward(PyObject* function, PyObject* const* args, Py_ssize_t count, Kind kind) {
  if (count != 2) {
    PyErr_SetString(PyExc_TypeError, "backward(ctx, g)");
    return nullptr;
  }
  PyObject *const ctx = args[0], *const g = args[1];
  const Owned saved = get(ctx, names().saved_tensors);
  if (!saved) return nullptr;
  PyObject* const x = PyTuple_GET_ITEM(saved.get(), 0);
  const std::optional<Arrival> arrival = expected(ctx, x, g, kind);
  if (!arrival) {
    PyObject* const given[] = {ctx, x, g};
    return other(function, given, 3);
  }
  if (PyErr_Occurred() != nullptr) return nullptr;  // the run refuses the gradient
  PyObject* const entered = arrival->entered.get();
  if (entered != nullptr && entered != Py_True) {
    PyObject* const given[] = {ctx, x, g, entered};
    return other(function, given, 4);
  }
  const bool linear = kind == Kind::kLinear;
  return (linear ? &linear_gradient : &layer_norm_gradient)(*arrival, ctx, g);
}

PyObject* linear_backward(PyObject* function, PyObject* const* args, Py_ssize_t count) {
  return backward(function, args, count, Kind::kLinear);
}

PyObject* layer_norm_backward(PyObject* function, PyObject* const* args, Py_ssize_t count) {
  return backward(function, args, count, Kind::kLayerNorm);
}

// ---- what Python is given ----

// Count nodes around an operation: counted(replay, args, kwargs).
PyObject* counted(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 3) {
    PyErr_SetString(PyExc_TypeError, "counted(replay, args, kwargs)");
    return nullptr;
  }
  PyObject* const counter = nodes.counter;
  const bool outermost = nodes.depth.number(counter) == 0;
  if (outermost) {
    const long long now = nodes.number(), left = nodes.left.number(counter);
    nodes.entered.put(counter, now);
    nodes.pending.put(counter, left == kNoUse ? 0 : now - left - nodes.wasted.number(counter));
  }
  if (PyErr_Occurred() != nullptr) return nullptr;
  Owned result(PyObject_Vectorcall(args[0], args + 1, 2, nullptr));
  if (!result) return nullptr;
  if (result.get() != Py_None) {
    nodes.left.put(counter, nodes.number());
    nodes.wasted.put(counter, 0);
  } else if (outermost) {
    const long long since = nodes.number() - nodes.entered.number(counter);
    nodes.wasted.put(counter, nodes.wasted.number(counter) + since);
  }
  return PyErr_Occurred() == nullptr ? result.release() : nullptr;
}

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

PyMethodDef kCounted = method<&counted>("counted", "counted(replay, args, kwargs): its result.");
PyMethodDef kFunctions[] = {
    method<&linear>("linear", "linear(args, kwargs): the next use, or what Python says."),
    method<&layer_norm>("layer_norm", "layer_norm(args, kwargs): the next use, or Python's."),
    method<&linear_forward>("linear_forward", "forward(ctx, anchor, run, site, x)."),
    method<&layer_norm_forward>("layer_norm_forward", "forward(ctx, anchor, run, site, x)."),
    method<&linear_backward>("linear_backward", "backward(ctx, g)."),
    method<&layer_norm_backward>("layer_norm_backward", "backward(ctx, g)."),
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

void add_uses(py::module_& m) {
  m.def("count_nodes", &count_nodes);
  m.def("connect_uses", &connect_uses);
  m.def("quick", &quick);
  m.def("as_method", [](const py::object& function) {
    return py::reinterpret_steal<py::object>(PyInstanceMethod_New(function.ptr()));
  });
  m.def("ReplayedUse", &make);
}

}  // namespace dpkern::bindings
