"""Noise and update of a private step as a part of a recording that is replayed.

A recorded launch repeats its arguments, so that whatever changes from step to step is read from
step counters in device memory (``ops.update.step_counter``), one for each group of the optimizer:
the number of the step, by which its noise is fresh; Adam's powers; learning rate and decay. Every
step writes them before its replay, once its release is in the ledger. They also name the step that
is due, and the recording itself takes each counter past it: a replay that no step has announced, or
a second one, finds no step due and changes nothing (``csrc/cuda/update.cu``).

Everything else that the update reads is compared before a step is announced. Where something
differs, the same replay makes the sums alone, and the step is released as it is without a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import increment_version

from ..base.errors import DPKernError
from ..base.rng import Purpose
from ..ops import _step_counter, update
from ..ops.clip import ClipResult
from ..privacy.mechanisms import Plan
from ..step import sums as summing
from ..step.checks import check_sum
from ..step.noise import noise_of, part
from .fused import Group, groups_of
from .program.known_optimizer import KnownOptimizer, count_of

if TYPE_CHECKING:
    from .optimizer import OptimizerAdapter

_READ_COUNTERS = ("cuda", "cupy")
"""Backends whose update reads step counters on the device."""


class RecordedUpdate:
    """The noise and update of a private optimizer, launched once while a graph is recorded.

    Args:
        adapter: of the optimizer, after its first steps.

    Attributes:
        reason: the reason why they cannot be recorded; empty if they can.
    """

    def __init__(self, adapter: OptimizerAdapter) -> None:
        self._adapter, self._step = adapter, adapter.dp_step
        self._plan: Plan = adapter._plan()
        self._groups: list[Group] = []
        self.reason = self._prepared()

    def _prepared(self) -> str:
        """Prepare the launches; return the reason why they cannot be recorded."""
        adapter, step, plan = self._adapter, self._step, self._plan
        if plan.distribution is None:
            return "a step without noise"
        if why := step.release_obstacle:
            return why
        plain = [p.detach() for p in adapter.capture.parameters]
        groups = groups_of(adapter.optimizer, adapter._places, plain)
        if groups is None:
            return f"an optimizer that runs its own step: {type(adapter.optimizer).__name__}"
        if any(group.fresh for group in groups):
            return "an optimizer whose state is not there yet"
        self._known = known = KnownOptimizer(adapter.optimizer, groups, len(plain))
        if known.reason:
            return known.reason
        if any(count.is_cuda for counts in known.counts for count in counts):
            return "counts of updates on the device, for which the host waits (fused=True)"
        noise = noise_of(plan, step.key, 1)  # step counters begin in front of step 1
        assert noise is not None
        self._key = noise.stream.key
        shape, device = (len(groups), _step_counter.SIZE), plain[0].device
        self._counters = torch.empty(shape, dtype=torch.int64, device=device)
        self._rules = [group.rule for group in groups]
        self._calls: list[dict[str, Any]] = []
        self._held = [[plain[i] for i in group.indices] for group in groups]
        self._written = list(plain)
        for group, counter in zip(groups, self._counters, strict=True):
            drawn = part(noise, group.indices)
            assert drawn is not None
            self._written += [b for name in known.names for b in group.state.buffers[name]]
            self._calls.append(
                {
                    "rule": group.rule,
                    "state": group.state,
                    "gradient_scale": step.gradient_scale,
                    "noise": replace(drawn, step_counter=counter),
                }
            )
        self._groups = groups
        return self._without_kernels()

    def _without_kernels(self) -> str:
        """Return the reason why no kernels can be recorded; load those that can."""
        for held, call in zip(self._held, self._calls, strict=True):
            # What only looks at dtypes: sums in the parameters' memory.
            integers = torch.int32 if held[0].dtype is torch.float32 else torch.int64
            exact = self._plan.arithmetic == "exact"
            sums = [p.view(integers) for p in held] if exact else held
            without = {**call, "noise": replace(call["noise"], step_counter=None)}
            try:
                names = [
                    update.step.backend_of(held, sums, **each, backend=self._step.backend)
                    for each in (call, without)
                ]
            except DPKernError as error:
                return f"an update without a step counter: {error}"
            if names[0] not in _READ_COUNTERS or names[0] != names[1]:
                return f"an update by {names[1]}, which reads no step counter on the device"
            # The update's kernel was loaded by earlier steps; a recording cannot load one.
            update.advance(self._counters[0], rule=call["rule"], backend=names[0])
        self._send(
            [_step_counter.packed(r, 0, (0.0, 0.0), _step_counter.NONE) for r in self._rules]
        )
        return ""

    def launch(self, result: ClipResult) -> None:
        """Launch noise and update of these sums; called once, while a graph is recorded.

        Raises:
            PrivacyError: sums that were not clipped by the plan.
        """
        check_sum(result, self._step.params, self._plan)
        sums = summing.adopted(result.sums, self._step.params, self._plan)
        given: dict[str, Any] = {"backend": self._step.backend}
        for k, (group, held, call) in enumerate(
            zip(self._groups, self._held, self._calls, strict=True)
        ):
            state = update.State(group.state.steps, group.state.buffers)  # counts nothing
            mine = [sums[i] for i in group.indices]
            update.step(held, mine, **{**call, "state": state}, **given)
            update.advance(self._counters[k], rule=group.rule, **given)

    def why_not(self) -> str:
        """Return the reason why the next step cannot be released by the recording; empty if it can.

        Numbers of the optimizer that a step counter holds are taken over.
        """
        adapter, step = self._adapter, self._step
        if not self._groups:
            return self.reason
        if why := step.release_obstacle:
            return why
        if adapter.capture.public_gradients:
            return "public gradients"
        if adapter._plan() != self._plan:
            return "another plan of the noise"
        if not step.steps:
            return "the first step"
        if step.key.stream(Purpose.NOISE, step.steps + 1).key != self._key:
            return "another key"
        if self._known.has_hooks():
            return "hooks of the optimizer"
        if not self._known.same():
            return "other groups or another state of the optimizer"
        return self._take_numbers()

    def _take_numbers(self) -> str:
        """Take over learning rates and counts of updates; return why that cannot be."""
        changed = self._known.changed_rules()
        if changed is None:
            return "an optimizer with other buffers"
        if changed:
            places = self._known.places
            self._rules = [
                changed.get(place, rule) for place, rule in zip(places, self._rules, strict=True)
            ]
        for rule, group in zip(self._rules, self._groups, strict=True):
            if rule is not group.rule and replace(rule, lr=group.rule.lr) != group.rule:
                return "numbers of the optimizer beside its learning rate"
        self._counts = [count_of(counts) if counts else 0 for counts in self._known.counts]
        return "parameters of different ages" if None in self._counts else ""

    def announce(self) -> None:
        """Write the counters of the step that the ledger has last; its replay is next."""
        number = self._step.steps
        self._send(
            [
                _step_counter.packed(rule, number - 1, rule.powers((count or 0) + 1), number)
                for rule, count in zip(self._rules, self._counts, strict=True)
            ]
        )

    def commit(self) -> None:
        """Count the update that a replay has made."""
        increment_version(self._written)
        for counts in self._known.counts:
            if counts:
                torch._foreach_add_(counts, 1)

    def close(self) -> None:
        """Forget the key and all tensors."""
        self._groups, self.reason = [], "a graph that was closed"
        self._calls, self._held, self._written, self._key = [], [], [], b""

    def _send(self, counters: Sequence[bytes]) -> None:
        _step_counter.write(self._counters, b"".join(counters))


__all__ = ["RecordedUpdate"]
