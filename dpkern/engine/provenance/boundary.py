"""Check the inputs of a private module, and mark its outputs with their records.

If the loop cuts a batch into smaller ones, each piece is clipped by itself and every record must
belong to one piece only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ...base.errors import DPKernError, InvalidInput, PrivacyError
from ..contents import readable, same_bits
from ..in_place import writes_in_place
from ..parameter import PRIVATE, tensors_in, without_torch_function
from . import refusals
from .constants import Constants, may_be_read, numbers_in
from .divisors import NumbersBySize, ScalesOfRows
from .entrance import (
    Input,
    has_no_records,
    inputs_of,
    picked,
    rows_in_order,
    rows_of,
    stripped,
)
from .handing import tracked_batch
from .inner_loss import state_of_scalar
from .loss_check import LossCheck
from .rules import RULES, TrackedCall, finish
from .states import FilledBatch, Ids, Mixed, PerRecord, RecordSum, Rows, State, YieldedBatch
from .statistic import READ, is_usual, origin_of
from .tensor import Function, TrackedTensor, retrack, state_of, track, untracked
from .trees import mapped, tensors_of
from .usual_calls import entered, left

if TYPE_CHECKING:
    from ..capture import Capture


class ModuleBoundary:
    """Boundary between the loop and one private module, which checks inputs and losses.

    Args:
        capture: capture of the module.
        activate: called with the batch whose samples enter now, if it is not the current one.
        close_piece: called before another piece of the current batch enters.
        assume: called with conditions of the certificate.
    """

    def __init__(
        self,
        capture: Capture,
        *,
        activate: Callable[[YieldedBatch], None],
        close_piece: Callable[[], None],
        assume: Callable[[str], None],
    ) -> None:
        self.capture = capture
        self.assume = assume
        self.activate = activate
        self.close_piece = close_piece
        self.losses = LossCheck(capture, assume)
        self._sizes = NumbersBySize()
        self._scales = ScalesOfRows()
        self.constants = Constants(capture.guard.note_numbers_read)
        self.views = 1
        """The number of rows of each record in passes without a loader."""
        self.has_loader = False
        """Whether samples must come from a loader."""
        self.current: YieldedBatch | None = None
        """The batch whose samples entered last; None where the caller begins batches by hand."""
        self.writes = 0
        """Number of writes into parameters that were looked at."""
        self.unfinished_pass = False
        """Whether samples entered for which no step was taken."""
        self._left: YieldedBatch | None = None
        """The batch of the last pass that ended, of which a loss may have several."""
        self._thread = get_ident()
        """The thread in which samples enter; one that only prefetches batches takes no steps."""
        self._rows: Rows | None = None
        """Rows of the running pass."""
        self._records: Ids | None = None
        """Records of the piece that is in the module."""
        self._closed: set[int] = set()
        """Records of pieces that are clipped already."""
        self._dropped = False
        """Whether the current batch was forgotten since its samples entered."""

    earlier_piece = staticmethod(refusals.earlier_piece)

    @property
    def entered_records(self) -> int | None:
        """Number of records in the running pass; None if they are not tracked."""
        return None if self._rows is None else len(self._rows.records)

    @property
    def in_pieces(self) -> bool:
        """Whether the current batch was cut, and pieces of it have entered."""
        batch, records = self.current, self._records
        return batch is not None and records is not None and len(records) < batch.size

    @property
    def in_placeholder(self) -> bool:
        """Whether the running pass has the row that stands for an empty draw."""
        return self._rows is not None and self._rows.batch.placeholder

    # inputs

    def enter(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of the module as ordinary tensors, with rows sorted by record.

        Raises:
            PrivacyError: samples that no loader yielded, or of an earlier batch.
            UnsupportedModule: rows in which records have met.
        """
        self._rows = None
        capture = self.capture
        # Nothing has skipped the pass yet, and no probe runs: the capture watches it.
        watched = capture.attached and not capture._public
        if self.has_loader and watched and torch.is_grad_enabled():
            found = entered(args, kwargs)
            if found is not None:  # the usual loop
                self._begin(found[0])
                self._rows, args = found
                return args, kwargs
            rows = rows_in_order((*args, *kwargs.values()) if kwargs else args)
            if rows is not None:
                self._begin(rows)
                self._rows = rows
                if len(args) == 1 and not kwargs:
                    return (untracked(args[0]),), kwargs
                named = {name: untracked(t) for name, t in kwargs.items()}
                return tuple([untracked(t) for t in args]), named
        if self.views > 1 and not self.has_loader:
            args, kwargs = self._with_views(args, kwargs)
        inputs = list(inputs_of(args, kwargs))
        tracked = any(type(each.tensor) is TrackedTensor for each in inputs)
        if capture.in_public:
            if any(_has_records(each.tensor) for each in inputs):
                raise refusals.private_in_public()
            plain: tuple[Any, Any] = stripped((args, kwargs), None) if tracked else (args, kwargs)
            return plain
        training = torch.is_grad_enabled() and capture.attached
        rows = self._rows_of(inputs, strict=training) if tracked else None
        if rows is None and training and self.has_loader:
            self._check_by_hand(len(inputs))
        if rows is not None and training:
            self._check_others(inputs, rows)
            self._check_numbers(args, kwargs, rows)
            self.constants.note(rows.batch, [t for _, t, _ in inputs if may_be_read(t)])
            self._begin(rows)
        self._rows = rows
        result: tuple[Any, Any] = stripped((args, kwargs), rows) if tracked else (args, kwargs)
        return result

    def _rows_of(self, inputs: Sequence[Input], *, strict: bool) -> Rows | None:
        try:
            return rows_of(inputs)
        except DPKernError as error:
            if strict:
                states = [state_of(each.tensor) for each in inputs]
                if any(isinstance(state, Mixed) and state.late for state in states):
                    self.capture.guard.report_late(str(error))
                raise
            return None  # nothing is trained on this pass

    def _with_views(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Mark the inputs of a pass without a loader as ``views`` views of the same records."""
        found = [tensor for tensor, _ in tensors_of((args, kwargs)) if tensor.dim()]
        rows = max((tensor.shape[0] for tensor in found), default=0)
        if rows % self.views or any(type(tensor) is TrackedTensor for tensor in found):
            return args, kwargs
        batch = YieldedBatch(rows // self.views, boundary=self)
        tracked: tuple[Any, Any] = tracked_batch((args, kwargs), batch, self.views)
        return tracked

    def _check_by_hand(self, inputs: int) -> None:
        """Check a pass in which nothing was yielded by the loader.

        It is allowed where the caller begins batches by hand, or while the module is in ``eval()``.
        """
        if self.current is None and self.capture.handed_out:
            return  # the caller begins batches by hand
        if not self.capture.module.training:
            self.capture.skip_pass()
            return
        raise refusals.not_yielded(inputs)

    def _check_others(self, inputs: Sequence[Input], rows: Rows) -> None:
        """Refuse untracked inputs with as many rows, which would be taken for samples' own."""
        if not self.has_loader or max(rows.counts) < 2:
            return
        own: set[int] | None = None
        for each in inputs:
            tensor = each.tensor
            if type(tensor) is TrackedTensor or type(tensor) in PRIVATE:
                continue
            if tensor.dim() == 0 or tensor.shape[0] not in rows.counts:
                continue
            module = self.capture.module
            own = own or {id(t) for t in (*module.buffers(), *module.parameters())}
            if id(tensor) not in own:
                raise refusals.unmarked(each.name, tensor)

    def _check_numbers(self, args: Any, kwargs: Any, rows: Rows) -> None:
        """Refuse numbers that were computed over samples as inputs."""
        for place, value in [*enumerate(args), *kwargs.items()]:
            if type(value) is not TrackedTensor and (state := origin_of(value)) is not None:
                raise refusals.mixed_input(f"input {place!r} of the module", state)
            if type(value) in (int, float) and self._sizes.follows(place, value, len(rows.records)):
                error = refusals.size_as_input(f"input {place!r} of the module", value)
                self.capture.guard.report_late(str(error))
                raise error
        self.constants.note_numbers(rows.batch, (*args, *kwargs.values()))

    def _begin(self, rows: Rows) -> None:
        """Make the samples of the pass the current ones."""
        capture, batch = self.capture, rows.batch
        if batch is not self.current:
            self.activate(batch)
            if self.current is None:
                self.constants.begin(batch)
            self.current = batch
            if self._closed:
                self._closed = set()
            self._records, self._dropped = None, False
            self.unfinished_pass = self.has_loader
            self._thread = get_ident()
            if rows is batch.rows and not batch.placeholder:  # all of them, in their order
                self._records, batch.in_pass = rows.records, batch.size
                return
        if batch.placeholder:
            capture.skip_pass()
            return
        if self._dropped:
            self._dropped, self.unfinished_pass = False, self.has_loader
            capture.begin_piece(len(rows.records))
        elif self._records is None or not self.has_loader:
            if len(rows.records) != batch.size:
                capture.begin_piece(len(rows.records))
        elif self._records is not rows.records and not np.array_equal(self._records, rows.records):
            # A pass that brought no gradients, or whose gradients were forgotten, may be made again
            # in smaller pieces, as after an error for want of memory.
            before, again = set(self._records.tolist()), rows.records.tolist()
            if capture.captured or batch.has_chosen_rows:
                if not (before | self._closed).isdisjoint(again):
                    raise refusals.overlapping_pieces()
            elif not self._closed.isdisjoint(again):
                raise refusals.overlapping_pieces()
            if capture.captured:
                self._closed |= before
            self.close_piece()
            capture.begin_piece(len(rows.records))
        self._records = rows.records
        batch.in_pass = len(rows.records)

    def whole_batch(self, given: Sequence[Tensor]) -> Rows:
        """Return the rows of tensors that each hold all records of the loader's batch in order.

        Raises:
            PrivacyError: they hold others.
        """
        rows = rows_in_order(given) if self.has_loader else None
        if rows is None:
            raise refusals.not_yielded(len(given))
        return rows

    def enter_again(self, given: Sequence[Tensor]) -> YieldedBatch:
        """Let samples enter whose pass has the operations of an earlier one; return their batch.

        Raises:
            PrivacyError: they are not a whole batch, or of an earlier one.
        """
        rows = self.whole_batch(given)
        self._begin(rows)
        rows.batch.went_backward = True
        return rows.batch

    @contextmanager
    def in_one_piece(
        self, filled: FilledBatch | None, refuse: Callable[[], None]
    ) -> Iterator[YieldedBatch]:
        """Let the passes of this block hold all rows of one batch, after which the current one is
        as it was.

        Args:
            filled: the batch of the passes, in place of the current one; None leaves that.
            refuse: raises an error; called where a pass holds a part of the batch.
        """
        capture, current, closed, close = self.capture, self.current, self._closed, self.close_piece
        records = self._records
        assert current is not None
        batch = current if filled is None else filled
        self.close_piece, capture.filling = refuse, None if filled is None else filled.filling
        self.current, self._rows, self._records, self._closed = batch, None, None, set()
        capture.begin_piece(batch.size)
        try:
            yield batch
        finally:
            self.close_piece, capture.filling = close, None
            self.current, self._rows, self._records, self._closed = current, None, records, closed
            capture.begin_piece(current.size)

    def drop(self) -> None:
        """Forget the passes over the current batch, whose samples may enter once more.

        Losses of these passes are then of other samples.
        """
        self.unfinished_pass, self._closed, self._records = False, set(), None
        self._dropped = self.has_loader and self.current is not None
        if self._dropped and self.current is not None:
            self.capture.begin_piece(self.current.size)

    def check_covered(self) -> None:
        """Check that every record of the current batch has brought gradients, or none.

        Raises:
            PrivacyError: the loop left some out by their place, which depends on the others.
        """
        batch = self.current
        if batch is None or not self.unfinished_pass or batch.placeholder:
            return
        entered, last = len(self._closed), 0 if self._records is None else len(self._records)
        if last == batch.size or self.capture.captured:
            entered += last
        if entered < batch.size and (not batch.has_chosen_rows or batch.has_ordered_rows):
            raise refusals.partly_entered(entered, batch.size)

    def check_finished(self) -> None:
        """Check that the last batch that entered has had its step.

        Raises:
            PrivacyError: it was left out after its forward pass.
        """
        if self.unfinished_pass and self.trains_here:
            raise refusals.left_out()

    @property
    def trains_here(self) -> bool:
        """Whether this is the thread in which samples enter the module."""
        return get_ident() == self._thread

    def adopt(self, tree: Any, batch: YieldedBatch, records: Ids | None) -> Any:
        """Track tensors as rows of a batch on the caller's word.

        Raises:
            InvalidInput: another number of rows.
        """
        ids = batch.all if records is None else records

        def change(tensor: Tensor) -> Tensor:
            if not tensor.dim() or tensor.shape[0] != len(ids):
                raise InvalidInput(
                    "batch",
                    expected=f"tensors of {len(ids)} rows, as the current batch has records",
                    got=f"shape {list(tensor.shape)}",
                    remedy="Pass records=, the position in the batch of each row's record, where a "
                    "record has several rows.",
                )
            return track(untracked(tensor), PerRecord(batch, ids))

        return mapped(tree, change)

    def enter_operation(self, call: TrackedCall) -> Any:
        """Run an operation with a private parameter on tracked rows outside ``forward()``."""
        if writes_in_place(call.func):
            for target in tensors_in(call.args[0]):  # several in torch._foreach_add_
                self.check_target(target, call.name)
        if self.capture.in_public and any(_has_records(t) for t in call.tracked):
            raise refusals.private_in_public()
        if any(isinstance(state, RecordSum) for state in call.states):
            raise refusals.parameter_term(call.name)
        placeholder = call.batch is not None and call.batch.placeholder
        if torch.is_grad_enabled() and (self.capture.watching or placeholder):
            rows = rows_of([Input(f"the input of {call.name}", t, False) for t in call.tracked])
            if rows is not None and rows.order is not None:
                raise refusals.unequal_rows(f"other orders, in {call.name} outside the module")
            if rows is not None:
                self._begin(rows)
        if placeholder:
            result = call.plain()
        else:
            args, kwargs = stripped((call.args, call.kwargs), None)
            result = call.func(*args, **kwargs)
        return finish(call, result, RULES.get(call.name, lambda c, out: c.mixed("is not followed")))

    # outputs and losses

    def leave(self, output: Any, *, alone: bool = False) -> Any:
        """Return the module's output with the states of its rows.

        Args:
            output: what the pass that ends returned.
            alone: whether nothing but this pass holds it, so that it needs no alias.
        """
        rows = self._rows
        if rows is None:
            if self.has_loader or self.capture.batch is None or not torch.is_grad_enabled():
                return output
            # Without a loader each pass brings new samples, row by row.
            rows = YieldedBatch(self.capture.records, boundary=self).rows
            self.current = rows.batch
        batch = rows.batch
        losses = self.losses
        if batch is not self._left:
            self._left, losses.outputs, losses.before = batch, (), 0
        elif losses.samples != self.capture._ticket:  # another piece of it
            losses.before = len(losses.outputs)
        losses.samples = self.capture._ticket
        usual = rows is batch.rows
        if usual and alone:
            node = left(output, batch.each, batch.in_pass)
            if node is not None:
                self.losses.outputs += (node,)
                return output
        if usual and type(output) is Tensor and output.dim() and len(output) == batch.in_pass:
            self.losses.outputs += (output.grad_fn,)
            return (retrack if alone else track)(output, batch.each)
        return mapped(output, lambda tensor: self._tracked(tensor, rows))

    def _tracked(self, tensor: Tensor, rows: Rows) -> Tensor:
        if type(tensor) is TrackedTensor:
            return tensor
        node = tensor.grad_fn
        if node not in self.losses.outputs:
            self.losses.outputs += (node,)
        batch, records = rows.batch, rows.records
        if tensor.dim() == 0 and tensor.requires_grad:
            return track(*state_of_scalar(tensor, batch, records))
        count = tensor.shape[0] if tensor.dim() else -1
        if rows.order is not None and count == len(rows.order):
            back = np.argsort(rows.order, kind="stable")
            return track(picked(tensor, back), PerRecord(batch, rows.ids))
        if count == len(rows.ids) and rows.order is None:
            return track(
                tensor, batch.each if rows.ids is batch.all else PerRecord(batch, rows.ids)
            )
        if count > 0 and len(records) and count % len(records) == 0:
            return track(tensor, PerRecord(batch, np.repeat(records, count // len(records))))
        return track(tensor, Mixed("forward", "the module", _NO_ROWS, batch))

    def follows_size(self, operation: str, number: float, batch: YieldedBatch) -> bool:
        """Whether numbers that scale samples here have followed the sizes of batches."""
        return self.has_loader and self._scales.follows(operation, number, batch.size)

    def check_target(self, target: Tensor, operation: str) -> None:
        """Refuse an operation that writes records into a tensor of the module."""
        module = self.capture.module
        place = target.untyped_storage().data_ptr()
        with without_torch_function():
            own = (*module.named_buffers(), *module.named_parameters())
            names = [n for n, t in own if t.untyped_storage().data_ptr() == place != 0]
        if names or isinstance(target, nn.Parameter):
            raise PrivacyError(
                names[0] if names else "a parameter",
                expected="tensors of the model that the loop leaves alone",
                got=f"samples written into it by {operation}",
                remedy="Keep statistics of private data outside the model, where nothing releases "
                "them without noise, or update it from public data under engine.public().",
            )

    def look_at_write(self, func: Function, values: Sequence[Any]) -> None:
        """Look at an operation that writes into parameters, given its arguments.

        Raises:
            PrivacyError: it takes a number that was computed over samples.
        """
        name = getattr(func, "__name__", "")
        for value in values:
            if (state := origin_of(value)) is not None:
                raise refusals.number_in_parameter(name, state)
        self.writes += 1
        if self.current is None or func in _NO_VALUES:
            return
        others = values[1:]
        constant = not any(isinstance(other, Tensor) for other in others)
        if name not in _BY_ITSELF or not constant or not all(map(is_usual, numbers_in(others))):
            self.assume(WRITTEN)

    def look_at_numbers(self, values: Sequence[Any]) -> None:
        """Look at numbers, tensors and containers of them that the module's code may read.

        Those that were made of samples, or may have been, are a condition.
        """
        if self.current is None or not values:
            return
        if any(origin_of(value) is not None for value in values):
            self.assume(READ)
        self.constants.note_numbers(self.current, values)
        self.constants.note_kept(self.current, values)

    def look_at_sizes(self, assigned: Mapping[int, Any]) -> None:
        """Look at what the loop assigned to attributes of the module, by their places.

        Numbers that follow the sizes of batches are a condition: the module may never read them.
        """
        if self.current is None or not self.has_loader:
            return
        size = self.current.size
        for place, value in assigned.items():
            known = type(value) in (int, float)
            if known and self._sizes.follows(("attribute", place), value, size):
                self.assume(READ)

    def look_at_data(self, parameter: Tensor, data: Tensor) -> None:
        """Look at a tensor that takes the place of a parameter's memory, ``parameter.data = data``.

        Its own values, moved or cast as ``module.to()`` does, are no others.
        """
        self.writes += 1
        if self.current is not None and not _same_values(parameter, data):
            self.assume(WRITTEN)

    def note_written(self) -> None:
        """Note that parameters or the optimizer's state have changed between two steps."""
        self.assume(WRITTEN)

    def backward(
        self,
        losses: Sequence[Tensor],
        states: Sequence[State],
        run: Callable[..., Any],
        *,
        frees: bool = False,
    ) -> Any:
        """Check losses (``LossCheck.check``) and run their backward pass.

        ``run`` may be given a factor of all gradients that the pass starts with. ``frees`` says
        that it frees the graph behind the outputs that it comes to.
        """
        capture = self.capture
        if capture._public:
            if states:
                raise refusals.private_in_public()
            return run()
        if not capture.attached:
            return run()
        for state in states:
            if state.batch is not None and state.batch.placeholder:
                return None  # an empty draw has no gradient
        if self.losses.running and states:
            raise refusals.backward_inside_backward()
        self.losses.check(losses, states)
        self.losses.running = len(states) == len(losses)
        self.losses.begun = losses, states
        if capture.tested is not None:
            for loss in losses:
                capture.tested.note_loss(loss, self.losses.outputs)
        try:
            if len(states) != len(losses) or not capture.undo_mean(losses):
                return run()
            batch = states[0].batch if states else None
            return run(capture.records if batch is None else batch.in_pass)
        except RuntimeError as error:
            if not any(loss.requires_grad for loss in losses):
                raise refusals.no_gradient() from error
            raise
        finally:
            self.losses.running, self.losses.begun = False, None
            for state in states:
                if state.batch is not None:
                    state.batch.went_backward = True
            if frees and len(self.losses.outputs) == 1:
                self.losses.forget()  # no other loss can go through it


WRITTEN = (
    "values that the loop writes into parameters or the optimizer's state come from released "
    "weights or from public data"
)
"""The condition of certificates after the loop has changed a parameter between steps."""

_NO_VALUES = (Tensor.requires_grad_, Tensor.share_memory_)
"""Operations in place that write no values."""

_BY_ITSELF = frozenset(
    "clamp_ clip_ clamp_min_ clamp_max_ zero_ abs_ relu_ renorm_ nan_to_num_".split()
)
"""Operations in place that change values by themselves and constants."""

_NO_ROWS = "returns it without a row for each sample"


def _same_values(parameter: Tensor, data: Tensor) -> bool:
    """Whether a tensor holds the values of a parameter, perhaps in another dtype or place."""
    if parameter.shape != data.shape or not (readable(parameter) and readable(data)):
        return False
    with torch.no_grad():
        return same_bits(parameter.detach().to(data.device, data.dtype), data.detach())


def _has_records(tensor: Tensor) -> bool:
    state = state_of(tensor)
    if isinstance(state, PerRecord):
        return not has_no_records(state)
    return state is not None
