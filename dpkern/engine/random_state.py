"""Save and restore every random generator that a forward pass may draw from."""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch


class RandomState:
    """The present state of torch's generators (CPU and ``devices``), Python's and NumPy's.

    Args:
        devices: accelerators whose default generators count; others are left alone.
    """

    def __init__(self, devices: Iterable[torch.device] = ()) -> None:
        state = torch.get_rng_state()
        self._torch: list[tuple[Callable[[], torch.Tensor], torch.Tensor]] = [
            (torch.get_rng_state, state)
        ]
        self._restore: list[tuple[Callable[[Any], Any], Any]] = [
            (torch.set_rng_state, state),
            (random.setstate, random.getstate()),
        ]
        for device in set(devices):
            module: Any = getattr(torch, device.type, None)
            if device.type not in ("cpu", "meta") and hasattr(module, "get_rng_state"):
                read = partial(module.get_rng_state, device)
                self._torch.append((read, state := read()))
                self._restore.append((_setter(module, device), state))
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            self._restore.append((_set_numpy, _numpy_state(numpy)))

    def changed(self) -> bool:
        """Whether something was drawn from torch's generators since."""
        return any(not torch.equal(state, now()) for now, state in self._torch)

    def restore(self) -> None:
        """Put every generator back into the saved state."""
        for put, state in self._restore:
            put(state)


def _set_numpy(state: Any) -> None:
    """Put NumPy's generator back; setting it takes longer than finding that it has not moved."""
    numpy = sys.modules["numpy"]
    now = _numpy_state(numpy)
    if now is state:
        return
    usual = now["bit_generator"] == state["bit_generator"] == "MT19937"
    if not usual or _moved(now, state) or not numpy.array_equal(*map(_twisted, (now, state))):
        numpy.random.set_state(state)


def _moved(now: Any, state: Any) -> bool:
    """Whether the place in the numbers, or a kept one, is another."""
    same = all(now[name] == state[name] for name in ("has_gauss", "gauss"))
    return not same or now["state"]["pos"] != state["state"]["pos"]


def _twisted(state: Any) -> Any:
    """Return the numbers of a Mersenne twister."""
    return state["state"]["key"]


_last_read: list[tuple[bytes, Any]] = []
"""The memory of a Mersenne twister, and the state that was read from it."""

_TWISTER_BYTES = 625 * 4


def _numpy_state(numpy: Any) -> dict[str, Any]:
    """Return the state as a dict, which other generators than NumPy's first one give as well.

    Where the generator's memory is what it was the last time, the same dict is returned. A number
    that is kept for the next normal draw lies elsewhere: it appears only with other draws, and
    states that have one are read anew.
    """
    generator = numpy.random.get_bit_generator()
    memory = b""
    if type(generator).__name__ == "MT19937":
        memory = ctypes.string_at(generator.ctypes.state_address, _TWISTER_BYTES)
        if _last_read and _last_read[0][0] == memory:
            known: dict[str, Any] = _last_read[0][1]
            return known
    state: dict[str, Any] = numpy.random.get_state(legacy=False)
    _last_read[:] = [(memory, state)] if memory and not state["has_gauss"] else []
    return state


def _setter(module: Any, device: torch.device) -> Callable[[Any], Any]:
    return lambda state: module.set_rng_state(state, device)
