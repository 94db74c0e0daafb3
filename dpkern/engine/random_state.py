"""Save and restore every random generator that a forward pass may draw from."""

from __future__ import annotations

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
            (random.setstate, python := random.getstate()),
        ]
        self._python = python
        self.elsewhere = False
        """Whether passes that were noted have drawn from other generators than torch's."""
        self._numpy: Any = None
        for device in set(devices):
            module: Any = getattr(torch, device.type, None)
            if device.type not in ("cpu", "meta") and hasattr(module, "get_rng_state"):
                read = partial(module.get_rng_state, device)
                self._torch.append((read, state := read()))
                self._restore.append((_setter(module, device), state))
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            self._numpy = _numpy_state(numpy)
            self._restore.append((_set_numpy, self._numpy))

    def changed(self) -> bool:
        """Whether something was drawn from torch's generators since."""
        return any(not torch.equal(state, now()) for now, state in self._torch)

    def note(self) -> None:
        """Note whether something was drawn from the generators of Python or NumPy since.

        They may be part of a module's state, which is put back behind a pass.
        """
        moved = random.getstate() != self._python
        self.elsewhere |= moved or (self._numpy is not None and not _is_numpys(self._numpy))

    def restore(self) -> None:
        """Put every generator back into the saved state."""
        for put, state in self._restore:
            put(state)


def _set_numpy(state: Any) -> None:
    """Put NumPy's generator back; setting it takes longer than finding that it has not moved."""
    if not _is_numpys(state):
        sys.modules["numpy"].random.set_state(state)


def _is_numpys(state: Any) -> bool:
    """Whether NumPy's generator has this state, if it is of the usual kind."""
    numpy = sys.modules["numpy"]
    now = _numpy_state(numpy)
    usual = now["bit_generator"] == state["bit_generator"] == "MT19937"
    return usual and not _moved(now, state) and numpy.array_equal(*map(_twisted, (now, state)))


def _moved(now: Any, state: Any) -> bool:
    """Whether the place in the numbers, or a kept one, is another."""
    same = all(now[name] == state[name] for name in ("has_gauss", "gauss"))
    return not same or now["state"]["pos"] != state["state"]["pos"]


def _twisted(state: Any) -> Any:
    """Return the numbers of a Mersenne twister."""
    return state["state"]["key"]


def _numpy_state(numpy: Any) -> dict[str, Any]:
    """Return the state as a dict, which other generators than NumPy's first one give as well."""
    state: dict[str, Any] = numpy.random.get_state(legacy=False)
    return state


def _setter(module: Any, device: torch.device) -> Callable[[Any], Any]:
    return lambda state: module.set_rng_state(state, device)
