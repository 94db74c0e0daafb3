"""Capture inside compiled graphs, at the border of the module.

A pass of a module that ``torch.compile`` compiles begins with a look at the plan for inputs like
these. If there is none, the module runs once uncompiled on copies of them: that notes its uses of
parameters, and the batch-dimension probe verifies them. The state of the module and of random
generators is put back. Then every use gets its taps (``in_graph``), and the pass runs compiled.
When its backward pass has come to the taps, their gradients go where those of an uncompiled use go:
to the guards of ``CapturedOp`` and to the records of the operation's rule.

A use that has no tap breaks the graph and is captured outside of it, as ever.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..base.errors import CompileWarning
from .in_graph import HANDED, TAPPED, Function, TappedUse, by_name, constants
from .parameter import PrivateParameter, applied, tensors_in
from .probe import Probe
from .random_state import RandomState
from .replaced_rows import fresh, tensors_of
from .snapshot import Snapshot
from .taps import HandedTaps, ParameterTaps
from .uncompiled import (
    in_compiled_call,
    is_compiled_wrapper,
    nothing_compiled,
    resume,
    suspend,
)
from .uses import CapturedOp, ParameterSource

if TYPE_CHECKING:
    from .capture import Capture

MAX_PLANS = 64
"""Plans that are kept; inputs of further shapes run outside of graphs."""

PATIENCE = 3
"""Compiled passes in a row without a use inside a graph, until the user is warned."""


class GraphCapture:
    """Hands taps to the uses of one capture's parameters, and counts what graphs have captured.

    Attributes:
        graphs: graphs that ``torch.compile`` has made in the module's training passes.
        passes: training passes with at least one use inside a graph.
        inside: uses inside graphs in the last compiled training pass.
        outside: uses outside of them in that pass.
        reason: why the last compiled training pass had no use inside a graph; empty if it had.
        recording: whether uses are noted now.
        is_dry: whether the running pass is beside the one that is trained on.
    """

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self.graphs = 0
        self.passes = 0
        self.inside = 0
        self.outside = 0
        self.reason = "no compiled pass yet"
        self.recording = False
        self.is_dry = False
        self._plans: dict[Hashable, list[TappedUse]] = {}
        self._parts: dict[int, bool] = {}
        self._noted: list[TappedUse] = []
        self._heard: list[CapturedOp] = []
        self._again: set[int] = set()
        self._handed: HandedTaps | None = None
        self._compiled = self._suspended = False
        self._graphs_before = self._met = 0
        self._missed = 0

    def __str__(self) -> str:
        if self.reason:
            return f"{self.graphs} compiled graphs; none in the last pass: {self.reason}"
        return (
            f"{self.graphs} compiled graphs; in the last pass {self.inside} uses of parameters "
            f"inside of graphs, {self.outside} outside"
        )

    @property
    def active(self) -> bool:
        """Whether the running pass has taps."""
        return self._handed is not None

    def forget(self) -> None:
        """Record anew: modules or hooks have changed."""
        self._plans.clear()
        self._parts.clear()

    # the border of the module

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Prepare a training pass on the current samples, with taps if it is compiled.

        A compiled pass that gets none runs uncompiled.
        """
        plain = self._parts.get(self.capture.guard.occasion) is False
        if (plain or not self._has_compiled_parts()) and not in_compiled_call():
            return
        self._compiled, self.inside, self.outside = True, 0, 0
        self._met = self.capture.program.met
        self._hand_out_taps(args, kwargs)
        if self.reason and in_compiled_call():
            self._suspend()

    def skip(self) -> None:
        """Prepare a pass with gradients of which nothing is captured."""
        if in_compiled_call():
            self._suspend()

    def _suspend(self) -> None:
        """Let the running pass be uncompiled.

        A graph that breaks at once, compiled now, would be taken for passes with taps too.
        """
        self._suspended = True
        suspend()

    def _hand_out_taps(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._graphs_before = _graphs_made()
        self.reason = self._refused()
        if self.reason:
            return
        key = self._key(args, kwargs)
        plan = self._plans.get(key)
        if plan is None and len(self._plans) < MAX_PLANS:
            plan = self._plans[key] = self._record(args, kwargs)
        if not plan:
            many = plan is None
            self.reason = "too many shapes of inputs" if many else "no use that a graph can hold"
        elif not self._is_verified(plan):
            self.reason = "a probe of the batch dimension is due"
        else:
            self._hand_out(plan)

    def end_of_pass(self, *_: Any) -> None:
        """Take back the taps that a pass did not use, which is over or has failed.

        A pass of a probe is none of its own.
        """
        if (self._compiled or self._suspended) and not self.capture.guard.running:
            self._end()

    def _end(self) -> None:
        if self._suspended:
            self._suspended = False
            resume()
        handed, self._handed = self._handed, None
        if self._compiled:
            self.outside = self.capture.program.met - self._met
        if handed is not None:
            handed.close()
            self.inside = handed.inside
        if not self._compiled:
            return
        self._compiled = False
        self.graphs += _graphs_made() - self._graphs_before
        self.passes += bool(self.inside)
        if self.inside:
            self._missed = 0
            return
        self.reason = self.reason or "the compiler has left all uses out of its graphs"
        self._missed += 1
        if self._missed == PATIENCE:
            warnings.warn(
                f"{type(self.capture.module).__name__}: the module is compiled, but {PATIENCE} "
                f"passes in a row had no use of a parameter inside a graph: {self.reason}. They "
                "are right and run uncompiled; engine.capture.graphs counts what is compiled.",
                CompileWarning,
                stacklevel=2,
            )

    def _refused(self) -> str:
        """Return the reason why this pass gets no taps."""
        capture = self.capture
        checks = (
            (capture.any_rank is not None, "parameters in shards"),
            (capture.collected is not None, "a rehearsal"),
            (capture.on_use is not None, "uses are surveyed"),
            (not capture.batch, "an empty batch"),
            (torch._C._current_graph_task_id() != -1, "a pass inside a backward pass"),
        )
        return next((reason for refused, reason in checks if refused), "")

    def _has_compiled_parts(self) -> bool:
        """Whether a part of the module is compiled by itself."""
        occasion = self.capture.guard.occasion
        if occasion not in self._parts:
            parts: Any = self.capture.module.modules()
            self._parts[occasion] = any(
                part._compiled_call_impl is not None or is_compiled_wrapper(part) for part in parts
            )
        return self._parts[occasion]

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        """Return the key that passes with the same plan have in common."""
        batch = max(self.capture.batch or 0, 1)
        shapes = []
        for tensor in tensors_in((args, kwargs)):
            rows = divmod(tensor.shape[0], batch) if tensor.dim() else (0, 0)
            fold = rows[0] if rows[1] == 0 else -tensor.shape[0]
            shapes.append((fold, tensor.shape[1:], tensor.dtype, tensor.requires_grad))
        device = self.capture.parameters[0].device.type
        return self.capture.guard.occasion, torch.is_autocast_enabled(device), tuple(shapes)

    def _is_verified(self, plan: Sequence[TappedUse]) -> bool:
        capture = self.capture
        if (capture.batch or 0) < 2:
            return True
        known = capture.verification
        return not known.watch_input and {use.key for use in plan} <= known.sites

    # recording

    def heard(self, captured: CapturedOp) -> None:
        """Take note of a use that a pass beside the one that is trained on has registered."""
        if self.recording:
            self._heard.append(captured)
            if torch._C._current_graph_task_id() != -1:
                self._again |= {id(t.source) for t in captured.targets if t is not None}

    def note(
        self, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Take note of an operation that ran by its rule, if a graph can hold it."""
        heard, self._heard = self._heard, []
        operation = TAPPED.get(func)
        if operation is None or len(heard) != 1 or heard[0].operation not in operation.operations:
            return
        (captured,) = heard
        given = by_name(PrivateParameter, operation, args, kwargs)
        x, weight, bias = given.get("input"), given.get("weight"), given.get("bias")
        rest = constants(given)
        if (
            type(x) is not Tensor
            or type(result) is not Tensor
            or type(weight) is not PrivateParameter
            or type(bias) not in (type(None), PrivateParameter)
            or any(isinstance(value, str) for value in rest.values())
            or x.numel() == 0
            or x.shape[0] != result.shape[0]
            or (x.dim() < 2 and not x.is_floating_point())  # ids that may be positions
            or torch.is_autocast_enabled(x.device.type)
            or torch._C._current_graph_task_id() != -1
        ):
            return
        for target in captured.targets:
            if target is not None and not (
                isinstance(target.source, ParameterSource)
                and target.rows is None
                and not target.transposed
            ):
                return
        with torch._C.DisableTorchFunctionSubclass():
            tails = operation.tails(x, weight, bias, result)
        source: Any = weight._private
        self._noted.append(
            TappedUse(
                function=func,
                operation=operation,
                source=source,
                bias=-1 if bias is None else bias._private.index,
                constants=rest,
                tail=tuple(x.shape[1:]),
                fold=int(x.shape[0]) // max(captured.batch, 1),
                dtype=x.dtype,
                differentiable=x.requires_grad,
                device=x.device,
                name=captured.operation,
                targets=captured.targets,
                key=captured.site,
                saved=captured.saved,
                tap_tails=tails,
            )
        )

    def _record(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[TappedUse]:
        """Run the module uncompiled on copies of the inputs; return its uses, in their order.

        Raises:
            UnsupportedModule: what the batch-dimension probe has found.
        """
        capture = self.capture
        if capture.verification.watch_input and (capture.batch or 0) >= 2:
            with self._dry_pass(args, kwargs, watched=True) as output:
                capture.verify(output)
        self._noted, self._heard, self._again = [], [], set()
        self.recording = True
        try:
            with self._dry_pass(args, kwargs, watched=False) as output:
                # Segments that run again show themselves in a backward pass.
                capture.verification.probe = probe = Probe(capture.batch or 0, (), idle=True)
                for tensor in tensors_of(output):
                    if tensor.requires_grad:
                        probe._backward(tensor.float().sum(), capture.anchor)
        finally:
            self.recording, capture.verification.probe = False, None
        capture.verification.drop_seen()
        return [use for use in self._noted if id(use.source) not in self._again]

    @contextmanager
    def _dry_pass(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, watched: bool
    ) -> Iterator[Any]:
        """Run the module on copies of the inputs, and put back what the pass has changed."""
        capture = self.capture
        capture.program.leave("uses are noted for compiled graphs")
        draws = RandomState({p.device for p in capture.parameters})
        before = Snapshot(capture.module)
        counts = [(slot, slot.uses, slot.indirect) for slot in capture.slots]
        expressions, activations = list(capture.expressions), capture.budget.activations
        inputs = capture.passes.inputs
        args, kwargs = fresh((args, kwargs))
        self.is_dry = True
        capture.passes.inputs = tuple(tensors_in((args, kwargs)))
        try:
            if watched:
                args, kwargs = capture.passes.watched((args, kwargs)) or (args, kwargs)
            with nothing_compiled():
                yield capture.module.forward(*args, **kwargs)
        finally:
            self.is_dry = False
            before.restore(Snapshot(capture.module, earlier=before))
            draws.restore()
            for slot, uses, indirect in counts:
                slot.uses, slot.indirect = uses, indirect
            capture.expressions[:] = expressions
            capture.budget.activations = activations
            capture.passes.inputs, capture.verification.watch_node = inputs, None

    # taps

    def _hand_out(self, plan: list[TappedUse]) -> None:
        capture = self.capture
        handed = self._handed = HandedTaps(capture, plan)
        taps = iter(applied(ParameterTaps, capture.anchor, handed))
        for use in plan:
            use.source.tapped.append(use)
            use.is_open = True
            setattr(HANDED, use.place, tuple(next(taps) for _ in use.tap_tails))


def _graphs_made() -> int:
    """Graphs that the compiler has made in this process."""
    from torch._dynamo.utils import counters  # loaded already where something is compiled

    return int(counters["stats"]["unique_graphs"])
