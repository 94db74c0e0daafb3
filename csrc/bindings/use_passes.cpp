// Forward and backward passes of uses that a program expects: what autograd calls.

#include <algorithm>
#include <optional>

#include "bindings/bindings.h"
#include "bindings/uses.h"
#include "cpu/ops.h"

namespace dpkern::bindings::uses {

bool view_of(PyObject* tensor, const Use& use, View* view) {
  return torch.exchange->view(tensor, view) == 0 && find_dtype(*view) == use.place &&
         is_contiguous(*view);
}

int threads_of(PyObject* run) { return static_cast<int>(known.threads.number(run)); }

namespace {

template <class F>
F* data(const View& view) {
  return static_cast<F*>(view.data);
}

// Whether the products of this use are the compiled ones.
bool own_products(PyObject* run, const Use& use) {
  PyObject* const most = PyDict_GetItemWithError(known.own_products.of(run), use.dtype.ptr());
  return most != nullptr && use.inputs * use.outputs <= PyLong_AsLongLong(most);
}

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
PyObject* own_product(PyObject* run, const View& x, const Use& use, bool turned) {
  Owned out(new_tensor(turned ? use.out_shape : use.shape, use.place));
  View view;
  if (!out || torch.exchange->view(out.get(), &view) != 0) return nullptr;
  (use.is_double() ? &multiply<double> : &multiply<float>)(x, use, turned, view, threads_of(run));
  return out.release();
}

// A tensor's method that takes a shape.
Owned shaped(PyObject* tensor, PyObject* method, const std::vector<std::int64_t>& shape) {
  const Owned sizes(PyTuple_New(static_cast<Py_ssize_t>(shape.size())));
  for (std::size_t i = 0; sizes && i < shape.size(); ++i) {
    PyTuple_SET_ITEM(sizes.get(), static_cast<Py_ssize_t>(i), PyLong_FromLongLong(shape[i]));
  }
  return sizes ? PyObject_CallMethodOneArg(tensor, method, sizes.get()) : nullptr;
}

// The same by torch, in the calls that F.linear and its gradient come to.
PyObject* torchs_product(PyObject* x, const Use& use, bool turned) {
  const bool flat = use.shape.size() == 2;
  Owned rows;
  if (!flat) {
    rows = shaped(x, names().view, {use.positions, turned ? use.inputs : use.outputs});
    if (!rows) return nullptr;
  }
  PyObject* const matrix = flat ? x : rows.get();
  const bool biased = turned && !use.plain_bias.is_none();
  PyObject* const factor = (turned ? use.turned : use.plain_weight).ptr();
  PyObject* const given[] = {use.plain_bias.ptr(), matrix, factor};
  Owned out(biased ? PyObject_Vectorcall(known.add_product, given, 3, nullptr)
                   : PyObject_Vectorcall(known.product, given + 1, 2, nullptr));
  if (flat || !out) return out.release();
  // No view leaves the forward pass, which in-place activations would refuse.
  return shaped(out.get(), turned ? names().resize_ : names().view,
                turned ? use.out_shape : use.shape)
      .release();
}

}  // namespace

bool takes_product(PyObject* run, const Use& use, bool turned) {
  const bool by_torch = use.shape.size() == 2 || !turned || !use.plain_bias.is_none();
  return by_torch || own_products(run, use);
}

PyObject* product(PyObject* run, PyObject* x, const View& view, const Use& use, bool turned) {
  return own_products(run, use) ? own_product(run, view, use, turned)
                                : torchs_product(x, use, turned);
}

// forward(ctx, anchor, run, site, x)
PyObject* linear_forward(PyObject* function, PyObject* const* args, Py_ssize_t count) {
  const Found use = count == 5 ? Found(args[3], Kind::kLinear) : Found();
  View view;
  if (!use || !takes_product(args[2], *use, true) || !view_of(args[4], *use, &view)) {
    return other(function, args, count);
  }
  if (!note(args[0], args[2], args[3], args[4], *use)) return nullptr;
  return product(args[2], args[4], view, *use, true);
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

namespace {

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
  if (kind == Kind::kLinear && !takes_product(run, use, false)) return {};
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
  return gradients(product(arrival.run.get(), g, arrival.g, use, false));
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

}  // namespace

PyObject* linear_backward(PyObject* function, PyObject* const* args, Py_ssize_t count) {
  return backward(function, args, count, Kind::kLinear);
}

PyObject* layer_norm_backward(PyObject* function, PyObject* const* args, Py_ssize_t count) {
  return backward(function, args, count, Kind::kLayerNorm);
}

}  // namespace dpkern::bindings::uses
