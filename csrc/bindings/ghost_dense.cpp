// Bindings of the ghost kernels for linear, embedding and normalisation layers.

#include "bindings/bindings.h"

namespace dpkern::bindings {

void add_ghost_dense(pybind11::module_&) {}

}  // namespace dpkern::bindings
