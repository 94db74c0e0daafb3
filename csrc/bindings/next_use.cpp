// Whether a use of private parameters is the one that its pass expects next, and counts of the
// nodes between uses (dpkern/engine/nodes_between.py).

#include <optional>

#include "bindings/unchanged.h"
#include "bindings/uses.h"

namespace dpkern::bindings::uses {
namespace {

constexpr long long kNoUse = -1;  // _NONE of nodes_between.py

}  // namespace

bool is_usual_pass() {
  if (!answers(known.autocast, Py_False) || !answers(known.transforms, Py_None)) return false;
  const Owned task(PyObject_CallNoArgs(known.task));
  return task && PyLong_AsLongLong(task.get()) == -1;
}

bool is_watched(PyObject* capture) {
  const Owned guard = get(capture, names().guard);
  return guard && is(guard.get(), names().running, Py_False) &&
         is(capture, names()._public, Py_False) && is(capture, names()._skipped, Py_False);
}

bool is_given(PyObject* capture, PyObject* x) {
  const Owned passes = get(capture, names().passes);
  const Owned inputs = passes ? get(passes.get(), names().inputs) : Owned();
  if (!inputs || !PyTuple_CheckExact(inputs.get())) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(inputs.get()); ++i) {
    if (PyTuple_GET_ITEM(inputs.get(), i) == x) return true;
  }
  return false;
}

namespace {

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
  if (!use->differentiable && !is_given(capture, x)) {
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

}  // namespace

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

}  // namespace dpkern::bindings::uses
