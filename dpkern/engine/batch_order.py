"""The order of batches: yielded by the loader, entered into the module, closed by a step.

A batch counts when its samples enter the module, so that loaders may look ahead. Each batch that
entered needs its step, and a step needs a batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from ..base.errors import PrivacyError
from ..step.step import DPStep
from .capture import Capture
from .parameter import without_torch_function
from .provenance import ModuleBoundary, YieldedBatch

DROPPED = (
    "batches that the loop left out (engine.drop(), or no pass over them) were not chosen by "
    "looking at their samples or their number"
)
"""The condition of certificates after a batch was dropped or skipped."""


class BatchOrder:
    """The batches of one run, from the loader that yields them to the step that closes them.

    Args:
        capture: holds the gradients of the current samples.
        step: adds up their clipped sums.
        close: clips the gradients that the capture holds and adds their sum to the step.
    """

    def __init__(self, capture: Capture, step: DPStep, close: Callable[[], None]) -> None:
        self.capture = capture
        self.step = step
        self.boundary = ModuleBoundary(
            capture,
            activate=self.activate,
            close_piece=self.close_piece,
            assume=step.ledger.assume,
        )
        self.final = True
        """Whether the current samples are the last ones of their logical batch."""
        self.in_pieces = False
        """Whether pieces of the current samples were clipped before their step."""
        self._close = close
        self._pending: deque[YieldedBatch] = deque()
        """Batches that the loader has yielded and that have not entered the module."""
        self._waiting: bool | None = None
        """Whether samples still await ``optimizer.step()``; None before the first batch and without
        a loader."""

    def reset(self) -> None:
        """Forget all batches."""
        self._pending.clear()
        self.boundary.unfinished_pass = False
        self.final, self._waiting = True, None

    def check_step(self) -> None:
        """Check that a step may be taken now.

        Raises:
            PrivacyError: the current samples have had their step.
        """
        if not self._waiting and self._pending:
            # The loop took a batch and made no pass over it, as loops do with empty ones.
            self.activate(self._pending[0])
        self.boundary.check_covered()
        if self._waiting is False:
            raise PrivacyError(
                "optimizer.step",
                expected="one call for each batch of the loader",
                got="a second call for the same samples",
                remedy="Take the next batch, since each is for one step only, or call "
                "optimizer.zero_grad() to forget the repeated gradients.",
            )

    def step_taken(self) -> None:
        """Record that the current samples have had their step."""
        self.boundary.unfinished_pass = False
        self.boundary.losses.forget()
        self.capture.passes.forget_inputs()
        self._waiting = None if self._waiting is None else False

    def expect(self, batch: YieldedBatch) -> None:
        """Record that the loader yields a batch.

        Its samples become the current ones when they enter the module.

        Raises:
            PrivacyError: gradients of an earlier batch are pending.
        """
        waits = self.capture.arrived_from is not None or (
            batch.first and not self._pending and self.step.unfinished
        )
        if waits and self.boundary.trains_here:
            raise _pending_gradients()
        self._pending.append(batch)

    def activate(self, batch: YieldedBatch) -> None:
        """Make this batch's samples the current ones, as they enter the module.

        Raises:
            PrivacyError: they are of an earlier batch, or gradients of earlier samples are pending.
        """
        if not self.boundary.has_loader:
            return  # the capture begins new samples with every pass
        if batch not in self._pending:
            raise PrivacyError(
                "inputs of the module",
                expected="samples of the loader's current batch",
                got="samples of an earlier one",
                remedy="Use each batch for one step only, in the order in which the loader yields "
                "them.",
            )
        self._begin(batch.size, batch.first, batch.final)
        while self._pending.popleft() is not batch:
            self.step.ledger.assume(DROPPED)

    def current_batch(self) -> YieldedBatch | None:
        """Return the batch that the loop is at: in the module already, or the oldest one yielded.

        None if the loader has yielded none.
        """
        if self._waiting and self.boundary.current is not None:
            return self.boundary.current
        return self._pending[0] if self._pending else self.boundary.current

    def close_piece(self) -> None:
        """Clip the gradients of one piece of the batch, before another piece enters."""
        if self.capture.captured:
            with without_torch_function(), torch.no_grad():
                self._close()
            self.in_pieces = True

    def begin_by_hand(self, batch: int, *, first: bool = True, final: bool = True) -> None:
        """Begin new samples for a caller who vouches that row b of the next inputs is sample b.

        Args:
            batch: number of samples.
            first, final: whether they open and close their logical batch.

        Raises:
            PrivacyError: gradients of earlier samples are pending.
        """
        self._begin(batch, first, final)
        self.boundary.current = None

    def _begin(self, batch: int, first: bool, final: bool) -> None:
        if self.capture.arrived_from is not None or (first and self.step.unfinished):
            raise _pending_gradients()
        if self._waiting:
            self.boundary.check_finished()
        self.capture.begin_batch(batch)
        self.final, self._waiting, self.in_pieces = final, True, False

    def new_samples(
        self,
        *,
        sampling: str = "poisson",
        sample_rate: float | None = None,
        dataset_size: int | None = None,
    ) -> None:
        """Begin samples without a loader: each forward pass brings new ones.

        Without a rate every record is taken to be in every step.

        Raises:
            PrivacyError: gradients of earlier samples are pending.
        """
        if self.capture.captured or self.step.unfinished:
            raise PrivacyError(
                "new_samples",
                expected="a finished step",
                got="gradients that no optimizer.step() has seen",
                remedy="Call optimizer.step() or engine.drop() first.",
            )
        self.step.draw_as(sampling, sample_rate or 1.0, dataset_size)
        self.capture.new_samples()
        self.boundary.has_loader, self.boundary.current = False, None
        self._pending.clear()
        self.boundary.unfinished_pass = False
        self.final, self._waiting = True, None

    def drop(self) -> None:
        """Forget the unfinished logical batch; nothing of it is released."""
        if self.boundary.unfinished_pass or self.step.unfinished:
            self.step.ledger.assume(DROPPED)
        self.capture.discard()
        self.step.drop()
        self.final = True
        self.boundary.drop()


def _pending_gradients() -> PrivacyError:
    return PrivacyError(
        "data_loader",
        expected="optimizer.step() after every batch and every part of a split one",
        got="a new batch while gradients of an earlier one are pending",
        remedy="Call optimizer.step() once per batch. To accumulate, raise batch_size and pass "
        "max_physical_batch_size; engine.drop() forgets an unfinished batch.",
    )
