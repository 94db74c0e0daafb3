"""Run a copy of a model, as a training step runs it, on batches that hold a few records again and
again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..base.errors import InvalidInput
from ..privacy.mechanisms import Plan
from .capture import Capture
from .clip_norms import NormedGradients
from .clipping import gathered, prepare
from .padded_rows import MULTIPLE, RowPadding, UsePattern, loss_pattern, modes_of
from .replaced_rows import taken_rows, tensors_of
from .row_bits import LoggedOperation, OperationLog, checksums
from .uses import CapturedGradients, ParameterSource

Loss = Callable[..., Tensor]

REFERENCES = 16
"""Records whose copies are compared."""

LARGE = 1024.0
"""Factor of some other rows."""


def sample_count(inputs: Sequence[Any], targets: Any) -> int:
    sizes = {int(t.shape[0]) if t.dim() else 0 for t in tensors_of((tuple(inputs), targets))}
    if len(sizes) != 1 or not min(sizes):
        raise InvalidInput(
            "inputs, targets",
            expected="tensors that all have the same samples in their first dimension",
            got=f"first dimensions {sorted(sizes)}",
            remedy="Pass one batch of made-up samples and their targets.",
        )
    return sizes.pop()


@dataclass(frozen=True)
class TrialBatch:
    """The records in the rows of one pass; ``copies`` names the reference of each row, else -1."""

    rows: Tensor
    copies: Tensor
    large: Tensor

    @classmethod
    def all(cls, most: int, records: int) -> Iterator[TrialBatch]:
        """Yield the batches of a test, of up to ``most`` rows."""
        yield from cls.turned(records)
        for size in range(MULTIPLE, most + 1, MULTIPLE):
            yield from cls.of_size(size, records)

    @classmethod
    def of(cls, size: int, turn: int, less: int, records: int, first: int = 0) -> TrialBatch:
        """Return ``size - less`` rows, every second a copy; turns 0 and 1 fill their gaps.

        The copies begin with the reference ``first``.
        """
        generator = torch.Generator().manual_seed(2 * size + turn)
        places = torch.arange(size - less)
        is_copy = (places + turn) % 2 == 0
        references = (places // 2 + first) % min(REFERENCES, records)
        others = torch.randint(records, places.shape, generator=generator)
        large = torch.rand(places.shape, generator=generator) < 0.3
        return cls(
            rows=torch.where(is_copy, references, others),
            copies=torch.where(is_copy, references, -1),
            large=large & ~is_copy,
        )

    @classmethod
    def of_size(cls, size: int, records: int) -> Iterator[TrialBatch]:
        """Batches that have, or are filled up to, ``size`` rows; copies stand in every place.

        Those of other sizes begin with another reference, so that each comes to many places.
        """
        number = size // MULTIPLE
        less = 1 + number % (MULTIPLE - 1) if MULTIPLE > 1 else 0
        for turn, missing in ((0, 0), (1, 0), (less % 2, less)):
            yield cls.of(size, turn, missing, records, number)

    @classmethod
    def turned(cls, records: int) -> Iterator[TrialBatch]:
        """Yield small batches in which each reference stands once in each of ``MULTIPLE`` places.

        A row's place in memory, up to a cache line of 64 bytes, is that of the row ``MULTIPLE``
        places further on.
        """
        for turn in range(MULTIPLE):
            references = (torch.arange(MULTIPLE) + turn) % min(REFERENCES, records)
            yield cls(rows=references, copies=references, large=references < 0)

    def __len__(self) -> int:
        return len(self.rows)

    def agreed(self, seen: Tensor, known: dict[int, int]) -> bool:
        """Whether rows that hold the same reference have the same number, here and earlier."""
        agree = True
        for reference in range(int(self.copies.max()) + 1):
            mine = sorted(set(seen[: len(self)][self.copies == reference].tolist()))
            if mine and mine != [known.setdefault(reference, mine[0])]:
                agree = False
        return agree


Logged = tuple[TrialBatch, list[LoggedOperation]]


class Trial:
    """A copy of the model under capture, run as a training step runs it."""

    def __init__(
        self,
        module: nn.Module,
        plan: Plan,
        inputs: Sequence[Any],
        targets: Any,
        loss: Loss,
        reduction: str,
        keep_budget: int | float | None,
    ) -> None:
        self.module = copy.deepcopy(module)
        self.inputs, self.targets, self.loss = tuple(inputs), targets, loss
        self.records = sample_count(inputs, targets)
        self.mean = reduction == "mean"
        self.capture = Capture(self.module, loss_reduction=reduction, keep_budget=keep_budget)
        self.capture.row_padding = RowPadding(self.capture)
        self.pattern = UsePattern()
        self.reads: set[str] = set()
        """Operations that showed the code what its tensors hold (``OperationLog.reads``)."""
        self.makes_products = plan.mapped
        """Whether what the capture holds goes through products before integers are made of it: back
        through expressions of parameters, or to release coordinates."""
        prepare(self.capture, lambda: plan)

    def run(self, batch: TrialBatch, log: OperationLog | None = None) -> list[tuple[str, Tensor]]:
        """Pass forward and backward; return the checksums of what was captured, by name."""
        x, y = (taken_rows(tree, *self._of(batch)) for tree in (self.inputs, self.targets))
        for tensor in tensors_of(x):
            if tensor.is_floating_point():
                tensor[batch.large] *= LARGE
        capture, self.pattern = self.capture, UsePattern(modes=modes_of(self.module))
        capture.on_use = self.pattern.note
        capture.attach()
        try:
            with capture.guard.paused(), torch.enable_grad():
                capture.begin_batch(len(batch))
                with nullcontext() if log is None else log.running():
                    outputs = self.module(*x)
                    ends = {t.grad_fn for t in tensors_of(outputs)}
                    loss = self.loss(outputs, y)
                    self.reads |= set() if log is None else log.reads
                    self.pattern.loss = loss_pattern(loss, ends)
                    self._backward(loss, capture.records)
                    self.makes_products = self.makes_products or bool(capture.expressions)
                    parts = gathered(capture)
            return list(_checksums(parts, capture.batch or 0))
        finally:
            capture.detach()

    def _backward(self, loss: Tensor, records: int) -> None:
        upstream = torch.full_like(loss, float(records) if self.mean else 1.0)
        loss.backward(upstream)  # type: ignore[no-untyped-call]

    def _of(self, batch: TrialBatch) -> tuple[int, list[int]]:
        return self.records, batch.rows.tolist()

    def outputs(self) -> Any:
        """Run the module on all records."""
        with torch.no_grad():
            return self.module(*self.inputs)

    def run_loss(
        self, outputs: Any, batch: TrialBatch, log: OperationLog | None = None
    ) -> list[tuple[str, Tensor]]:
        """Run the loss alone; return the checksums of the outputs' gradients."""
        x, y = (taken_rows(tree, *self._of(batch)) for tree in (outputs, self.targets))
        leaves = [t.requires_grad_() for t in tensors_of(x) if t.is_floating_point()]
        with torch.enable_grad(), nullcontext() if log is None else log.running():
            self._backward(self.loss(x, y), len(batch))
        found = []
        for place, leaf in enumerate(leaves):
            numbers = None if leaf.grad is None else checksums(leaf.grad, len(batch))
            if numbers is not None:
                found.append((f"output {place} of the module", numbers))
        return found

    def logged(self, batch: TrialBatch) -> Logged:
        """Return the operations of a whole pass."""
        log = OperationLog(-(-len(batch) // MULTIPLE) * MULTIPLE)
        self.run(batch, log)
        return batch, log.operations

    def logged_loss(self, outputs: Any, batch: TrialBatch) -> Logged:
        """Return the operations of the loss."""
        log = OperationLog(len(batch))
        self.run_loss(outputs, batch, log)
        return batch, log.operations


def _checksums(
    parts: Sequence[tuple[ParameterSource, CapturedGradients]], rows: int
) -> Iterator[tuple[str, Tensor]]:
    """Return the bits of all that integers are made of, and of its norms."""
    for number, (slot, part) in enumerate(parts):
        record = part.record
        made = record.rows() if isinstance(record, NormedGradients) else record
        for place, tensor in enumerate(tensors_of((made, part.square))):
            found = checksums(tensor, rows)
            if found is not None:
                yield f"{slot.name} {number}.{place}", found
