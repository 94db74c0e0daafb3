"""Record the passes and sums of a private step as a CUDA graph, and replay them at every step.

Recorded are the forward pass, the loss, the backward pass, norms, clip factors and clipped sums:
all that touches samples, on memory of the graph. The release stays outside. Its noise, ledger and
update are made anew at every step, so that no noise can repeat, and learning rates, noise and
optimizers work as ever. A replay runs kernels and no Python: what a pass has read from Python is
what it read when it was recorded. Passes that the guards want to see run operation by operation.
Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..base.closing import Closes
from ..base.errors import DPKernError, InvalidInput
from ..ops.clip import ClipResult
from ..privacy.mechanisms import Plan
from ..step.graphs import Recording
from .clipping import clipped_sums
from .parameter import without_torch_function
from .program.unchanged import Unchanged
from .provenance import track, untracked
from .provenance.states import RecordSum
from .provenance.tensor import state_of
from .table_entries import TableEntries

if TYPE_CHECKING:
    from .making import MakesPrivate

_FIRST = 3
"""Steps before the recording: kernels are compiled and loaded in them."""

_LOOKS = 4
"""Steps in a row at which the guards may look before there is a recording."""


class StepGraph(Closes):
    """A CUDA graph of a private step's passes and clipped sums.

    Batches keep their shape. Parameters and buffers stay where they are; flags, attributes and
    hooks of the module, and how samples are clipped, stay as they were recorded: anything else is
    refused, and wants a new graph. Results have the bits of steps without a graph where torch's own
    operations have.

    Args:
        engine: after ``make_private``, with its loader, on a CUDA device.
        loss: called with the module and a batch's tensors; returns the loss, and reads nothing that
            changes from step to step. A graph calls it some times, then never again.

    Attributes:
        replays: number of steps that were replayed.
        reason: the reason why the last step was not; empty if it was.

    Raises:
        InvalidInput: an engine whose steps cannot be recorded.
    """

    def __init__(self, engine: MakesPrivate, loss: Callable[..., Tensor]) -> None:
        self._capture, dp_step, self._adapter, loader, views = engine._made()
        if loader is None or views > 1:
            raise _unfit("batches without the loader of make_private, or several rows of a record")
        if dp_step.sampling["sampling"] == "poisson":
            raise _unfit("batches of varying sizes (Poisson sampling)")
        self._loss = loss
        self._boundary = self._adapter.batches.boundary
        self.replays = 0
        self.reason = "nothing was recorded yet"
        self._before = 0
        self._passes = 1
        self._given: list[Tensor] = []
        self._recording: Recording | None = None
        self._is_open = True
        _check_recordable(self)

    def step(self, *batch: Tensor) -> Tensor:
        """Take the step of a batch: ``loss(module, *batch).backward(); optimizer.step()``.

        Args:
            batch: tensors that the loader has yielded, on the device; each with one row a record.

        Returns:
            The loss, without a graph.

        Raises:
            InvalidInput: something differs from what was recorded; nothing is released.
            PrivacyError: samples that are not the loader's, or that had their step.
        """
        self._check(batch)
        self.reason = self._why_not()
        if self.reason:
            self._before += 1
            if self._recording is None and self._before > _FIRST + _LOOKS:
                raise _unfit(
                    "a module that takes several tensors or changes itself, whose passes have to "
                    "run because the guards look at each"
                )
            loss = self._loss(self._capture.module, *batch)
            loss.backward()  # type: ignore[no-untyped-call]
            self._adapter.optimizer.step()
            return loss.detach()
        if self._recording is None:
            self._record(batch)
            yielded = self._boundary.current
        else:
            yielded = self._boundary.enter_again(batch)
            self._capture.guard.count_replay(self._passes)
            for mine, given in zip(self._given, batch, strict=True):
                mine.copy_(untracked(given))
        assert self._recording is not None
        self._recording.replay()
        loss, result = self._recording.results
        self._adapter.step_with(result)
        self.replays += 1
        state = state_of(loss)
        assert isinstance(state, RecordSum)
        assert yielded is not None
        return track(untracked(loss).clone(), replace(state, batch=yielded))

    def close(self) -> None:
        """Forget the graph with the samples in it; calling it twice changes nothing."""
        if self._recording is not None:
            self._recording.close()
        self._recording, self._given, self._is_open = None, [], False

    def _why_not(self) -> str:
        """Return the reason why the next step runs operation by operation; empty if it need not."""
        known = self._capture.verification
        if self._before < _FIRST:
            return "one of the first steps"
        if known.probe is not None or known.fresh or known.watch_input:
            return "a probe of the batch dimension is due"
        if not self._capture.guard.expects_nothing(self._passes):
            return "the guards look at this pass"
        return ""

    def _record(self, batch: tuple[Tensor, ...]) -> None:
        """Record the step of these samples, which then have entered; nothing runs."""
        capture = self._capture
        given = [untracked(tensor).clone() for tensor in batch]
        tracked = [track(m, state_of(t)) for m, t in zip(given, batch, strict=True)]  # type: ignore[arg-type]

        def work() -> tuple[Tensor, ClipResult]:
            loss = self._loss(capture.module, *tracked)
            loss.backward()  # type: ignore[no-untyped-call]
            with torch.no_grad(), without_torch_function():
                result = clipped_sums(capture, self._adapter._plan())
            if not isinstance(result, ClipResult) or not isinstance(state_of(loss), RecordSum):
                raise _unfit("a loss or sums of another kind")
            return loss.detach(), result

        left = capture.guard.passes_left
        public = list(map(id, capture.public_gradients.values()))
        try:
            recording = Recording(lambda: None, work, capture.slots[0].used.device)
        except DPKernError:
            capture.discard_samples()
            raise
        except RuntimeError as error:
            capture.discard_samples()
            raise _unfit(f"a step that cannot be recorded: {error}") from error
        entries = capture.guard.seen_entries
        if public != list(map(id, capture.public_gradients.values())):
            capture.discard()
            raise _unfit("public passes in the loss")
        if entries is None or not capture.guard.expects_nothing(0):
            capture.discard_samples()
            raise _unfit("a module that writes to itself in its passes")
        self._passes = left - capture.guard.passes_left
        module = capture.module
        with without_torch_function():
            self._unchanged = Unchanged([*module.parameters(), *module.buffers()])
        self._entries: TableEntries = entries
        self._clipping = _clipping_of(self._adapter._plan())
        self._given, self._recording = given, recording

    def _check(self, batch: tuple[Tensor, ...]) -> None:
        """Check that a step of this batch is one that the graph can take.

        Raises:
            InvalidInput: it is not.
            PrivacyError: it is not a batch of the loader.
        """
        if not self._is_open:
            raise _unfit("a graph that was closed")
        _check_recordable(self)
        self._boundary.whole_batch(batch)
        if self._recording is None:
            return
        same = len(batch) == len(self._given) and all(
            given.shape == mine.shape and given.dtype is mine.dtype and given.device == mine.device
            for given, mine in zip(batch, self._given, strict=True)
        )
        with without_torch_function():
            changed = {
                "shape, dtype or device of the batch": not same,
                "place or trained flag of a parameter or buffer": not self._unchanged.holds(),
                "flag, attribute, hook or part of the module": not self._entries.same(),
                "way to clip": _clipping_of(self._adapter._plan()) != self._clipping,
            }
        names = [name for name, differs in changed.items() if differs]
        if names:
            raise InvalidInput(
                "StepGraph",
                expected="the step as it was recorded",
                got=f"another {', '.join(names)}",
                remedy="Close this graph and make a new one after the change; batches of one size "
                "come from sampling='fixed'.",
            )


def _clipping_of(plan: Plan) -> tuple[Any, ...]:
    """Return all of a plan that norms, factors and sums read."""
    releases = tuple(block.release for block in plan.blocks)
    return plan.p, plan.clipping, plan.arithmetic, plan.groups, plan.group_bounds, releases


def _check_recordable(graph: StepGraph) -> None:
    """Refuse an engine whose steps no graph can take, as it is now.

    Raises:
        InvalidInput: lists every reason.
    """
    capture, adapter = graph._capture, graph._adapter
    plan = adapter._plan()
    kind = capture.slots[0].used.device.type
    problems = {
        "parameters on the CPU": not _on_device(capture.slots[0].used),
        "a module that is not private now": not capture.attached or capture.in_public,
        "a block without gradients": not torch.is_grad_enabled(),
        "autocast around the step; enter it in the loss": torch.is_autocast_enabled(kind),
        "exact arithmetic": plan.arithmetic != "float",
        "gradients that are needed unclipped": plan.needs_raw,
        "several clip groups, for which the host waits": len(plan.groups) > 1,
        "several processes": adapter.processes is not None or adapter.sharded is not None,
        "batches that are padded": capture.row_padding is not None,
        "a module inside torch.compile": capture.graphs.recording,
        "an audit that sees the sums": adapter.dp_step.watched,
        "a gradient scaler": capture.loss_scale != 1,
    }
    found = [name for name, holds in problems.items() if holds]
    if found:
        raise _unfit(", ".join(found))


def _unfit(got: str) -> InvalidInput:
    return InvalidInput(
        "StepGraph",
        expected="a private step of float sums on a CUDA device that a graph can hold",
        got=got,
        remedy="Take the step without a graph: loss.backward(), then optimizer.step().",
    )


def _on_device(parameter: Tensor) -> bool:
    return parameter.is_cuda


__all__ = ["StepGraph"]
