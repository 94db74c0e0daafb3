"""Check what enters the private module, mark what leaves it, and check the losses that come back.

The rows of everything that enters must come from one batch of the loader, each from one record.
Rows are put into the order of the records, so that those of one record are neighbours; outputs go
back in the caller's order. A batch that is cut into smaller ones is clipped piece by piece: each
record is in one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ...errors import InvalidInput, PrivacyError, UnsupportedModule
from ..parameter import PRIVATE
from .aliases import is_stale, written_elsewhere
from .handing import tracked_batch
from .inner_loss import state_of_scalar
from .leaves import Leaves
from .naming import user_line
from .refusals import HOW_TO_ADOPT, mixed_input, mixed_loss, two_batches, wrong_rows
from .rules import RULES, Call, finish
from .states import NO_RECORD, Ids, Mixed, OneRecord, PerRecord, RecordSum, State, YieldedBatch
from .tensor import TrackedTensor, state_of, track, untracked
from .trees import mapped, tensors_of
from .wrappers import remedy_of_wrapper

if TYPE_CHECKING:
    from ..capture import Capture


@dataclass(frozen=True)
class _Input:
    """A tensor that the module is called with; ``packed``: as data of a ``PackedSequence``."""

    name: str
    tensor: Tensor
    packed: bool


def _named_inputs(args: Any, kwargs: Any) -> Iterator[_Input]:
    for place, value in [*enumerate(args), *kwargs.items()]:
        name = f"input {place!r} of the module"
        yield from (_Input(name, tensor, packed) for tensor, packed in tensors_of(value))


@dataclass
class _Entered:
    """The rows of one forward pass.

    Args:
        batch: where they come from; None where that is not followed.
        ids: the record of each row as the caller ordered them.
        records: the records, ascending.
        order: how rows were sorted; None if they came sorted.
    """

    batch: YieldedBatch
    ids: Ids
    records: Ids
    order: Ids | None


class ModuleBoundary:
    """Checks inputs and losses of one private module.

    Args:
        capture: of the module.
        activate: called with the batch whose samples enter now, if it is not the current one.
        close_piece: called before another piece of the current batch enters.
    """

    def __init__(
        self,
        capture: Capture,
        *,
        activate: Callable[[YieldedBatch], None],
        close_piece: Callable[[], None],
    ) -> None:
        self.capture = capture
        self.activate = activate
        self.close_piece = close_piece
        self.views = 1
        """Rows of each record in passes without a loader."""
        self.has_loader = False
        """Whether samples must come from a loader."""
        self.current: YieldedBatch | None = None
        self.unfinished_pass = False
        """Whether samples entered for which no step was taken."""
        self.losses_followed = False
        """Whether the running backward pass started from a loss that was followed."""
        self._entered: _Entered | None = None
        self._records: Ids | None = None
        """Records of the piece that is in the module."""
        self._closed: set[int] = set()
        """Records of pieces that are clipped already."""
        self._shares: dict[tuple[str, int, int], int] = {}
        """By how much each loss divides, by its line of the user's code."""
        self.leaves = Leaves(capture)
        self._outputs: set[Any] = set()
        """Where the graphs of the last pass' outputs begin."""
        self._passes = 0

    # inputs

    def enter(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of the module without states, rows in the order of the records.

        Raises:
            PrivacyError: samples that no loader yielded, or of an earlier batch.
            UnsupportedModule: rows in which records have met.
        """
        self._entered = None
        if self.views > 1 and not self.has_loader:
            args, kwargs = self._with_views(args, kwargs)
        found = list(_named_inputs(args, kwargs))
        tracked = [each for each in found if type(each.tensor) is TrackedTensor]
        capture = self.capture
        if capture.in_public:
            if any(_has_records(each.tensor) for each in tracked):
                raise PrivacyError(
                    "engine.public()",
                    expected="inputs without private data",
                    got="samples of the private loader",
                    remedy="Run passes over the loader's samples outside engine.public().",
                )
            return self._stripped((args, kwargs), None)
        training = torch.is_grad_enabled() and capture.attached
        if not tracked:
            if training and self.has_loader:
                self._without_states(found)
            return args, kwargs
        entered = self._rows_of(found, strict=training)
        if entered is None:
            return self._stripped((args, kwargs), None)
        self._entered = entered
        if training:
            self._begin(entered)
        return self._stripped((args, kwargs), entered)

    @property
    def entered_records(self) -> int | None:
        """Records of the running pass, if they are followed."""
        return None if self._entered is None else len(self._entered.records)

    @property
    def in_placeholder(self) -> bool:
        """Whether the running pass has the row that stands for an empty draw."""
        return self._entered is not None and self._entered.batch.placeholder

    def _with_views(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Inputs of a pass without a loader, their rows known as views of the same records."""
        rows = max((t.shape[0] for t, _ in tensors_of((args, kwargs)) if t.dim()), default=0)
        if rows % self.views or any(
            type(t) is TrackedTensor for t, _ in tensors_of((args, kwargs))
        ):
            return args, kwargs
        batch = YieldedBatch(rows // self.views, boundary=self)
        tracked: tuple[Any, Any] = tracked_batch((args, kwargs), batch, self.views)
        return tracked

    def check_finished(self) -> None:
        """The loader's last batch must have had its step.

        Raises:
            PrivacyError: a batch was left out after its forward pass.
        """
        if self.unfinished_pass:
            raise PrivacyError(
                "data_loader",
                expected="optimizer.step() for every batch whose samples entered the module",
                got="a batch left out after its forward pass",
                remedy="Whether a step is taken must not depend on the samples: call "
                "optimizer.step() "
                "for every batch. Samples that are not finite are dropped by the clipping.",
            )

    def adopt(self, tree: Any, batch: YieldedBatch, records: Ids | None) -> Any:
        """Tensors that the caller vouches for, as rows of a batch."""
        ids = batch.all if records is None else records

        def change(tensor: Tensor) -> Tensor:
            rows = tensor.shape[0] if tensor.dim() else 0
            if rows != len(ids):
                raise InvalidInput(
                    "batch",
                    expected=f"tensors of {len(ids)} rows, as the current batch has records",
                    got=f"shape {list(tensor.shape)}",
                    remedy="Pass records=, the position in the batch of each row's record, "
                    "where a record "
                    "has several rows.",
                )
            return track(untracked(tensor), PerRecord(batch, ids))

        return mapped(tree, change)

    def _without_states(self, found: Sequence[_Input]) -> None:
        """Nothing that enters was yielded by the loader."""
        if self.current is None and self.capture.handed_out:
            return  # the caller begins batches by hand
        if not self.capture.module.training:
            self.capture.skip_pass()
            return
        raise PrivacyError(
            "inputs of the module",
            expected="samples that the private loader yielded",
            got="other tensors" if found else "no tensors",
            remedy=HOW_TO_ADOPT
            + remedy_of_wrapper()
            + " Passes that use no private data belong in "
            "engine.public(); engine.new_samples() takes samples from elsewhere, accounted "
            "as if every "
            "record were in every step.",
        )

    def _rows_of(self, found: Sequence[_Input], *, strict: bool) -> _Entered | None:
        batch: YieldedBatch | None = None
        rows: list[tuple[Ids, bool]] = []
        for each in found:
            tensor, packed = each.tensor, each.packed
            state = state_of(tensor)
            if is_stale([tensor]):
                state = written_elsewhere(state)
            if state is None:
                continue
            if isinstance(state, Mixed):
                if strict:
                    raise mixed_input(each.name, state)
                return None
            if isinstance(state, OneRecord) and tensor.dim() and tensor.shape[0] == 1:
                state = PerRecord(state.batch, np.array([state.record]))
            if not isinstance(state, PerRecord) or state.dim != 0:
                if strict:
                    raise wrong_rows(each.name, tensor, state)
                return None
            if bool((state.ids == NO_RECORD).all()) and len(state.ids):
                continue
            if batch is not None and state.batch is not batch:
                raise two_batches(each.name)
            batch = state.batch
            rows.append((state.ids, packed))
        if batch is None:
            if strict and self.has_loader:
                self._without_states(found)
            return None
        entered = self._entered_rows(batch, rows, strict)
        if entered is not None and strict:
            self._check_unmarked(found, {len(ids) for ids, _ in rows})
        return entered

    def _entered_rows(
        self, batch: YieldedBatch, rows: Sequence[tuple[Ids, bool]], strict: bool
    ) -> _Entered | None:
        widest = max((ids for ids, _ in rows), key=len)
        if all(ids is batch.all for ids, _ in rows):
            return _Entered(batch, batch.all, batch.all, None)
        problem = None
        records = np.unique(widest)
        orders = []
        for ids, packed in rows:
            own, counts = np.unique(ids, return_counts=True)
            if bool((ids == NO_RECORD).any()):
                problem = "rows that belong to no record beside rows of records"
            elif not np.array_equal(own, records):
                problem = "inputs that hold different records"
            elif not packed and len(counts) and bool((counts != counts[0]).any()):
                problem = "more rows of some records than of others"
            sorted_already = packed or bool((np.diff(ids) >= 0).all())
            orders.append(None if sorted_already else np.argsort(ids, kind="stable"))
        plain = [ids for ids, packed in rows if not packed]
        if len({len(ids) for ids in plain}) == 1 and any(
            not np.array_equal(ids, plain[0]) for ids in plain
        ):
            problem = "inputs whose rows are in different orders"
        if problem is not None:
            if strict:
                raise PrivacyError(
                    "inputs of the module",
                    expected="equally many rows of each record of one batch, in one order",
                    got=problem,
                    remedy="Pass rows that the loader yielded, cut or repeated for all "
                    "records alike; "
                    "made-up rows belong into a pass of their own under engine.public().",
                )
            return None
        return _Entered(batch, widest, records, next((o for o in orders if o is not None), None))

    def _check_unmarked(self, found: Sequence[_Input], rows: set[int]) -> None:
        """Other inputs with as many rows would be taken for the samples' own."""
        if not self.has_loader or max(rows) < 2:
            return
        own = None
        for each in found:
            tensor = each.tensor
            if type(tensor) is TrackedTensor or tensor.dim() == 0 or tensor.shape[0] not in rows:
                continue
            if own is None:
                own = {id(t) for t in (*self.capture.module.buffers(), *self.capture.parameters)}
            if id(tensor) in own or type(tensor) in PRIVATE:
                continue
            raise PrivacyError(
                each.name,
                expected="rows that the private loader yielded",
                got=f"a tensor of shape {list(tensor.shape)} made otherwise, beside samples",
                remedy="If it is random or constant, or if row i depends on record i alone, pass "
                "engine.adopt(tensor). " + HOW_TO_ADOPT,
            )

    def _begin(self, entered: _Entered) -> None:
        """The samples of the pass become the current ones."""
        capture, batch = self.capture, entered.batch
        if batch is not self.current:
            self.activate(batch)
            self.current = batch
            self._closed = set()
            self._records = None
            self.unfinished_pass = True
        if batch.placeholder:
            capture.skip_pass()
            return
        if not self.has_loader:
            self._records = None
        if self._records is None:
            if len(entered.records) != batch.size:
                capture.begin_piece(len(entered.records))
        elif not np.array_equal(self._records, entered.records):
            earlier = self._closed | set(self._records.tolist())
            if not earlier.isdisjoint(entered.records.tolist()):
                raise PrivacyError(
                    "inputs of the module",
                    expected="pieces of a batch that have no record in common, or the same "
                    "records again",
                    got="some records of an earlier pass together with others",
                    remedy="Cut the batch into disjoint pieces (x.split(n)), or pass the same rows "
                    "each time.",
                )
            self._closed = earlier
            self.close_piece()
            capture.begin_piece(len(entered.records))
        self._records = entered.records
        batch.in_pass = len(entered.records)

    def _stripped(self, tree: Any, entered: _Entered | None) -> tuple[Any, Any]:
        order = None if entered is None else entered.order

        def strip(tensor: Tensor) -> Tensor:
            state = state_of(tensor)
            if state is None:
                return tensor
            plain = untracked(tensor)
            if order is None or not isinstance(state, PerRecord) or not len(state.ids):
                return plain
            if bool((state.ids == NO_RECORD).all()):
                return plain if len(state.ids) != len(order) else plain[_index(order, plain)]
            own = np.argsort(state.ids, kind="stable")
            return plain[_index(own, plain)]

        stripped: tuple[Any, Any] = mapped(tree, strip, untracked)
        return stripped

    # outputs

    def leave(self, output: Any) -> Any:
        """The module's output with the states of its rows."""
        entered = self._entered
        if entered is None:
            if self.has_loader or self.capture.batch is None or not torch.is_grad_enabled():
                return output
            # Without a loader each pass brings new samples, row by row.
            batch = YieldedBatch(self.capture.batch, boundary=self)
            entered = _Entered(batch, batch.all, batch.all, None)
            self.current = batch
        self._outputs = set()
        return mapped(output, lambda tensor: self._tracked(tensor, entered))

    def _tracked(self, tensor: Tensor, entered: _Entered) -> Tensor:
        if type(tensor) is TrackedTensor:
            return tensor
        self._outputs.add(tensor.grad_fn)
        batch, records = entered.batch, entered.records
        if tensor.dim() == 0:
            if not tensor.requires_grad:
                return track(tensor, _no_rows(batch))
            return track(*state_of_scalar(tensor, batch, records))
        rows = tensor.shape[0]
        if entered.order is not None and rows == len(entered.order):
            inverse = np.argsort(entered.order, kind="stable")
            return track(tensor[_index(inverse, tensor)], PerRecord(batch, entered.ids))
        if rows == len(entered.ids) and entered.order is None:
            return track(tensor, PerRecord(batch, entered.ids))
        if not len(records) or rows % len(records):
            return track(tensor, PerRecord(batch, batch.all) if rows == 0 else _no_rows(batch))
        return track(tensor, PerRecord(batch, np.repeat(records, rows // len(records))))

    def enter_operation(self, call: Call) -> Any:
        """A parameter that is used on tracked rows outside the module's own forward pass."""
        if any(isinstance(state, RecordSum) for state in call.states):
            raise UnsupportedModule(
                "loss",
                expected="a loss of the module's outputs alone",
                got=f"{call.name} with a term of the parameters",
                remedy="Terms that belong to no sample go into weight_decay, or backward under "
                "engine.public().",
            )
        placeholder = call.batch is not None and call.batch.placeholder
        if torch.is_grad_enabled() and (self.capture.watching or placeholder):
            inputs = [_Input(f"the input of {call.name}", t, False) for t in call.tracked]
            entered = self._rows_of(inputs, strict=True)
            if entered is not None:
                if entered.order is not None:
                    raise PrivacyError(
                        f"inputs of {call.name}",
                        expected="rows in the order of the loader's records",
                        got="another order, outside the module's forward pass",
                        remedy="Call the module itself, or sort the rows first.",
                    )
                self._begin(entered)
        if placeholder:
            result = call.plain()
        else:
            args, kwargs = self._stripped((call.args, call.kwargs), None)
            result = call.func(*args, **kwargs)
        return finish(call, result, RULES.get(call.name, lambda c, out: c.mixed("is not followed")))

    # losses

    def check_target(self, target: Tensor, operation: str) -> None:
        """Refuse an operation that writes records into a tensor of the module."""
        module = self.capture.module
        names = [n for n, t in (*module.named_buffers(), *module.named_parameters()) if t is target]
        if names or isinstance(target, nn.Parameter):
            raise PrivacyError(
                names[0] if names else "a parameter",
                expected="tensors of the model that the loop leaves alone",
                got=f"samples written into it by {operation}",
                remedy="What it absorbs would be released without noise: keep statistics of "
                "private data "
                "outside the model, or update it from public data.",
            )

    def backward(
        self, losses: Sequence[Tensor], states: Sequence[State], run: Callable[[], Any]
    ) -> Any:
        """Check that losses are sums over records, divided as declared, and go backward.

        Raises:
            UnsupportedModule: a loss in which records meet.
            InvalidInput: another reduction than ``loss_reduction`` says.
            PrivacyError: a trained tensor that is not the engine's, or a loss that lost its state.
        """
        capture = self.capture
        if capture.in_public or not capture.attached:
            return run()
        if any(state.batch is not None and state.batch.placeholder for state in states):
            return None
        for number, state in enumerate(states):
            if isinstance(state, Mixed):
                raise mixed_loss(state)
            if isinstance(state, RecordSum):
                self._check_reduction(state, number)
        self._passes += 1
        for loss in losses:
            self.leaves.check(loss, self._outputs, whole=self._passes < 3)
        self.losses_followed = len(states) == len(losses)
        try:
            return run()
        finally:
            self.losses_followed = False

    def _check_reduction(self, state: RecordSum, number: int) -> None:
        capture, declared = self.capture, self.capture.loss_reduction
        if not state.rescaled and state.reduction != declared and state.batch.in_pass > 1:
            raise InvalidInput(
                "loss_reduction",
                expected=f"a {declared} over the samples of a batch, as make_private was told",
                got=f"a loss that is a {state.reduction} over them",
                remedy=f"Pass loss_reduction={state.reduction!r} to make_private, or let "
                "the loss be "
                f"a {declared}.",
            )
        if state.batch.in_pass < 2:
            return
        line = user_line()
        for position, share in enumerate(sorted(state.shares)):
            before = self._shares.setdefault((line, number, position), share)
            if before != share:
                error = UnsupportedModule(
                    "loss",
                    expected="a mean that divides each sample's terms by the same number in "
                    "every batch",
                    got=f"one over {share} entries of each sample, after {before} in an "
                    "earlier batch",
                    remedy="Pad all batches to one length, or divide each sample by its own "
                    "number of "
                    "entries: dpkern.losses.per_sample_mean(terms, mask).mean().",
                )
                if capture.guard.on_late_finding is not None:
                    capture.guard.on_late_finding(str(error))
                raise error


def _index(order: Ids, tensor: Tensor) -> Tensor:
    return torch.from_numpy(order).to(tensor.device)


def _has_records(tensor: Tensor) -> bool:
    state = state_of(tensor)
    if isinstance(state, PerRecord):
        return bool((state.ids != NO_RECORD).any())
    return state is not None


def _no_rows(batch: YieldedBatch) -> Mixed:
    return Mixed("forward", "the module", "returns it without a row for each sample", batch)
