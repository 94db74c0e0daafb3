"""Let the C library keep the pages that a step frees for the next one.

A step frees what it has allocated: activations, gradients, operands of norms. By default glibc
gives the end of its heap back to the system as soon as some megabytes of it are free, and the next
step pays for fresh pages, which can cost more than its arithmetic. Whether that happens depends on
what else lies at the end of the heap. The thresholds are those of the whole process. They are set
once, when the first private step on a CPU closes, so that what its probes took goes back as ever.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache

from ..base.errors import InvalidInput

VARIABLE = "DPKERN_ALLOCATOR"
CHOICES = ("keep", "system")
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Names of ``mallopt``'s parameters, as ``malloc.h`` numbers them."""
_LARGEST_INT = 2**31 - 1
_LARGEST_IN_HEAP = 32 << 20
"""Bytes of a block from which on glibc maps it by itself in any case."""


def allocator_choice() -> str:
    """Return ``DPKERN_ALLOCATOR``: ``keep`` if it is not set.

    Raises:
        InvalidInput: another value.
    """
    choice = os.environ.get(VARIABLE) or CHOICES[0]
    if choice not in CHOICES:
        raise InvalidInput(
            VARIABLE,
            expected="'keep' (freed pages serve the next step) or 'system' (glibc's own settings)",
            got=choice,
            remedy=f"Set {VARIABLE}=system, or leave it out.",
        )
    return choice


def user_has_chosen() -> bool:
    """Whether the environment holds settings of glibc's allocator, which then stay in force."""
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return "glibc.malloc." in tunables or any(name.startswith("MALLOC_") for name in os.environ)


@cache
def keep_freed_pages() -> bool:
    """Set the thresholds of this process, at the first call.

    Returns:
        Whether they were set: on glibc, unless ``DPKERN_ALLOCATOR`` is ``system`` or the
        environment has settings of its own.

    Raises:
        InvalidInput: see ``allocator_choice``.
    """
    if allocator_choice() == "system" or user_has_chosen() or sys.platform != "linux":
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    # Either setting alone would end glibc's own adaptation of the other.
    settings = (_MMAP_THRESHOLD, _LARGEST_IN_HEAP), (_TRIM_THRESHOLD, _LARGEST_INT)
    return all(bool(library.mallopt(name, value)) for name, value in settings)


def give_back_freed_pages() -> None:
    """Give back once what is free, where ``keep_freed_pages`` was set.

    The first batch is probed, which takes several times the memory of a step. The second step calls
    this: by then the probes' memory is free, and from then on only what steps take is kept.
    """
    if keep_freed_pages():
        ctypes.CDLL(None).malloc_trim(0)


__all__ = ["allocator_choice", "give_back_freed_pages", "keep_freed_pages", "user_has_chosen"]
