#pragma once
// Ops whose compiled function takes more than the op's own arguments.

#include <pybind11/pybind11.h>

#include <vector>

#include "bindings/compiled.h"

namespace dpkern::bindings {

// ``run(...)`` of an op that a compiled function carries out. The function's arguments are the op's
// or what ``prepare`` makes of them, and ``finish`` makes the op's result; tensors that the
// function fills are made here where ``prepare`` gives none.
class Composed {
 public:
  explicit Composed(const pybind11::dict& declared);
  PyObject* call(PyObject* args, PyObject* names) const;

 private:
  PyObject* run(Seen& seen, Seen& inner) const;
  bool take(Seen& seen, Seen& inner, PyObject* prepared) const;
  bool fill(std::size_t place, Seen& inner) const;
  PyObject* finish(PyObject* prepared, const Seen& inner, std::int64_t counted) const;

  Look look_;
  Compiled function_;
  std::vector<int> arguments_;  // of the function: places in the op's call, or -1: prepared
  std::vector<int> sizes_;      // of the function: places among the op's, or -1
  PyObject* finish_;
  PyObject* refusal_;  // the class of errors that a caller sees
};

}  // namespace dpkern::bindings
