"""Test whether the bits of a record's gradient depend on the other records of its batch.

A copy of the model runs on batches of every size that physical batches are padded to, and of
smaller ones that padding fills up. Some rows are copies of a few records, the others hold whatever
else. What the capture holds of these records, inputs and output gradients of every use of a
parameter and their norms, must have the same bits wherever a copy stands. If so, a logged pass
names the operations that took part; if not, the operation that made other bits of equal ones.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..base.errors import InvalidInput
from ..privacy.mechanisms import Plan
from ..step.step import DPStep
from .batch_trial import Logged, Loss, Trial, TrialBatch, sample_count
from .capture import Capture
from .exact_sums import sums_in_place
from .loader import PrivateLoader
from .padded_rows import MULTIPLE, RowPadding, StaysAsTested, UsePattern
from .row_bits import LoggedOperation, Seen
from .use_counts import CONDITION

Word = Literal["proved", "tested", "not invariant"]
PROVED = {
    "product.matmul",
    "ghost.layer_norm_backward",
    "ghost.rms_norm_backward",
    "ghost.group_norm_backward",
}
"""Compiled kernels that add the terms of an entry in an order given by its row's shape alone
(docs/exact.md)."""

MOST_LOSSES = 256
"""Losses, which nothing pads, are tested on every number of samples up to this one."""


@dataclass(frozen=True)
class OperationVerdict:
    """The knowledge of one kind of operation: ``proved``, ``tested`` or ``not invariant``."""

    operation: str
    word: Word

    def __str__(self) -> str:
        return f"{self.operation}: {self.word}"


@dataclass(frozen=True)
class BatchInvariance:
    """The outcome of a test.

    Attributes:
        operations: one verdict for each kind of operation, those that failed first.
        uses: uses of parameters whose captured bits differ, by name.
        rows: the largest physical batch.
        threads: of torch, during the test.
        pattern: the uses and the loss that the verdict is about.
        samples_apart: whether gradients of expressions were led back, and release coordinates
            made, one sample at a time (``Capture.samples_apart``), as bits differ otherwise.
        reads: operations by which the code sees what tensors hold, and may let records decide
            which parameters it uses: a condition of certificates (``use_counts.CONDITION``).
    """

    operations: tuple[OperationVerdict, ...]
    uses: tuple[str, ...]
    rows: int
    threads: int
    pattern: UsePattern
    samples_apart: bool = False
    reads: tuple[str, ...] = ()

    @property
    def word(self) -> Word:
        """The weakest of all."""
        words = {each.word for each in self.operations}
        if self.uses or "not invariant" in words:
            return "not invariant"
        return "proved" if words == {"proved"} else "tested"

    @property
    def remarks(self) -> tuple[str, ...]:
        """The test in the words of a certificate."""
        if self.word == "not invariant":
            names = self.named("not invariant") or ", ".join(self.uses)
            return (f"a record's gradient depends on its batch by rounding, in {names}",)
        machine = f"torch {torch.__version__}, {platform.machine()}, {self.threads} threads"
        proved = self.named("proved")
        return (
            f"batch invariance, up to {self.rows} rows with {machine}: "
            + (f"proved for {proved}; " if proved else "")
            + f"tested for {self.named('tested')}",
        )

    def named(self, word: Word) -> str:
        """Return the operations with this word, in one line."""
        return ", ".join(each.operation for each in self.operations if each.word == word)

    def __str__(self) -> str:
        lines = [str(each) for each in self.operations]
        words = {each.operation: each.word for each in self.operations}
        by_library = words.get("product.matmul", "proved") != "proved"
        if self.word == "not invariant" and by_library:
            lines.append(_OTHER_PRODUCTS)
        if self.reads:
            lines.append(f"{', '.join(self.reads)} in its code: a condition, if {CONDITION}")
        return "\n".join(lines)


_OTHER_PRODUCTS = (
    "torch's library multiplies here, and may round by the number of rows and their place: test "
    "and train inside dpkern.ops.backends.cpu.use_own_products(True), whose products are proved"
)
"""The remedy where products are the library's."""


def batch_invariance(
    module: nn.Module,
    plan: Plan,
    inputs: Sequence[Any],
    targets: Any,
    loss: Loss,
    *,
    reduction: str,
    rows: int,
    keep_budget: int | float | None,
) -> BatchInvariance:
    """Run the test on a copy of ``module``; nothing of the original changes.

    If it fails and there are expressions of parameters, or releases of coordinates, it runs once
    more with the products of these made one sample at a time.

    Args:
        module: as it is trained.
        plan: one whose integer sums the engine makes (``exact_sums.sums_in_place``).
        inputs: arguments of the module, samples in the first dimension of every tensor.
        targets: what the loss takes besides the outputs, samples first.
        loss: function of outputs and targets.
        reduction: ``mean`` or ``sum``, as the loss treats samples.
        rows: the largest physical batch.
        keep_budget: that of the capture, by which gradients are kept or not.

    Raises:
        InvalidInput: inputs and targets without rows, or with different numbers of them.
        UnsupportedModule: outputs that padding cannot be taken from.
    """
    trial = Trial(module, plan, inputs, targets, loss, reduction, keep_budget)
    found = _test(trial, rows)
    if found.word == "not invariant" and trial.makes_products:
        trial.capture.samples_apart = True
        apart = _test(trial, rows)
        found = found if apart.word == "not invariant" else replace(apart, samples_apart=True)
    return found


def _test(trial: Trial, rows: int) -> BatchInvariance:
    records = trial.records
    most = max(2 * MULTIPLE, -(-rows // MULTIPLE) * MULTIPLE)
    passes, losses = _Agreement(), _Agreement()
    with torch.random.fork_rng(devices=[]):
        trial.run(TrialBatch.of(MULTIPLE, 0, 0, records))  # probes, and loads what is loaded late
        for batch in TrialBatch.all(most, records):
            passes.add(batch, trial.run(batch))
        outputs = trial.outputs()
        for size in range(1, min(most, MOST_LOSSES) + 1):
            batch = TrialBatch.of(size, size % 2, 0, records)
            losses.add(batch, trial.run_loss(outputs, batch))
        few = [TrialBatch.of(size, 1, 0, records) for size in (MULTIPLE, most)]
        logs = [[trial.logged(batch) for batch in (*few, *passes.failed)]]
        if losses.failed:
            few = [TrialBatch.of(MULTIPLE, 0, 0, records), *losses.failed]
            logs.append([trial.logged_loss(outputs, batch) for batch in few])
    uses = (*passes.differing, *losses.differing)
    return BatchInvariance(
        operations=_verdicts(logs, failed=bool(uses)),
        uses=uses,
        rows=most,
        threads=torch.get_num_threads(),
        pattern=trial.pattern,
        reads=tuple(sorted(trial.reads)),
    )


def test_engine(
    capture: Capture,
    step: DPStep,
    loader: PrivateLoader | None,
    inputs: Sequence[Any],
    targets: Any,
    loss: Loss,
) -> BatchInvariance:
    """Run the test for an engine, and let its certificates say what it found.

    Raises:
        InvalidInput: what the test is not made for; nothing has been changed.
    """
    refused = _why_not(capture, step)
    if refused:
        raise InvalidInput(
            "loss",
            expected="an engine whose exact sums are made in place, to test batch invariance",
            got=refused,
            remedy="Pass arithmetic='exact' to make_private, with releases of gradients or of "
            "whitened coordinates.",
        )
    found = batch_invariance(
        capture.module,
        step.plan,
        inputs,
        targets,
        loss,
        reduction=capture.loss_reduction,
        rows=max(sample_count(inputs, targets), _largest(loader)),
        keep_budget=capture.budget.limit,
    )
    capture.use_counts.follow_records |= bool(found.reads)
    passed = found.word != "not invariant"
    step.ledger.state_invariance(passed, found.remarks)
    _stop_watching(capture)
    if passed:

        def leave(reason: str) -> None:
            _stop_watching(capture)
            step.ledger.state_invariance(False, (f"{_LEFT}: {reason}",))

        capture.row_padding = RowPadding(capture)
        capture.tested = StaysAsTested(
            capture, found.pattern, rows=found.rows, threads=found.threads, leave=leave
        )
        capture.on_use = capture.tested.note
        capture.samples_apart = found.samples_apart
    return found


def _stop_watching(capture: Capture) -> None:
    """Let batches be as they come again, and nothing compare steps with a test."""
    capture.row_padding = capture.tested = capture.on_use = None
    capture.padded, capture.is_padded, capture.samples_apart = 0, False, False


_LEFT = "batch invariance was tested for other steps than those that were taken"


def _why_not(capture: Capture, step: DPStep) -> str:
    """Return the reason why the engine's gradients are not tested; empty if they are."""
    checks = (
        (step.plan.arithmetic != "exact", f"arithmetic={step.plan.arithmetic!r}"),
        (any(not p.is_cpu for p in capture.parameters), "parameters that are not on a CPU"),
        (not sums_in_place(step.plan, capture.slots), "gradients that are written out"),
        (capture.any_rank is not None, "several processes"),
        (
            capture.budget.in_bytes,
            "keep_budget in bytes",
        ),
        (capture.captured or step.unfinished, "samples of an open step"),
    )
    return next((reason for refused, reason in checks if refused), "")


def _largest(loader: PrivateLoader | None) -> int:
    """Return the largest physical batch that the loader may yield."""
    if loader is None:
        return 0
    if loader.max_physical_batch_size is not None:
        return loader.max_physical_batch_size * loader.views
    if loader.sampling == "poisson":
        raise InvalidInput(
            "max_physical_batch_size",
            expected="a number: Poisson batches have no largest size that could be tested",
            got=None,
            remedy="Pass max_physical_batch_size to make_private.",
        )
    return round(loader.expected_batch_size) * loader.views


class _Agreement:
    """Whether the copies of each reference agree, in several passes.

    Attributes:
        differing: names of what they do not agree in.
        failed: the first batch in which they do not, if there is one.
    """

    def __init__(self) -> None:
        self.differing: dict[str, None] = {}
        self.failed: list[TrialBatch] = []
        self._known: dict[str, dict[int, int]] = {}

    def add(self, batch: TrialBatch, found: Sequence[tuple[str, Tensor]]) -> None:
        """Compare the rows of one more pass."""
        for name, seen in found:
            if not batch.agreed(seen, self._known.setdefault(name, {})):
                self.differing[name] = None
                self.failed = self.failed or [batch]


def _verdicts(logs: Sequence[Sequence[Logged]], failed: bool) -> tuple[OperationVerdict, ...]:
    """One verdict for each kind of operation in passes of several sizes, those that failed first.

    Args:
        logs: of one code, each over batches of several sizes.
        failed: whether captured bits differ; otherwise no operation made a difference.
    """
    words: dict[str, Word] = {}
    for log in logs:
        batches = [batch for batch, _ in log]
        common, others = _aligned([operations for _, operations in log])
        words.update(dict.fromkeys(others, "tested"))  # nothing can be compared
        for each in common:
            name = each[0].name
            read = _agree(batches, [operation.read for operation in each])
            made = _agree(batches, [operation.made for operation in each])
            if made is None:
                continue  # nothing that belongs to records one by one
            ours = all(operation.ours for operation in each)
            word: Word = "proved" if ours and name in PROVED else "tested"
            if failed and read is not False and not made:
                word = "not invariant"
            words[name] = min(words.get(name, "proved"), word, key=_ORDER.index)
    ordered = sorted(words.items(), key=lambda item: _ORDER.index(item[1]))
    return tuple(OperationVerdict(name, word) for name, word in ordered)


def _aligned(
    logs: Sequence[Sequence[LoggedOperation]],
) -> tuple[list[list[LoggedOperation]], set[str]]:
    """Return the operations that all passes have, in their order, and the names of all others.

    Other sizes may take other operations.
    """
    first = [operation.name for operation in logs[0]]
    columns = [[each] for each in logs[0]]
    for log in logs[1:]:
        names = [operation.name for operation in log]
        for block in SequenceMatcher(None, first, names, autojunk=False).get_matching_blocks():
            for i in range(block.size):
                columns[block.a + i].append(log[block.b + i])
    common = [column for column in columns if len(column) == len(logs)]
    taken = {id(operation) for column in common for operation in column}
    others = {each.name for log in logs for each in log if id(each) not in taken}
    return common, others


_ORDER: tuple[Word, ...] = ("not invariant", "tested", "proved")


def _agree(batches: Sequence[TrialBatch], seen: Sequence[Sequence[Seen]]) -> bool | None:
    """Whether copies agree in all tensors that have as many rows of each record in all passes.

    None if there is no such tensor.
    """
    found = None
    for each in zip(*seen, strict=False):
        sums = [numbers for _, numbers in each if numbers is not None]
        if len({count for count, _ in each}) > 1 or len(sums) < len(each):
            continue  # a weight, or positions, whose number happens to be a multiple of the rows
        known: dict[int, int] = {}
        pairs = zip(batches, sums, strict=True)
        found = found is not False and all(b.agreed(numbers, known) for b, numbers in pairs)
    return found
