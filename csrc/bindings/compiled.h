#pragma once
// Calls of compiled kernels, by what was seen of an op's arguments.

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

#include "bindings/look.h"

namespace dpkern::bindings {

// A compiled function: its signature, its kernels, and how many threads they may use.
class Compiled {
 public:
  explicit Compiled(const pybind11::dict& declared);

  // The kernel for calls of this dtype, or null.
  const Entry* kernel(int kind_of_call) const;
  // Read the arguments that are no tensors; false: Python knows better.
  bool convert(Seen& seen) const;
  // Run the kernel, and note what it has written; false with an error.
  bool run(const Entry& kernel, Seen& seen, std::int64_t& counted) const;

  Look look;
  int out = -1;  // the parameter with room for results, whose changes are noted before the call

 private:
  std::vector<const Entry*> entries_;  // by dtype; one behind them for a call without
  PyObject* threads_;
};

// A result that is made here.
struct Result {
  Group group;
  int dtype;                            // of a group of one
  std::vector<std::vector<int>> parts;  // each dimension: the sizes that it is the product of
  std::vector<std::int64_t> literals;   // and a number
  int rest;                             // place of *S behind them, or kNoRest
};

enum class Returns { kNothing, kResults, kNumber, kChanged };

// ``run(...)`` of an op with a kernel of its own: what it returns, or NotImplemented where one look
// is not enough.
class Caller {
 public:
  explicit Caller(const pybind11::dict& declared);
  PyObject* call(PyObject* args, PyObject* names) const;

 private:
  PyObject* run(Seen& seen) const;
  PyObject* make(const Result& result, const Seen& seen) const;
  PyObject* answer(const Seen& seen, PyObject* plan, std::int64_t counted, PyObject* made) const;

  Compiled compiled_;
  std::vector<Result> results_;
  Returns returns_;
  int changed_;
  PyObject* made_into_;
  PyObject* found_;
};

}  // namespace dpkern::bindings
