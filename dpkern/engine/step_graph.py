"""Record a private step as a CUDA graph, and replay it.

Recorded are the forward pass, the loss, the backward pass, norms, clip factors and clipped sums:
all that touches samples, on memory of the graph; and behind them noise and update, which read all
that changes from step to step from memory that each step writes (``recorded_update``). The ledger
is written before a replay. Where noise and update cannot be replayed, they are made beside the
graph, as without one: a step of several replays or physical batches, another noise, an optimizer
with a rule of its own. A replay runs kernels and no Python: what a pass has read from Python is
what it read when it was recorded. Passes that the guards want to see run operation by operation.

A recorded pass has a fixed number of rows, a Poisson draw has not. Rows of zeros fill a draw up,
and a draw of more records takes several replays, whose sums join one step. A row that fills up is
no record: its term is a zero in the loss (``provenance.filling``), its clip factor is 0, whatever
its gradient, and no count has it. Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..base import validate as check
from ..base.closing import Closes
from ..base.errors import DPKernError, InvalidInput
from ..base.memory import memory_order
from ..ops.clip import GRAD_DTYPES, ClipResult
from ..privacy.mechanisms import Plan
from ..step import sums as summing
from ..step.graphs import Recording
from .clipping import clipped_sums
from .exact_sums import sums_in_place
from .parameter import without_torch_function
from .program.unchanged import Unchanged
from .provenance import YieldedBatch, track, untracked
from .provenance.states import FilledBatch, FilledSum, RecordSum
from .provenance.tensor import state_of
from .recorded_update import RecordedUpdate
from .table_entries import TableEntries
from .usual_rows import usual_rows

if TYPE_CHECKING:
    from .making import MakesPrivate

_FIRST = 3
"""Steps before the recording: kernels are compiled and loaded in them."""

_LOOKS = 4
"""Steps in a row at which the guards may look before there is a recording."""

_LOOK = "the guards look at this pass"


class StepGraph(Closes):
    """A CUDA graph of a private step's passes and clipped sums.

    Parameters and buffers stay where they are; flags, attributes and hooks of the module, and how
    samples are clipped, stay as they were recorded: anything else is refused, and wants a new
    graph. Results have the bits of steps without a graph where torch's own operations have, with
    these exceptions where batches are filled up: a mean over samples divides by another number
    before the clipping undoes it, and rows that are no records draw random numbers, too.

    Args:
        engine: after ``make_private``, with its loader, on a CUDA device.
        loss: called with the module and a batch's tensors; returns the loss, and reads nothing that
            changes from step to step. A graph calls it some times, then never again.
        rows: number of rows of a recorded pass; batches of fewer records are filled up, and larger
            ones take several passes. None chooses a multiple of 16 by the expected size of Poisson
            batches, and takes batches of other samplings as they are, all of one size.
        update: whether noise and update are a part of the graph. None records them if that can be;
            True refuses what cannot be recorded, when it is recorded; False leaves them beside.

    Attributes:
        rows: number of rows of a recorded pass; None takes batches as they are.
        replays: number of steps that were replayed.
        reason: the reason why the last step was not; empty if it was.
        beside: the reason why noise and update of the last replayed step ran beside the graph;
            empty if they were a part of it.

    Raises:
        InvalidInput: an engine whose steps cannot be recorded.
    """

    def __init__(
        self,
        engine: MakesPrivate,
        loss: Callable[..., Tensor],
        *,
        rows: int | None = None,
        update: bool | None = None,
    ) -> None:
        self._capture, _, self._adapter, loader, views = engine._made()
        if loader is None or views > 1:
            raise _unfit("batches without the loader of make_private, or several rows of a record")
        if rows is None and loader.sampling == "poisson":
            most = loader.max_physical_batch_size
            rows = usual_rows(loader.expected_batch_size, most, loader.dataset_size)
        self.rows = None if rows is None else check.integer(2, rows=rows)
        self._loss = loss
        self._boundary = self._adapter.batches.boundary
        self.replays = 0
        self.reason = "nothing was recorded yet"
        self._before = self._looks = 0
        self._is_rehearsed = False
        self._passes = 1
        self._given: list[Tensor] = []
        self._places: Tensor | None = None
        self._filling: Tensor | None = None
        self._recording: Recording | None = None
        self._wants_update = check.choice((None, True, False), update=update)
        self._update: RecordedUpdate | None = None
        self.beside = "nothing was recorded yet"
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
        yielded = self._check(batch)
        size = 0 if yielded.placeholder else yielded.size
        starts = range(0, size, self.rows or size or 1)
        self.reason = self._why_not(size, len(starts))
        if self.reason:
            # Neither an empty draw nor a record by itself shows the guards what they look for.
            self._before += size > 1
            self._looks += size > 1 and self.reason == _LOOK
            if self._recording is None and self._looks > _LOOKS:
                raise _unfit(
                    "a module that takes several tensors or changes itself, whose passes have to "
                    "run because the guards look at each"
                )
            if self.rows is None or self.reason != _LOOK:
                return self._by_operations(batch)
        self._boundary.enter_again(batch)
        if self._recording is not None:
            self._recording.join()
        self._make_room(batch)
        losses: list[Tensor] = []
        inside = False
        if self.reason:
            probes = self._capture.guard.probes
            parts: Any = [self._rehearsed(batch, start, losses) for start in starts]
            self._is_rehearsed = self._is_rehearsed or self._capture.guard.probes > probes
        else:
            if self._recording is None:
                self._fill(batch, 0)
                self._record()
            self._capture.guard.count_replay(self._passes * len(starts))
            self.beside = self._why_beside(len(starts))
            inside = not self.beside
            parts = (self._replayed(batch, start, losses) for start in starts)
        if inside:
            self._adapter.step_by(lambda: self._replay_release(batch, losses))
        else:
            self._adapter.step_with(parts, len(starts))
        self.replays += not self.reason
        total = losses[0] if len(losses) == 1 else torch.stack(losses).sum(0)
        if self.rows is not None and self.rows != size and self._state.reduction == "mean":
            total = total * (self.rows / size)  # the mean over the records
        state = self._state
        kept = state.reduction, state.rescaled, state.shares, state.scales
        return track(total, RecordSum(yielded, *kept))

    def close(self) -> None:
        """Forget the graph with the samples in it; calling it twice changes nothing."""
        if self._recording is not None:
            self._recording.close()
        if self._update is not None:
            self._update.close()
        self._recording, self._update, self._given, self._is_open = None, None, [], False

    def _why_not(self, size: int, parts: int) -> str:
        """Return the reason why the next step runs operation by operation; empty if it need not."""
        known = self._capture.verification
        if not size:
            return "an empty draw"
        if self._before < _FIRST or not self._adapter.dp_step.steps:
            return "one of the first steps"
        if known.probe is not None or known.is_due:
            return "a probe of the batch dimension is due"
        if self.rows is not None and not self._is_rehearsed:
            # No pass had so many rows: a module may do something else with them.
            self._capture.guard.look_anew()
        if not self._capture.guard.expects_nothing(self._passes * parts):
            return _LOOK
        return ""

    def _by_operations(self, batch: tuple[Tensor, ...]) -> Tensor:
        """Take a step without a graph."""
        guard = self._capture.guard
        left = guard.passes_left
        loss = self._loss(self._capture.module, *batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self._adapter.optimizer.step()
        self._passes = max(left - guard.passes_left, self._passes)
        return loss.detach()

    def _make_room(self, batch: tuple[Tensor, ...]) -> None:
        """Make the tensors that recorded passes read, of which no step has been taken yet."""
        if self._given:
            return
        given = [untracked(tensor) for tensor in batch]
        rows = self.rows or len(given[0])
        self._given = [_room_for(tensor, rows) for tensor in given]
        if self.rows is not None:
            device = self._capture.slots[0].used.device
            self._places = torch.arange(rows, device=device)
            self._filling = torch.zeros(rows, dtype=torch.bool, device=device)

    def _fill(self, batch: tuple[Tensor, ...], start: int) -> int:
        """Let the passes read the batch's records from this one on; return how many there are."""
        count = 0
        for mine, given in zip(self._given, batch, strict=True):
            records = untracked(given)[start : start + len(mine)]
            count = len(records)
            mine[:count].copy_(records)
            if count < len(mine):
                mine[count:].zero_()  # not the records of an earlier step
        if self._places is not None:
            torch.ge(self._places, count, out=self._filling)
        return count

    def _replayed(self, batch: tuple[Tensor, ...], start: int, losses: list[Tensor]) -> ClipResult:
        """Replay the passes of the records from this one on; return their sums."""
        count = self._fill(batch, start)
        assert self._recording is not None
        self._recording.replay()
        loss, result = self._recording.results
        losses.append(untracked(loss).clone())
        return _of_records(result, count)

    def _why_beside(self, parts: int) -> str:
        """Return the reason why the next step is not released by its replay; empty if it is."""
        if self._update is None:
            return self._why_unrecorded
        if parts > 1 or not self._adapter.batches.final or self._adapter.dp_step.unfinished:
            return "a step of several replays"
        return self._update.why_not()

    def _replay_release(self, batch: tuple[Tensor, ...], losses: list[Tensor]) -> None:
        """Replay a whole step of these records, noise and update, which is in the ledger first.

        A graph in which a replay failed is closed: the step that was announced may still be due.
        """
        step, recording, recorded = self._adapter.dp_step, self._recording, self._update
        assert recording is not None
        assert recorded is not None
        self._fill(batch, 0)
        step.begin_release()
        try:
            recorded.announce()
            recording.replay()
        except BaseException:
            self.close()
            raise
        recorded.commit()
        loss, result = recording.results
        losses.append(untracked(loss).clone())
        step.count_nonfinite(result.nonfinite)

    def _rehearsed(self, batch: tuple[Tensor, ...], start: int, losses: list[Tensor]) -> ClipResult:
        """Run the passes of the records from this one on as they will be recorded."""
        count = self._fill(batch, start)
        with self._one_pass() as entered:
            loss, result = self._work(entered)
        losses.append(untracked(loss))
        return _of_records(result, count)

    def _work(self, entered: YieldedBatch) -> tuple[Tensor, ClipResult]:
        """Run the passes of the tensors at hand, and clip."""
        capture = self._capture
        loss = self._loss(capture.module, *(track(mine, entered.each) for mine in self._given))
        state = state_of(loss)
        if not isinstance(state, RecordSum):
            raise _unfit("a loss of another kind")
        if self.rows is not None and not (
            type(state) is FilledSum and state.reduction == capture.loss_reduction
        ):
            raise _unfit(
                "a loss of which rows that fill a batch up cannot be left out: not a multiple of "
                f"the {capture.loss_reduction} over samples that a loss function of torch, "
                f"Tensor.{capture.loss_reduction}() or a sum of such terms makes"
            )
        self._state = state
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad(), without_torch_function():
            plan = self._adapter._plan()
            result = clipped_sums(capture, plan)
            if isinstance(result, list):
                result = self._clipped(result, plan)
        if result is None:
            raise _unfit("a loss without a gradient")
        return loss.detach(), result

    def _clipped(self, gradients: list[Tensor], plan: Plan) -> ClipResult:
        """Clip and sum per-sample gradients in integers, as the step would."""
        if len({g.dtype for g in gradients}) > 1 or gradients[0].dtype not in GRAD_DTYPES:
            raise _unfit("exact sums of gradients of several dtypes, or of float16")
        if self._filling is not None:
            for gradient in gradients:
                rows = self._filling.view(-1, *[1] * (gradient.dim() - 1))
                gradient.masked_fill_(rows, 0)
        return summing.clipped(gradients, plan, None, self._adapter.dp_step.backend)

    @contextmanager
    def _one_pass(self) -> Iterator[YieldedBatch]:
        """Let passes of this block be those of one part of a step; give the batch that they have.

        Raises:
            InvalidInput: they cannot be recorded; the samples can take their step without a graph.
        """
        capture, filled = self._capture, None
        if self._filling is not None:
            filled = FilledBatch(len(self._given[0]), self._filling, self._boundary)
        public = list(map(id, capture.public_gradients.values()))
        with self._boundary.in_one_piece(filled, _refuse_pieces) as entered:
            try:
                yield entered
            except DPKernError:
                capture.discard_samples()
                raise
            except RuntimeError as error:
                capture.discard_samples()
                raise _unfit(f"a step that cannot be recorded: {error}") from error
        if public != list(map(id, capture.public_gradients.values())):
            capture.discard()
            raise _unfit("public passes in the loss")

    def _record(self) -> None:
        """Record the passes of the tensors at hand; nothing runs."""
        capture = self._capture
        recorded, self._why_unrecorded = None, "update=False"
        if self._wants_update is not False:
            recorded = RecordedUpdate(self._adapter)
            self._why_unrecorded = recorded.reason
            if recorded.reason and self._wants_update:
                capture.discard_samples()
                raise InvalidInput(
                    "StepGraph",
                    expected="noise and update that a graph can hold, as update=True says",
                    got=recorded.reason,
                    remedy="Leave update= out: they then run beside the graph, at one launch.",
                )
            recorded = None if recorded.reason else recorded

        def work() -> tuple[Tensor, ClipResult]:
            loss, result = self._work(entered)
            if recorded is not None:
                with torch.no_grad(), without_torch_function():
                    recorded.launch(result)
            return loss, result

        left = capture.guard.passes_left
        with self._one_pass() as entered:
            recording = Recording(lambda: None, work, capture.slots[0].used.device)
        self._passes = left - capture.guard.passes_left
        entries = capture.guard.seen_entries
        if entries is None or not capture.guard.expects_nothing(0):
            capture.discard_samples()
            raise _unfit("a module that writes to itself in its passes")
        module = capture.module
        with without_torch_function():
            self._unchanged = Unchanged([*module.parameters(), *module.buffers()])
        self._entries: TableEntries = entries
        self._clipping = _clipping_of(self._adapter._plan())
        self._recording, self._update = recording, recorded

    def _check(self, batch: tuple[Tensor, ...]) -> YieldedBatch:
        """Check that a step of this batch is one that the graph can take; return the batch.

        Raises:
            InvalidInput: it is not.
            PrivacyError: it is not a batch of the loader.
        """
        if not self._is_open:
            raise _unfit("a graph that was closed")
        _check_recordable(self)
        yielded = self._boundary.whole_batch(batch).batch
        if self._recording is None:
            return yielded
        first = 0 if self.rows is None else 1
        same = len(batch) == len(self._given) and all(
            given.shape[first:] == mine.shape[first:]
            and given.dtype is mine.dtype
            and given.device == mine.device
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
                remedy="Close this graph and make a new one after the change; rows= fills batches "
                "of other sizes up.",
            )
        return yielded


def _room_for(tensor: Tensor, rows: int) -> Tensor:
    """Return zeros for so many rows like those of a tensor, in its order of memory."""
    order = memory_order(tensor)
    room = tensor.new_zeros(rows, *(tensor.shape[dim] for dim in order))
    return room.permute(0, *(1 + order.index(dim) for dim in range(1, tensor.dim())))


def _of_records(result: ClipResult, count: int) -> ClipResult:
    """Return what was clipped of as many records, behind which rows fill the batch up."""
    if count == result.batch_size:
        return result
    return replace(result, norms=result.norms[:count], batch_size=count)


def _refuse_pieces() -> None:
    raise _unfit("a loss that cuts its batch into pieces")


def _clipping_of(plan: Plan) -> tuple[Any, ...]:
    """Return all of a plan that norms, factors and sums read."""
    releases = tuple(block.release for block in plan.blocks)
    units = plan.units if plan.arithmetic == "exact" else ()
    return plan.p, plan.clipping, plan.arithmetic, plan.groups, plan.group_bounds, units, releases


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
        "gradients that are needed unclipped": plan.needs_raw,
        "exact clipping by groups, for which the host waits": plan.arithmetic == "exact"
        and plan.clipping == "group"
        and not sums_in_place(plan, capture.slots),
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
        expected="a private step on a CUDA device that a graph can hold",
        got=got,
        remedy="Take the step without a graph: loss.backward(), then optimizer.step().",
    )


def _on_device(parameter: Tensor) -> bool:
    return parameter.is_cuda


__all__ = ["StepGraph"]
