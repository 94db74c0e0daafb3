"""Read energy counters of the machine: RAPL of processors, NVML of GPUs.

A counter measures the whole package or board, whatever else runs on it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

_POWERCAP = Path("/sys/class/powercap")
_NVML_LIBRARY = "libnvidia-ml.so.1"


class EnergyMeter:
    """Counters that this process may read.

    Args:
        root: folder of the system's power capping zones.

    Attributes:
        reason: why nothing can be read; empty where something can.
    """

    def __init__(self, root: Path = _POWERCAP) -> None:
        self._root = root
        self._zones = [zone for zone in sorted(root.glob("intel-rapl:*")) if _is_package(zone)]
        self._gpus = _gpu_counters()
        denied = [zone for zone in self._zones if _joules(zone / "energy_uj") is None]
        self._zones = [zone for zone in self._zones if zone not in denied]
        self.reason = ""
        if not self._zones and not self._gpus:
            why = "only root may read them" if denied else "this machine shows none"
            self.reason = f"no energy counters (RAPL, NVML): {why}"

    def measure(self, work: Callable[[], object], times: int) -> dict[str, float]:
        """Return joules of one of ``times`` runs by counter; empty where nothing can be read."""
        if self.reason:
            return {}
        before = self._read()
        for _ in range(times):
            work()
        found = {}
        for name, joules in self._read().items():
            spent = joules - before[name]
            if spent < 0:  # the counter began again at 0
                spent += _joules(self._root / name / "max_energy_range_uj") or 0.0
            found[name] = spent / times
        return found

    def _read(self) -> dict[str, float]:
        found = {zone.name: _joules(zone / "energy_uj") or 0.0 for zone in self._zones}
        return found | {name: read() for name, read in self._gpus.items()}


def _is_package(zone: Path) -> bool:
    try:
        return (zone / "name").read_text().startswith("package")
    except OSError:
        return False


def _joules(path: Path) -> float | None:
    try:
        return int(path.read_text()) / 1e6
    except (OSError, ValueError):
        return None


def _gpu_counters() -> dict[str, Callable[[], float]]:
    """Return a function for each GPU that reads its joules since the driver was loaded."""
    try:
        library = ctypes.CDLL(_NVML_LIBRARY)
    except OSError:
        return {}
    count = ctypes.c_uint()
    if library.nvmlInit_v2() or library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return {}
    found: dict[str, Callable[[], float]] = {}
    for index in range(count.value):
        handle, energy = ctypes.c_void_p(), ctypes.c_ulonglong()
        if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)):
            continue
        if library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(energy)):
            continue

        def read(handle: ctypes.c_void_p = handle) -> float:
            spent = ctypes.c_ulonglong()
            library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(spent))
            return spent.value / 1e3

        found[f"GPU {index}"] = read
    return found


__all__ = ["EnergyMeter"]
