#pragma once
// Whether tensors look as they did, for callers in C++.

#include <Python.h>

#include <cstdint>
#include <vector>

namespace dpkern::bindings {

// Whether an operand is an ordinary tensor of this shape and dtype (its place) on the CPU, trained
// or not, and the tensors of `looks`, an object of UnchangedTensors, are as they were: 1, 0, or -1
// with an error.
int hold_beside(PyObject* looks, PyObject* x, const std::vector<std::int64_t>& shape, int dtype,
                bool trained);

// Whether the tensors of `looks` are as they were, as above.
int hold_alone(PyObject* looks);

}  // namespace dpkern::bindings
