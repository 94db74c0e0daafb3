"""Choose the device of a training by name, and refuse one that is not there."""

from __future__ import annotations

import re

import torch

from .errors import BackendError, InvalidInput

NAMES = "cpu, cuda or cuda:N"
_NAME = re.compile(r"cpu|cuda(:\d{1,3})?")


def training_device(name: str | None) -> torch.device:
    """Return the device that parameters, rows and kernels of a training stand on.

    Args:
        name: ``cpu``, ``cuda`` or ``cuda:N``. None is ``cpu``.

    Raises:
        InvalidInput: another name.
        BackendError: this machine, or this torch, has no such device.
    """
    if name is None:
        return torch.device("cpu")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidInput(
            "device", expected=NAMES, got=name, remedy="Name a device, or leave --device out."
        )
    device = torch.device(name)
    count = _count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise BackendError(
            "device",
            expected=f"a device of this machine; torch finds {count} CUDA devices",
            got=name,
            remedy="Leave --device out to train on the processor, or name a device that is there.",
        )
    return device


def _count() -> int:
    """Return the number of devices that torch can use here."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


__all__ = ["NAMES", "training_device"]
