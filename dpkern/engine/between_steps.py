"""Compare parameters and the optimizer's state with what the step before has left.

Writes into parameters are looked at as torch runs them (``parameter``). Those through
``parameter.detach()``, ``state_dict()``, NumPy or a view leave no call to look at, nor do writes
into the optimizer's state. Contents tell them, behind the 1st, 2nd, 4th, 8th ... step and at secret
times: loops that write at all tend to do so at every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .held_tensors import HeldTensor, held_now
from .occasions import draw_gap

ROOM = 16 << 20
"""Bytes of tensors that are copied; further ones are hashed."""


class BetweenSteps:
    """The contents of what is trained, from one step to the next, where these are compared.

    Args:
        optimizer: the user's optimizer, whose state counts.
        parameters: the trained parameters.
        writes: returns the number of writes that were looked at.
        found: called if something was written that was not looked at.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[Tensor],
        writes: Callable[[], int],
        found: Callable[[], None],
    ) -> None:
        self._optimizer = optimizer
        self._parameters = parameters
        self._writes = writes
        self._found = found
        self._secret = draw_gap()
        self.next = 1
        """The number of the next step behind which contents are kept."""
        self._looked_at = 0
        self.held: list[HeldTensor] = []
        """Contents that the last step has left; empty where nothing is compared."""

    def keep(self, steps: int) -> None:
        """Keep what the last of these steps has left, to compare it as the next one begins."""
        if self._secret <= steps:
            self._secret = steps + draw_gap()
        self.next = min(self._secret, 1 << steps.bit_length())
        self._looked_at = self._writes()
        room = ROOM
        with _disable_current_modes():  # whoever counts a step's operations counts none of these
            for tensor in self._trained():
                held = held_now(tensor, room)
                room -= 0 if held.copy is None else tensor.nbytes
                self.held.append(held)

    def check(self) -> None:
        """Compare what was kept with what is there as the next step begins."""
        held, self.held = self.held, []
        with _disable_current_modes():
            changed = self._writes() == self._looked_at and any(each.changed() for each in held)
        if changed:
            self._found()

    def _trained(self) -> Iterator[Tensor]:
        yield from self._parameters
        for state in self._optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


__all__ = ["BetweenSteps"]
