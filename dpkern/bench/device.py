"""Put the arguments of a call where they are timed."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch

from ..ops.update import State

ON_DEVICES = ("cuda", "triton", "cupy")


def device_of(backend: str) -> torch.device:
    """Return the device that a backend runs on."""
    return torch.device("cuda" if backend in ON_DEVICES and torch.cuda.is_available() else "cpu")


def placed(tree: Any, device: torch.device) -> Any:
    """Return the same arguments with plain tensors on the device, strides kept."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().to(device)
    if isinstance(tree, State):
        state = copy.copy(tree)
        state.buffers = {name: placed(list(each), device) for name, each in tree.buffers.items()}
        return state
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(placed(item, device) for item in tree))
    if isinstance(tree, (list, tuple)) and not isinstance(tree, torch.Size):
        return type(tree)(placed(item, device) for item in tree)
    if isinstance(tree, dict):
        return {key: placed(value, device) for key, value in tree.items()}
    if isinstance(tree, torch.device):
        return device
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        moved = {f.name: placed(getattr(tree, f.name), device) for f in dataclasses.fields(tree)}
        if any(moved[name] is not getattr(tree, name) for name in moved):
            return dataclasses.replace(tree, **moved)
    return tree


def arguments(given: dict[str, Any], backend: str, names: set[str]) -> dict[str, Any]:
    """Return a call's arguments on the backend's device; ``names`` hold devices."""
    device = device_of(backend)
    found = {name: placed(value, device) for name, value in given.items()}
    return found | dict.fromkeys(names & found.keys(), device)


def wait(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
