"""Run the fused update with arguments that were packed once.

A step changes numbers of the rule, the position in the key stream, and the values of tensors.
Everything else is compared with the packed arguments; if anything differs, the step takes the
recorded path, and the arguments are packed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...base.dtypes import DTYPES
from ...ops import direct, update
from ...privacy.mechanisms import Plan
from ...step.step import DPStep
from ..capture import Capture
from ..fused import Group
from .known_optimizer import KnownOptimizer, count_of
from .sums import SumMemory
from .unchanged import Unchanged

_increment_version = torch._C._increment_version


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
        known = KnownOptimizer(self.optimizer, groups, len(step.params))
        if known.reason:
            self.reason = known.reason
            return
        packed = []
        for group, place, counts in zip(groups, known.places, known.counts, strict=True):
            own = [b for name in known.names for b in group.state.buffers[name]]
            params = [step.params[i] for i in group.indices]
            packed.append(
                PackedGroup(
                    place,
                    list(group.indices),
                    group.rule,
                    [*params, *own],
                    [p.data_ptr() for p in params],
                    [b.data_ptr() for b in own],
                    [p.numel() for p in params],
                    counts,
                )
            )
        self._known = known
        self._unchanged = Unchanged([slot.used for slot in self.capture.slots])
        self._kernel = direct.kernel("update_tensors", step.params[0].dtype)
        self._plan: Plan | None = None
        self._sums: object = None
        self._groups = packed

    # replay

    def _refused(self, step: DPStep, memory: SumMemory | None) -> str:
        capture = self.capture
        if self._groups is None:
            return self.reason or "nothing was packed yet"
        if memory is None or not capture.program.enabled:
            return "sums of the recorded path"
        if capture.public_gradients:
            return "public gradients"
        if self._known.has_hooks():
            return "hooks of the optimizer"
        why = step.obstacle
        if why or not direct.runs_compiled():
            return why or direct.why_not() or ""
        if not self._known.same():
            return "other groups or another state"
        return "" if self._unchanged.holds() else "parameters that were frozen, moved or replaced"

    def _take_numbers(self) -> bool:
        """Take over the numbers of this step's rules; return whether their buffers are the same."""
        changed = self._known.changed_rules()
        if changed is None:
            return False
        for group in self._groups or () if changed else ():
            if group.place in changed:
                group.rule, group.packed = changed[group.place], b""
        return True

    def _count(self) -> bool:
        """Pack the rules of this update's number; return whether groups' parameters share one."""
        assert self._groups is not None
        for group in self._groups:
            if group.counts:
                count = count_of(group.counts)
                if count is None:
                    return False
                group.packed = direct.BYTES["Rule"](group.rule.packed(count + 1))
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


__all__ = ["PackedUpdate"]
