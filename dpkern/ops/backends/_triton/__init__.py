"""Kernels in Triton, one module an idea. Each lists ``KERNELS`` for the dispatcher."""
