"""Read what the machine says about a stretch of work: memory, page faults, hardware counters."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import platform
import resource
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_TASKS, _PARANOID = Path("/proc/self/task"), Path("/proc/sys/kernel/perf_event_paranoid")
_SYSCALL = {"x86_64": 298, "aarch64": 241}
CACHE_MISSES = "cache misses"
_HARDWARE = {"cycles": 0, "instructions": 1, CACHE_MISSES: 3}
"""The codes ``PERF_COUNT_HW_*`` of ``PERF_TYPE_HARDWARE`` (perf_event_open(2))."""
_EXCLUDE_KERNEL, _EXCLUDE_HYPERVISOR = 1 << 5, 1 << 6
_ATTRIBUTE_BYTES = 128
LINE_BYTES = 64
"""Bytes that a miss of the last cache moves."""


def processor_name() -> str:
    """Return the name of this machine's processor, as its system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def peak_memory(work: Callable[[], Any]) -> tuple[int | None, str]:
    """Measure how far this process's resident memory rises above its level before ``work``.

    Returns:
        Bytes and an empty text, or None and why nothing can be said.
    """
    if sys.platform != "linux" or not os.access(_CLEAR, os.W_OK):
        reason = "resident memory is read from /proc/self, which this system does not have"
        work()
        return None, reason
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
    try:
        _CLEAR.write_text("5")  # the peak is what is resident now
    except OSError as error:
        reason = f"the peak of resident memory cannot be reset: {error.strerror}"
        work()
        return None, reason
    before = _resident("VmRSS")
    work()
    return max(0, _resident("VmHWM") - before), ""


def _resident(field: str) -> int:
    """Return ``VmRSS`` or ``VmHWM`` (the peak) in bytes."""
    lines = _STATUS.read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field + ":"))


def page_faults() -> int:
    """Return the pages that this process has touched for the first time so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


class HardwareCounters:
    """Cycles, instructions and cache misses of all threads of this process, where permitted.

    ``reason`` says why they cannot be read, and is empty where they can.
    """

    def __init__(self) -> None:
        self.reason = ""
        self._open: dict[str, list[int]] = {}
        number = _SYSCALL.get(platform.machine())
        if sys.platform != "linux" or number is None:
            self.reason = f"no perf_event_open on {sys.platform} {platform.machine()}"
            return
        threads = [int(task.name) for task in _TASKS.iterdir()]
        for name, config in _HARDWARE.items():
            for thread in threads:
                found, error = _opened(number, config, thread)
                if error:
                    self.reason = _explained(error)
                    self.close()
                    return
                self._open.setdefault(name, []).append(found)

    def read(self) -> dict[str, int]:
        """Return counts since the counters were opened; empty where they cannot be read."""
        return {
            name: sum(struct.unpack("q", os.read(one, 8))[0] for one in files)
            for name, files in self._open.items()
        }

    def close(self) -> None:
        """Close the counters."""
        for files in self._open.values():
            for one in files:
                os.close(one)
        self._open = {}


def _opened(number: int, config: int, thread: int) -> tuple[int, int]:
    """Open a counter of a thread; return it, and the error number if there is none."""
    attribute = bytearray(_ATTRIBUTE_BYTES)
    struct.pack_into("IIQ", attribute, 0, 0, _ATTRIBUTE_BYTES, config)
    struct.pack_into("Q", attribute, 40, _EXCLUDE_KERNEL | _EXCLUDE_HYPERVISOR)
    library = ctypes.CDLL(None, use_errno=True)
    buffer = (ctypes.c_char * _ATTRIBUTE_BYTES).from_buffer(attribute)
    found = int(library.syscall(number, buffer, thread, -1, -1, 0))
    return found, 0 if found >= 0 else ctypes.get_errno()


def _explained(error: int) -> str:
    if error in (errno.EACCES, errno.EPERM):
        level = _PARANOID.read_text().strip() if _PARANOID.exists() else "unknown"
        return f"perf_event_open is not permitted (perf_event_paranoid = {level})"
    if error in (errno.ENOENT, errno.ENODEV, errno.EOPNOTSUPP):
        return "the processor's counters are hidden from this system, as in most virtual machines"
    return f"perf_event_open failed: {os.strerror(error)}"
