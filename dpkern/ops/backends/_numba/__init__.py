"""Kernels that numba compiles when they are first called: the C++ core, line by line in Python."""
