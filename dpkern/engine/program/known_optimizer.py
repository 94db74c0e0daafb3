"""Compare an optimizer with what an earlier step found: groups, tables of its state, numbers.

An update whose arguments were packed or recorded is repeated only where all of these are the same,
but for numbers that a schedule changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim import optimizer as torch_optimizer

from ...ops import direct, update
from ..fused import Group, rule_of
from ..table_entries import TableEntries, same_entries
from .unchanged import Unchanged

_same_groups, _same_state = direct.look("same_groups"), direct.look("same_state")

_ADAM = (
    *("lr", "betas", "eps", "weight_decay", "decoupled_weight_decay"),
    *("amsgrad", "maximize", "differentiable", "capturable"),
)
_NUMBERS: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.SGD: (
        *("lr", "momentum", "dampening", "nesterov", "weight_decay", "maximize"),
        "differentiable",
    ),
    torch.optim.Adam: _ADAM,
    torch.optim.AdamW: _ADAM,
}
"""Names in ``param_groups`` of the numbers that make a rule."""


class KnownOptimizer:
    """Groups, state and numbers of an optimizer, as one of its updates found them.

    Args:
        optimizer: the user's optimizer.
        groups: the groups of its update, with all state entered.
        parameters: number of parameters that an update has to cover.

    Attributes:
        reason: the reason why no later step can be compared with this one; empty if it can.
        names: names of the buffers of every rule.
        counts: for each group, how many updates every parameter has had, as torch keeps it (Adam),
            or nothing.
        places: for each group, its place in ``param_groups``.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, groups: Sequence[Group], parameters: int
    ) -> None:
        self.optimizer = optimizer
        self.reason = self._looked_at(groups, parameters)

    def _looked_at(self, groups: Sequence[Group], parameters: int) -> str:
        numbers = _NUMBERS.get(type(self.optimizer))
        if numbers is None:
            return f"the rule of {type(self.optimizer).__name__}"
        if sorted(i for group in groups for i in group.indices) != list(range(parameters)):
            return "parameters that are not updated"
        given = self.optimizer.param_groups
        self._read = itemgetter(*numbers)
        self._numbers = [self._read(each) for each in given]
        if not all(map(_shows_changes, self._numbers)):
            return "numbers of the rule that are tensors"
        self._params = [list(each["params"]) for each in given]
        self._state = self.optimizer.state
        self._keys, self._inner = list(self._state), list(self._state.values())
        places = {id(p): k for k, each in enumerate(given) for p in each["params"]}
        self.places = [places[id(group.params[0])] for group in groups]
        self.names = tuple(dict.fromkeys(name for g in groups for name in g.rule.buffer_names()))
        if any(g.rule.buffer_names() != self.names for g in groups):
            return "groups with and without momentum"
        counted = bool(groups) and isinstance(groups[0].rule, update.Adam)
        self.counts = [
            [self._state[p]["step"] for p in g.params] if counted else [] for g in groups
        ]
        held = [self._state[p] for g in groups for p in g.params] if self.names else []
        self._buffers = TableEntries(held) if held else None
        """The tables of the parameters' states, with the buffers in them."""
        steps = ("step",) if counted else ()
        self._moved = Unchanged([each[name] for name in (*self.names, *steps) for each in held])
        return ""

    def has_hooks(self) -> bool:
        """Whether hooks want to see the optimizer's steps."""
        return bool(
            self.optimizer._optimizer_step_pre_hooks
            or self.optimizer._optimizer_step_post_hooks
            or torch_optimizer._global_optimizer_pre_hooks
            or torch_optimizer._global_optimizer_post_hooks
        )

    def same(self) -> bool:
        """Whether groups and state are the same objects, and the state is where it was."""
        return self._same_groups() and self._same_state()

    def _same_groups(self) -> bool:
        given = self.optimizer.param_groups
        if _same_groups is not None:
            return bool(_same_groups(given, self._params))
        if len(given) != len(self._params):
            return False
        for each, known in zip(given, self._params, strict=True):
            params = each["params"]
            if len(params) != len(known) or not all(map(is_, params, known)):
                return False
        return True

    def _same_state(self) -> bool:
        state = self.optimizer.state
        if self._buffers is None:
            return True
        if state is not self._state or not self._same_entries(state):
            return False
        return same_entries(self._buffers.tables, self._buffers.entries) and self._moved.holds()

    def _same_entries(self, state: Mapping[Any, Any]) -> bool:
        if _same_state is not None:
            return bool(_same_state(state, self._keys, self._inner))
        same = len(state) == len(self._keys) and all(map(is_, state, self._keys))
        return same and all(map(is_, state.values(), self._inner))

    def changed_rules(self) -> dict[int, update.Rule] | None:
        """Return the rules of groups, by place, whose numbers are not those of the last call.

        None if a group has no rule of the same buffers any more; then nothing is taken over.
        """
        now = [*map(self._read, self.optimizer.param_groups)]
        if now == self._numbers:
            return {}
        changed: dict[int, update.Rule] = {}
        for place, numbers in enumerate(now):
            if numbers == self._numbers[place] or place not in self.places:
                continue
            given = self.optimizer.param_groups[place]
            rule = rule_of(type(self.optimizer), given) if _shows_changes(numbers) else None
            if rule is None or rule.buffer_names() != self.names:
                return None
            changed[place] = rule
        self._numbers = now
        return changed


def count_of(counts: Sequence[Tensor]) -> int | None:
    """Return the number of updates that parameters have had; None if it is not the same for all."""
    taken = set(torch.stack(list(counts)).tolist())
    return int(taken.pop()) if len(taken) == 1 else None


def _shows_changes(numbers: tuple[Any, ...]) -> bool:
    """Whether none of these can change without being another object."""
    flat = (n for number in numbers for n in (number if type(number) is tuple else (number,)))
    return all(type(n) in (int, float, bool) for n in flat)


__all__ = ["KnownOptimizer", "count_of"]
