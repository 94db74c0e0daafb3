// A plain stack of layers as one node of autograd's graph: linear maps, each behind the other or
// behind an activation. Its uses are those that the program expects, and each takes its gradient as
// a node of its own would (use_passes.cpp).

#include <algorithm>
#include <memory>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/unchanged.h"
#include "bindings/uses.h"
#include "cpu/parallel.h"

namespace dpkern::bindings::uses {

// What stands between two linear maps: functions of torch's, in place, and of a gradient and the
// output. Null: nothing.
struct Between {
  py::object in_place, gradient;
  bool is_relu;
};

struct Stack {
  py::object capture;
  py::object sites;  // the list of the program's
  py::object apply;
  py::list parts;                 // the module's
  std::vector<py::object> types;  // and their classes
  std::vector<Between> between;
  py::list biases;           // the maps' own: uses without a trained one may meet others elsewhere
  py::list tables, entries;  // what the functions that run the parts are called by, as it was

  int visit(visitproc visit, void* arg) const {
    for (const py::object* part : {&capture, &sites, &apply}) Py_VISIT(part->ptr());
    for (const py::list* part : {&parts, &biases, &tables, &entries}) Py_VISIT(part->ptr());
    for (const Between& each : between) {
      Py_VISIT(each.in_place.ptr());
      Py_VISIT(each.gradient.ptr());
    }
    return 0;
  }
};

namespace {

using HeldStack = Held<Stack>;

PyTypeObject* type_of_stacks() {
  static PyMethodDef methods[] = {{nullptr, nullptr, 0, nullptr}};
  return HeldStack::type("dpkern._C.ReplayedStack", methods);
}

// The stack of an object; null where it is none, or cleared.
const Stack* stack_of(PyObject* object) {
  return Py_TYPE(object) == type_of_stacks() ? HeldStack::of(object) : nullptr;
}

Py_ssize_t count_of(const Stack& stack) { return PyList_GET_SIZE(stack.sites.ptr()); }

PyObject* site_of(const Stack& stack, Py_ssize_t i) {
  return PyList_GET_ITEM(stack.sites.ptr(), i);
}

// Whether the module is one of these parts, which are run by the functions that have always done
// so, and nothing looks at what they do; false with an error, too.
bool is_as_known(const Stack& stack, PyObject* module) {
  const auto count = static_cast<Py_ssize_t>(stack.types.size());
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* const part = i == 0 ? module : PyList_GET_ITEM(stack.parts.ptr(), i);
    if (part != PyList_GET_ITEM(stack.parts.ptr(), i)) return false;
    if (reinterpret_cast<PyObject*>(Py_TYPE(part)) !=
        stack.types[static_cast<std::size_t>(i)].ptr()) {
      return false;
    }
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(stack.tables.ptr()); ++i) {
    PyObject* const table = PyList_GET_ITEM(stack.tables.ptr(), i);
    PyObject* const entry = PyList_GET_ITEM(stack.entries.ptr(), i);
    PyObject* const name = PyTuple_GET_ITEM(entry, 0);
    PyObject* const wanted = PyTuple_GET_ITEM(entry, 1);
    PyObject* const found = PyType_Check(table) != 0
                                ? _PyType_Lookup(reinterpret_cast<PyTypeObject*>(table), name)
                                : PyDict_GetItemWithError(table, name);
    if ((found == nullptr ? Py_None : found) != wanted) return false;
  }
  for (PyObject* const hooks : known.global_hooks) {
    if (PyDict_GET_SIZE(hooks) != 0) return false;
  }
  for (const auto& [question, answer] : known.unseen) {
    if (!answers(question, answer)) return false;
  }
  const Owned saved(PyObject_CallOneArg(known.saved_hooks, Py_True));
  return saved.get() == Py_None;
}

// The run whose uses are those of the stack, none of which has been met; null: Python knows better.
Owned run_of(const Stack& stack, PyObject* x) {
  PyObject* const capture = stack.capture.ptr();
  if (!answers(known.recording, Py_True) || !is_watched(capture) || !is_usual_pass()) return {};
  if (nodes.depth.number(nodes.counter) != 0) return {};
  const Owned program = get(capture, names().program), ticket = get(capture, names()._ticket);
  if (!program || !ticket) return {};
  Owned run = get(program.get(), names().run);
  if (!run || Py_TYPE(run.get()) != known.run) return {};
  if (PyLong_AsLongLong(ticket.get()) == known.batch_id.number(run.get())) return {};
  run = PyObject_CallMethodNoArgs(program.get(), names().begin);
  if (!run || known.live.of(run.get()) != Py_True) return {};
  if (known.sites.of(run.get()) != stack.sites.ptr()) return {};
  for (Py_ssize_t i = 0; i < count_of(stack); ++i) {
    const Found use(site_of(stack, i), Kind::kLinear);
    if (!use || !takes_product(run.get(), *use, true)) return {};
    if (use->bias.ptr() != PyList_GET_ITEM(stack.biases.ptr(), i)) return {};
    const bool holds =
        i == 0 ? hold_beside(use->looks.ptr(), x, use->shape, use->place, use->differentiable) == 1
               : hold_alone(use->looks.ptr()) == 1;
    if (!holds) return {};
    if (i == 0 && !use->differentiable && !is_given(capture, x)) return {};
  }
  View view;
  const Found first(site_of(stack, 0), Kind::kLinear);
  return first && view_of(x, *first, &view) ? std::move(run) : Owned();
}

}  // namespace

// run_stack(stack, module, args, kwargs): the module's output, or None where it has to run itself.
PyObject* run_stack(PyObject*, PyObject* const* args, Py_ssize_t count) {
  const Stack* const stack = count == 4 ? stack_of(args[0]) : nullptr;
  const bool usual = stack != nullptr && PyTuple_CheckExact(args[2]) &&
                     PyTuple_GET_SIZE(args[2]) == 1 && PyObject_Size(args[3]) == 0;
  if (!usual || !is_as_known(*stack, args[1])) {
    PyErr_Clear();
    Py_RETURN_NONE;
  }
  PyObject* const x = PyTuple_GET_ITEM(args[2], 0);
  const Owned run = run_of(*stack, x);
  const Owned anchor = run ? get(stack->capture.ptr(), names().anchor) : Owned();
  if (!run || !anchor) {
    if (PyErr_Occurred() != nullptr && PyErr_ExceptionMatches(PyExc_Exception) == 0) return nullptr;
    PyErr_Clear();
    Py_RETURN_NONE;
  }
  known.cursor.put(run.get(), count_of(*stack));
  PyObject* const given[] = {anchor.get(), run.get(), args[0], x};
  Owned out(PyObject_Vectorcall(stack->apply.ptr(), given, 4, nullptr));
  if (!out) return nullptr;
  nodes.left.put(nodes.counter, nodes.number());
  nodes.wasted.put(nodes.counter, 0);
  nodes.pending.put(nodes.counter, 0);
  return PyErr_Occurred() == nullptr ? out.release() : nullptr;
}

// forward(ctx, anchor, run, stack, x)
PyObject* stack_forward(PyObject*, PyObject* const* args, Py_ssize_t count) {
  const Stack* const stack = count == 5 ? stack_of(args[3]) : nullptr;
  if (stack == nullptr) {
    PyErr_SetString(PyExc_TypeError, "forward(ctx, anchor, run, stack, x)");
    return nullptr;
  }
  PyObject *const ctx = args[0], *const run = args[2];
  const Py_ssize_t layers = count_of(*stack);
  const Owned saved(PyTuple_New(layers)), versions(PyTuple_New(layers));
  if (!saved || !versions) return nullptr;
  PyObject* x = args[4];
  Owned out;
  for (Py_ssize_t i = 0; i < layers; ++i) {
    const Found use(site_of(*stack, i), Kind::kLinear);
    Py_INCREF(x);
    PyTuple_SET_ITEM(saved.get(), i, x);
    View view;
    if (!use || !view_of(x, *use, &view)) {
      if (PyErr_Occurred() == nullptr)
        PyErr_SetString(PyExc_RuntimeError, "not the input of a use");
      return nullptr;
    }
    Owned version = get(use->plain_weight.ptr(), names()._version);
    out = product(run, x, view, *use, true);
    if (!version || !out) return nullptr;
    PyTuple_SET_ITEM(versions.get(), i, version.release());
    if (i + 1 < layers && stack->between[static_cast<std::size_t>(i)].in_place) {
      const Between& next = stack->between[static_cast<std::size_t>(i)];
      const Owned done(PyObject_CallOneArg(next.in_place.ptr(), out.get()));
      if (!done) return nullptr;
    }
    x = out.get();
  }
  const bool noted = PyObject_SetAttr(ctx, names().run, run) == 0 &&
                     PyObject_SetAttr(ctx, names().site, args[3]) == 0 &&
                     PyObject_SetAttr(ctx, names().version, versions.get()) == 0 &&
                     PyObject_SetAttr(ctx, names().materialize_grads, Py_False) == 0 &&
                     PyObject_SetAttr(ctx, names().to_save, saved.get()) == 0;
  return noted ? out.release() : nullptr;
}

namespace {

// What a node of one of the uses would have been told.
Owned note_of(PyObject* run, PyObject* site, PyObject* version, PyObject* x) {
  Owned note(PyObject_CallNoArgs(known.note));
  const Owned saved(PyTuple_Pack(1, x));
  const bool noted = note && saved && PyObject_SetAttr(note.get(), names().run, run) == 0 &&
                     PyObject_SetAttr(note.get(), names().site, site) == 0 &&
                     PyObject_SetAttr(note.get(), names().version, version) == 0 &&
                     PyObject_SetAttr(note.get(), names().saved_tensors, saved.get()) == 0;
  return noted ? std::move(note) : Owned();
}

template <class F>
void mask(const View& g, const View& out, std::int64_t count, int threads) {
  F* const to = static_cast<F*>(g.data);
  const F* const from = static_cast<const F*>(out.data);
  const py::gil_scoped_release unlocked;
  cpu::parallel_for(count, std::int64_t{1} << 15, threads,
                    [&](std::int64_t begin, std::int64_t end) {
                      for (std::int64_t i = begin; i < end; ++i) {
                        to[i] = from[i] <= 0 ? F{0} : to[i];  // NaN passes it on, as torch's does
                      }
                    });
}

// The gradient in front of an activation, given the one behind it, which is written to where it can
// be: nothing else holds it.
Owned gradient_before(const Between& between, PyObject* run, const Use& behind, Owned g,
                      PyObject* out) {
  if (!between.in_place) return g;
  View to, from;
  const bool own = between.is_relu && Py_TYPE(g.get()) == torch.tensor &&
                   Py_TYPE(out) == torch.tensor && view_of(g.get(), behind, &to) &&
                   view_of(out, behind, &from) && to.dims == from.dims &&
                   std::equal(to.shape, to.shape + to.dims, from.shape);
  if (own) {
    std::int64_t count = 1;
    for (int i = 0; i < to.dims; ++i) count *= to.shape[i];
    (behind.is_double() ? &mask<double> : &mask<float>)(to, from, count, threads_of(run));
    return g;
  }
  if (PyErr_Occurred() != nullptr) return {};
  PyObject* const given[] = {g.get(), out};
  return PyObject_Vectorcall(between.gradient.ptr(), given, 2, nullptr);
}

}  // namespace

// backward(ctx, g); `function` is the gradient of one use in Python.
PyObject* stack_backward(PyObject* function, PyObject* const* args, Py_ssize_t count) {
  if (count != 2) {
    PyErr_SetString(PyExc_TypeError, "backward(ctx, g)");
    return nullptr;
  }
  PyObject* const ctx = args[0];
  const Owned saved = get(ctx, names().saved_tensors), run = get(ctx, names().run);
  const Owned held = get(ctx, names().site), versions = get(ctx, names().version);
  if (!saved || !run || !held || !versions) return nullptr;
  const Stack* const stack = stack_of(held.get());
  const Py_ssize_t layers = stack == nullptr ? 0 : count_of(*stack);
  Py_INCREF(args[1]);
  Owned g(args[1]);
  for (Py_ssize_t i = layers - 1; i >= 0 && g.get() != Py_None; --i) {
    PyObject* const x = PyTuple_GET_ITEM(saved.get(), i);
    PyObject* const site = site_of(*stack, i);
    const Owned note = note_of(run.get(), site, PyTuple_GET_ITEM(versions.get(), i), x);
    if (!note) return nullptr;
    PyObject* const given[] = {note.get(), g.get()};
    const Owned found(linear_backward(function, given, 2));
    if (!found) return nullptr;
    PyObject* const gx = PyTuple_GET_ITEM(found.get(), 3);
    Py_INCREF(gx);
    g = Owned(gx);
    const Found use(site, Kind::kLinear);
    if (i > 0 && gx != Py_None) {
      if (!use) return nullptr;
      const Between& between = stack->between[static_cast<std::size_t>(i - 1)];
      g = gradient_before(between, run.get(), *use, std::move(g), x);
      if (!g) return nullptr;
    }
  }
  return PyTuple_Pack(4, Py_None, Py_None, Py_None, g.get());
}

// A stack as it is described.
py::object make_stack(const py::dict& given) {
  auto stack = std::make_unique<Stack>();
  stack->capture = given["capture"], stack->sites = given["sites"], stack->apply = given["apply"];
  stack->parts = given["parts"].cast<py::list>();
  stack->biases = given["biases"].cast<py::list>();
  stack->tables = given["tables"].cast<py::list>();
  stack->entries = given["entries"].cast<py::list>();
  for (const py::handle part : stack->parts) stack->types.push_back(py::type::of(part));
  for (const py::handle item : given["between"]) {
    const auto row = item.cast<py::tuple>();
    const auto given_or_null = [&](int i) {
      return row[i].is_none() ? py::object() : py::object(row[i]);
    };
    stack->between.push_back({given_or_null(0), given_or_null(1), row[2].cast<bool>()});
  }
  return HeldStack::make(type_of_stacks(), std::move(stack));
}

}  // namespace dpkern::bindings::uses
