"""Run the fused update with arguments that were packed once.

A step changes numbers of the rule, the position in the key stream, and the values of tensors.
Everything else is compared with the packed arguments; if anything differs, the step takes the
recorded path, and the arguments are packed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import optimizer as torch_optimizer

from ...base.dtypes import DTYPES
from ...ops import direct, update
from ...privacy.mechanisms import Plan
from ...step.step import DPStep
from ..capture import Capture
from ..fused import Group, rule_of
from .unchanged import Unchanged

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
    """

    place: int
    indices: list[int]
    rule: update.Rule
    written: list[Tensor]
    params: list[int]
    buffers: list[int]
    sizes: list[int]
    counts: list[Tensor]
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
        self._held = [self._state[p] for g in groups for p in g.params] if names else []
        self._buffers = [(name, [held[name] for held in self._held]) for name in names]
        if counted:
            self._buffers.append(("step", [count for group in packed for count in group.counts]))
        self._moved = Unchanged([b for _, buffers in self._buffers for b in buffers])
        self._unchanged = Unchanged([slot.used for slot in self.capture.slots])
        self._kernel = direct.kernel("update_tensors", step.params[0].dtype)
        self._plan: Plan | None = None
        self._sums: object = None
        self._groups = packed

    # replay

    def _refused(self, step: DPStep) -> str:
        optimizer, capture = self.optimizer, self.capture
        flat = capture.program.flat
        if self._groups is None:
            return self.reason or "nothing was packed yet"
        if flat is None or flat.sums.of(step.sums) is None or not capture.program.enabled:
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
        why = direct.why_not() or step.obstacle
        if why:
            return why
        if not self._same_groups() or not self._same_state():
            return "other groups or another state"
        return "" if self._unchanged.holds() else "parameters that were frozen, moved or replaced"

    def _same_groups(self) -> bool:
        given = self.optimizer.param_groups
        if len(given) != len(self._params):
            return False
        for each, known in zip(given, self._params, strict=True):
            params = each["params"]
            if len(params) != len(known) or not all(map(is_, params, known)):
                return False
        return True

    def _same_state(self) -> bool:
        state = self.optimizer.state
        if not self._buffers:
            return True
        if state is not self._state or len(state) != len(self._keys):
            return False
        if not all(map(is_, state.values(), self._inner)) or not all(map(is_, state, self._keys)):
            return False
        try:
            for name, buffers in self._buffers:
                if not all(map(is_, map(itemgetter(name), self._held), buffers)):
                    return False
        except KeyError:
            return False
        return self._moved.holds()

    def _rules(self) -> list[update.Rule] | None:
        """Return the rules with the numbers of this step, or None if their buffers differ."""
        assert self._groups is not None
        for place, given in enumerate(self.optimizer.param_groups):
            numbers = self._read(given)
            if numbers == self._numbers[place]:
                continue
            if not _shows_changes(numbers):
                return None
            rule = rule_of(type(self.optimizer), given)
            for group in self._groups:
                if group.place == place:
                    if rule is None or rule.buffer_names() != group.rule.buffer_names():
                        return None
                    group.rule = rule
            self._numbers[place] = numbers
        return [group.rule for group in self._groups]

    def _updates(self) -> list[int] | None:
        """Return each group's update number, from 1; None where parameters of a group differ."""
        assert self._groups is not None
        found = []
        for group in self._groups:
            # Torch's SGD asks only whether its buffers have begun.
            taken = set(torch.stack(group.counts).tolist()) if group.counts else {1}
            if len(taken) != 1:
                return None
            found.append(int(taken.pop()) + 1)
        return found

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
        self.reason = self._refused(step)
        if self.reason:
            return False
        rules, updates = self._rules(), self._updates()
        if rules is None or updates is None:
            self.reason = "a rule with other buffers, or parameters of other ages"
            return False
        assert self._groups is not None
        flat = self.capture.program.flat
        assert flat is not None
        memory = flat.sums.of(step.sums)
        assert memory is not None
        if step.plan is not self._plan:
            self._take_plan(step.plan)
        if memory is not self._sums:
            for group in self._groups:
                group.sums = [memory.addresses[i] for i in group.indices]
            self._sums = memory
            self._kind = DTYPES["Summed"].index(memory.whole.dtype)
        noise = step.begin_release()
        drawn = b"" if noise is None else direct.BYTES["UpdateNoise"](noise)
        threads = direct.threads()
        for group, rule, number in zip(self._groups, rules, updates, strict=True):
            numbers = direct.BYTES["Rule"](rule.packed(number))
            places = (group.positions, group.scales) if noise is not None else ([], [])
            self._kernel(
                *(group.params, group.sums, self._kind, group.buffers, *places, numbers, drawn),
                *(group.maps, step.gradient_scale, group.sizes, threads),
            )
            increment_version(group.written)
            if group.counts:
                torch._foreach_add_(group.counts, 1)
        self.replays += 1
        return True


def _shows_changes(numbers: tuple[Any, ...]) -> bool:
    """Whether none of these can change without being another object."""
    flat = (n for number in numbers for n in (number if type(number) is tuple else (number,)))
    return all(type(n) in (int, float, bool) for n in flat)


__all__ = ["PackedUpdate"]
