"""Run the fused update with arguments that were packed once.

A step changes numbers of the rule, the position in the key stream, and the values of tensors.
Everything else is compared with the packed arguments; if anything differs, the step takes the
recorded path, and the arguments are packed again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim import optimizer as torch_optimizer

from ...base.dtypes import DTYPES
from ...ops import direct, update
from ...privacy.mechanisms import Plan
from ...step.step import DPStep
from ..capture import Capture
from ..fused import Group, rule_of
from ..table_entries import TableEntries, same_entries
from .sums import SumMemory
from .unchanged import Unchanged

_increment_version = torch._C._increment_version
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


@dataclass
class PackedGroup:
    """Parameters that one rule updates, with the arguments of their update.

    Attributes:
        place: place of the group in ``param_groups``.
        indices: places of the parameters in the private step.
        rule: the rule with the numbers of the last step.
        written: what the kernel writes, as ordinary tensors.
        addresses: of the parameters, then of the buffers, those of one name after the other.
        sizes: of the parameters.
        counts: how many updates each parameter has had, as torch keeps it (Adam), or nothing.
        packed: the rule as the kernel takes it, at the update at hand.
    """

    place: int
    indices: list[int]
    rule: update.Rule
    written: list[Tensor]
    params: list[int]
    buffers: list[int]
    sizes: list[int]
    counts: list[Tensor]
    packed: bytes = b""
    scales: list[float] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    maps: bytes = b""
    sums: list[int] = field(default_factory=list)


class PackedUpdate:
    """Update of one private optimizer, with packed arguments where that is possible.

    Args:
        optimizer: the user's optimizer.
        capture: capture whose program makes the sums.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, capture: Capture) -> None:
        self.optimizer = optimizer
        self.capture = capture
        self.replays = 0
        """The number of updates that ran with packed arguments."""
        self.reason = "nothing was packed yet"
        """The reason why the last update did not; empty if it did."""
        self._groups: list[PackedGroup] | None = None

    def forget(self) -> None:
        """Forget the packed arguments, so that the next step packs them again."""
        self._groups = None

    # packing

    def pack(self, step: DPStep, groups: Sequence[Group]) -> None:
        """Keep the arguments of an update that has just run."""
        self._groups = None
        if not step.params[0].is_cpu:
            self.reason = "parameters on a device"
            return
        numbers = _NUMBERS.get(type(self.optimizer))
        indices = sorted(i for group in groups for i in group.indices)
        if numbers is None:
            self.reason = f"the rule of {type(self.optimizer).__name__}"
            return
        if indices != list(range(len(step.params))):
            self.reason = "parameters that are not updated"
            return
        given = self.optimizer.param_groups
        self._read = itemgetter(*numbers)
        self._numbers = [self._read(each) for each in given]
        if not all(_shows_changes(numbers) for numbers in self._numbers):
            self.reason = "numbers of the rule that are tensors"
            return
        self._params = [list(each["params"]) for each in given]
        self._state = self.optimizer.state
        self._keys, self._inner = list(self._state), list(self._state.values())
        places = {id(p): k for k, each in enumerate(given) for p in each["params"]}
        names = tuple(dict.fromkeys(name for g in groups for name in g.rule.buffer_names()))
        if any(g.rule.buffer_names() != names for g in groups):
            self.reason = "groups with and without momentum"
            return
        counted = bool(groups) and isinstance(groups[0].rule, update.Adam)
        packed = []
        for group in groups:
            own = [b for name in group.rule.buffer_names() for b in group.state.buffers[name]]
            params = [step.params[i] for i in group.indices]
            packed.append(
                PackedGroup(
                    places[id(group.params[0])],
                    list(group.indices),
                    group.rule,
                    [*params, *own],
                    [p.data_ptr() for p in params],
                    [b.data_ptr() for b in own],
                    [p.numel() for p in params],
                    [self._state[p]["step"] for p in group.params] if counted else [],
                )
            )
        held = [self._state[p] for g in groups for p in g.params] if names else []
        self._buffers = TableEntries(held) if held else None
        """The tables of the parameters' states, with the buffers in them."""
        counts = ("step",) if counted else ()
        self._moved = Unchanged([each[name] for name in (*names, *counts) for each in held])
        self._unchanged = Unchanged([slot.used for slot in self.capture.slots])
        self._kernel = direct.kernel("update_tensors", step.params[0].dtype)
        self._plan: Plan | None = None
        self._sums: object = None
        self._groups = packed

    # replay

    def _refused(self, step: DPStep, memory: SumMemory | None) -> str:
        optimizer, capture = self.optimizer, self.capture
        if self._groups is None:
            return self.reason or "nothing was packed yet"
        if memory is None or not capture.program.enabled:
            return "sums of the recorded path"
        if capture.public_gradients:
            return "public gradients"
        if (
            optimizer._optimizer_step_pre_hooks
            or optimizer._optimizer_step_post_hooks
            or torch_optimizer._global_optimizer_pre_hooks
            or torch_optimizer._global_optimizer_post_hooks
        ):
            return "hooks of the optimizer"
        why = step.obstacle
        if why or not direct.runs_compiled():
            return why or direct.why_not() or ""
        if not self._same_groups() or not self._same_state():
            return "other groups or another state"
        return "" if self._unchanged.holds() else "parameters that were frozen, moved or replaced"

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

    def _take_numbers(self) -> bool:
        """Take over the numbers of this step's rules; return whether their buffers are the same."""
        assert self._groups is not None
        given = self.optimizer.param_groups
        if [*map(self._read, given)] == self._numbers:
            return True
        for place, each in enumerate(given):
            numbers = self._read(each)
            if numbers == self._numbers[place]:
                continue
            if not _shows_changes(numbers):
                return False
            rule = rule_of(type(self.optimizer), each)
            for group in self._groups:
                if group.place == place:
                    if rule is None or rule.buffer_names() != group.rule.buffer_names():
                        return False
                    group.rule, group.packed = rule, b""
            self._numbers[place] = numbers
        return True

    def _count(self) -> bool:
        """Pack the rules of this update's number; return whether groups' parameters share one."""
        assert self._groups is not None
        for group in self._groups:
            if group.counts:
                taken = set(torch.stack(group.counts).tolist())
                if len(taken) != 1:
                    return False
                group.packed = direct.BYTES["Rule"](group.rule.packed(int(taken.pop()) + 1))
            elif not group.packed:
                # Torch's SGD asks only whether its buffers have begun.
                group.packed = direct.BYTES["Rule"](group.rule.packed(2))
        return True

    def _take_plan(self, plan: Plan) -> None:
        """Store the scales and positions of the plan's noise, and the maps to its coordinates."""
        assert self._groups is not None
        scales, positions = plan.scales, plan.positions
        for group in self._groups:
            group.scales = [scales[i] for i in group.indices]
            group.positions = [positions[i] for i in group.indices]
            if plan.maps_in_update:
                group.maps = direct.BYTES["PairMap"](plan.pair_maps.part(group.indices))
        self._plan = plan

    def step(self, step: DPStep) -> bool:
        """Release the step's sums and update the parameters, or return False if refused.

        Call it inside ``without_torch_function()`` and ``torch.no_grad()``.
        """
        flat = self.capture.program.flat
        memory = None if flat is None else flat.sums.of(step.sums)
        self.reason = self._refused(step, memory)
        if self.reason:
            return False
        if not self._take_numbers() or not self._count():
            self.reason = "a rule with other buffers, or parameters of other ages"
            return False
        assert self._groups is not None
        assert memory is not None
        if step.plan is not self._plan:
            self._take_plan(step.plan)
        if memory is not self._sums:
            for group in self._groups:
                group.sums = [memory.addresses[i] for i in group.indices]
            self._sums = memory
            self._kind = DTYPES["Summed"].index(memory.whole.dtype)
        noise = step.begin_release()
        drawn = b"" if noise is None else direct.drawn_noise(*noise)
        threads = direct.threads()
        for group in self._groups:
            places = ([], []) if noise is None else (group.positions, group.scales)
            self._kernel(
                *(group.params, group.sums, self._kind, group.buffers, *places, group.packed),
                *(drawn, group.maps, step.gradient_scale, group.sizes, threads),
            )
            _increment_version(group.written)
            if group.counts:
                torch._foreach_add_(group.counts, 1)
        self.replays += 1
        return True


def _shows_changes(numbers: tuple[Any, ...]) -> bool:
    """Whether none of these can change without being another object."""
    flat = (n for number in numbers for n in (number if type(number) is tuple else (number,)))
    return all(type(n) in (int, float, bool) for n in flat)


__all__ = ["PackedUpdate"]
