"""The speed of the kernels, always beside the best torch formulation in the same process."""
