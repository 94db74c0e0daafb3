"""Kernels in Triton, one module an idea. Each lists ``KERNELS`` for the dispatcher and ``AOT``, the
forms in which its kernels are compiled without a device (``launch.py``)."""
