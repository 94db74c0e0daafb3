"""The state of an adaptive mechanism: tensors per parameter, learnt from released values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...base.errors import InvalidInput
from ...base.validate import same_kind


@dataclass
class MechanismState:
    """The state of a mechanism between steps.

    Attributes:
        tensors: by name, one tensor per parameter (or any number of them, fixed over a run).
        unsaved: names that are never written to a checkpoint: what they hold was not released.
    """

    tensors: dict[str, list[torch.Tensor]]
    unsaved: frozenset[str] = field(default_factory=frozenset)

    def __getitem__(self, name: str) -> list[torch.Tensor]:
        return self.tensors[name]

    def to(self, device: torch.device) -> None:
        """Follow the parameters to their device."""
        for tensors in self.tensors.values():
            tensors[:] = [tensor.to(device) for tensor in tensors]

    def state_dict(self) -> dict[str, list[torch.Tensor]]:
        """Return copies of everything that may be saved."""
        return {
            name: [tensor.clone() for tensor in tensors]
            for name, tensors in self.tensors.items()
            if name not in self.unsaved
        }

    def load_state_dict(self, state: object) -> None:
        """Copy a saved state into these tensors; unsaved ones stay as they are.

        Raises:
            InvalidInput: other names or shapes; nothing has changed.
        """
        self.check(state)
        assert isinstance(state, Mapping)
        for name, tensors in state.items():
            for mine, theirs in zip(self.tensors[name], tensors, strict=True):
                mine.copy_(theirs)

    def check(self, state: object) -> None:
        """Check that ``load_state_dict`` would accept this; change nothing.

        Raises:
            InvalidInput: it would not.
        """
        mine = {name: held for name, held in self.tensors.items() if name not in self.unsaved}
        same = isinstance(state, Mapping) and state.keys() == mine.keys()
        if not same or not all(_alike(_get(state, name), held) for name, held in mine.items()):
            raise InvalidInput(
                "state.memory",
                expected=f"tensors {sorted(mine)} of the parameters' shapes and dtypes",
                got=str(sorted(state)) if isinstance(state, Mapping) else type(state).__name__,
                remedy="Resume with the model and mechanism that wrote the state.",
            )


def _get(state: Any, name: str) -> Any:
    return state[name]


def _alike(saved: object, held: Sequence[torch.Tensor]) -> bool:
    return (
        isinstance(saved, (list, tuple))
        and len(saved) == len(held)
        and all(same_kind(theirs, mine) for theirs, mine in zip(saved, held, strict=True))
    )
