#pragma once
// Uses of private parameters that a program expects, as C++ takes them (uses.cpp), and what they
// ask of torch and of the engine.

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "bindings/held.h"
#include "bindings/owned.h"
#include "bindings/replay.h"
#include "bindings/tensors.h"

namespace dpkern::bindings::uses {

namespace py = pybind11;

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
};
extern Nodes nodes;

// What uses ask of torch and of the engine: set once, before the first use.
struct Known {
  PyTypeObject* parameter = nullptr;
  PyTypeObject* run = nullptr;
  // Functions without arguments.
  PyObject *recording = nullptr, *task = nullptr, *autocast = nullptr, *transforms = nullptr;
  PyObject *normalize = nullptr, *written_since = nullptr;
  PyObject *add_product = nullptr, *product = nullptr;  // torch's, of matrices
  // For stacks: tables of hooks of all modules, functions and what each of them returns where
  // nothing looks at operations, one that takes a flag, and the class of what stands for a node.
  std::vector<PyObject*> global_hooks;
  std::vector<std::pair<PyObject*, PyObject*>> unseen;
  PyObject *saved_hooks = nullptr, *note = nullptr;
  Slot batch_id, sites, cursor, live, current_task, held, order, threads, own_products;
};
extern Known known;

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
  DPK_NAME(inputs);
  DPK_NAME(materialize_grads);
  DPK_NAME(next_functions);
  DPK_NAME(passes);
  DPK_NAME(program);
  DPK_NAME(resize_);
  DPK_NAME(run);
  DPK_NAME(running);
  DPK_NAME(saved_tensors);
  DPK_NAME(site);
  DPK_NAME(statistics);
  DPK_NAME(to_save);
  DPK_NAME(version);
  DPK_NAME(view);
  DPK_NAME(weight);
#undef DPK_NAME
};
inline const Names& names() {
  static const Names made;
  return made;
}

inline Owned get(PyObject* object, PyObject* name) { return PyObject_GetAttr(object, name); }

// Whether a function without arguments returns this object; false with an error, too.
inline bool answers(PyObject* function, PyObject* wanted) {
  const Owned found(PyObject_CallNoArgs(function));
  return found.get() == wanted;
}

// Whether an attribute is this object.
inline bool is(PyObject* object, PyObject* name, PyObject* wanted) {
  return get(object, name).get() == wanted;
}

enum class Kind { kLinear, kLayerNorm };

// What a use is in every step, and its operands' sizes in this one.
struct Use {
  Kind kind;
  std::size_t index;
  py::object weight, bias, plain_weight, looks, dtype, calls, apply;
  py::object plain_bias, turned;  // linear: the bias or None, and the weight transposed
  py::tuple kinds;                // of the nodes in front of it
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
    for (const py::object* part : {&weight, &bias, &plain_weight, &looks, &dtype, &calls, &apply,
                                   &plain_bias, &turned, &shape_given, &eps}) {
      Py_VISIT(part->ptr());
    }
    Py_VISIT(kinds.ptr());
    Py_VISIT(arguments.ptr());
    return 0;
  }
  bool is_double() const { return torch.dtypes[static_cast<std::size_t>(place)].bits == 64; }
};

using HeldUse = Held<Use>;

PyTypeObject* type_of_uses();

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

// Whether no backward pass runs, no transform and no autocast of any device.
bool is_usual_pass();

// Whether the pass that runs is watched; false with an error, too.
bool is_watched(PyObject* capture);

// Whether an operand is an argument of the module itself, which every site admits.
bool is_given(PyObject* capture, PyObject* x);

// The shape of what a run's use sees, and its address; false: no contiguous tensor of the dtype.
bool view_of(PyObject* tensor, const Use& use, View* view);

int threads_of(PyObject* run);

// Whether a product of this run is taken in C++. Without a bias F.linear views what it returns.
bool takes_product(PyObject* run, const Use& use, bool turned);

// A linear map's output, or its input's gradient if not `turned`; null with an error.
PyObject* product(PyObject* run, PyObject* x, const View& view, const Use& use, bool turned);

// Let the function of Python's that stands beside do it, as if nothing had been asked; but who
// interrupts the program means it.
PyObject* other(PyObject* function, PyObject* const* args, Py_ssize_t count);

// Functions of CPython's convention; the first argument is what Python says where C++ does not know
// what to do. next_use.cpp:
PyObject* counted(PyObject*, PyObject* const* args, Py_ssize_t count);
PyObject* linear(PyObject* function, PyObject* const* args, Py_ssize_t count);
PyObject* layer_norm(PyObject* function, PyObject* const* args, Py_ssize_t count);

// use_passes.cpp:
PyObject* linear_forward(PyObject* function, PyObject* const* args, Py_ssize_t count);
PyObject* layer_norm_forward(PyObject* function, PyObject* const* args, Py_ssize_t count);
PyObject* linear_backward(PyObject* function, PyObject* const* args, Py_ssize_t count);
PyObject* layer_norm_backward(PyObject* function, PyObject* const* args, Py_ssize_t count);

// stack.cpp:
PyObject* run_stack(PyObject*, PyObject* const* args, Py_ssize_t count);
PyObject* stack_forward(PyObject*, PyObject* const* args, Py_ssize_t count);
PyObject* stack_backward(PyObject* function, PyObject* const* args, Py_ssize_t count);
py::object make_stack(const py::dict& given);

}  // namespace dpkern::bindings::uses
