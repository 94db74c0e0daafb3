#pragma once
// One look at the arguments of an op's call, by the op's signature. It decides the common case
// only: whatever is odd is left to Python, which names what is wrong, or lets the call pass after
// all.

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "bindings/seen.h"
#include "bindings/tensors.h"

namespace dpkern::bindings {

enum class Is { kObject, kTensor, kChoice, kInteger, kFloat, kBool, kDtype, kDevice };
enum class Group { kOwn, kLeading, kSum };
enum class Layout { kStrided, kContiguous, kTransposable };
// How a kernel receives an argument that is no tensor.
enum class Passed { kNot, kInteger, kWord, kFloat, kBool, kIntegers, kFloats, kBytes };

constexpr int kAnySize = -1;
constexpr int kNoRest = -1;
constexpr int kAnyRest = -2;

// A parameter of a signature.
struct Parameter {
  PyObject* name = nullptr;
  PyObject* standard = nullptr;  // null: the argument must be given
  Is is = Is::kObject;
  Passed passed = Passed::kNot;
  bool by_name = false;
  bool optional = false;
  bool written = false;
  bool filled = false;
  // tensors
  Group group = Group::kOwn;
  std::vector<int> dtypes;
  std::vector<int> dims;               // places of sizes, or kAnySize
  std::vector<std::int64_t> literals;  // >= 0: the size itself
  int rest = kNoRest;                  // place of *S, or kAnyRest
  Layout layout = Layout::kContiguous;
  bool many = false;
  bool repeated = false;   // a list of several lists of these sizes
  bool one_dtype = false;  // of all tensors of a list
  bool alone = false;
  bool may_be_empty = false;
  // choices
  std::vector<PyObject*> options;
  // numbers
  std::int64_t least_integer = 0, most_integer = 0;
  double least = 0, most = 0;
  bool above = false;  // least is no number of the range
  int size = -1;       // the size that it is
  PyObject* pack = nullptr;
};

// An op's signature, looked up in C++.
class Look {
 public:
  explicit Look(const pybind11::dict& declared);

  // An empty call. Those that have ended leave their memory to the next ones.
  auto begin() const {
    std::unique_ptr<Seen> seen;
    if (spare_.empty()) {
      seen = std::make_unique<Seen>(parameters_.size(), sizes_);
    } else {
      seen = std::move(spare_.back());
      spare_.pop_back();
    }
    const auto end = [this](Seen* ended) {
      ended->clear();
      spare_.emplace_back(ended);
    };
    return std::unique_ptr<Seen, decltype(end)>(seen.release(), end);
  }
  // Put the arguments at their places; false: Python knows better.
  bool arrange(PyObject* args, PyObject* names, Seen& seen) const;
  // Look at them.
  bool at(Seen& seen) const;
  // Look at one of them.
  bool at(std::size_t place, Seen& seen) const;
  // The op's own check; a new reference, null with an error. None without one.
  PyObject* own_check(const Seen& seen) const;
  // The call as Python's kernels take it; a new reference, null with an error.
  PyObject* bound(const Seen& seen, PyObject* plan) const;

  std::size_t parameters() const { return parameters_.size(); }
  const Parameter& parameter(std::size_t i) const { return parameters_[i]; }
  std::size_t named() const { return sizes_; }

 private:
  bool tensors(const Parameter& parameter, Argument& argument, Seen& seen) const;
  bool tensor(const Parameter& parameter, PyObject* value, std::size_t item, Argument& argument,
              Seen& seen) const;
  bool value(const Parameter& parameter, Argument& argument, Seen& seen) const;

  std::vector<Parameter> parameters_;
  std::size_t positional_ = 0;
  std::size_t sizes_ = 0;        // all that are bound; a bound call names the first of them
  std::vector<int> size_kinds_;  // of the public ones: 0 a number, 1 a shape, 2 a list of shapes
  bool trusts_ = false;          // tensors come from an op, which has seen whether any is negated
  PyObject* check_ = nullptr;
  mutable std::vector<std::unique_ptr<Seen>> spare_;  // guarded by Python's lock
};

}  // namespace dpkern::bindings
