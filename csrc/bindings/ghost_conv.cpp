// Bindings of the ghost kernels for convolution layers.

#include "bindings/bindings.h"

namespace dpkern::bindings {

void add_ghost_conv(pybind11::module_&) {}

}  // namespace dpkern::bindings
