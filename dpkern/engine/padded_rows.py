"""Pad physical batches to multiples of 16 rows, and watch that steps stay what was tested.

How a library rounds goes by the shapes of a batch. Rows of zeros fill it up on the way into the
module and are cut off its outputs, so that no loss sees them: their gradient is zero, and they add
nothing to a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..base.dispatch import availability
from ..base.errors import UnsupportedModule
from ..ops import direct
from .provenance.leaves import nodes_of
from .replaced_rows import mapped, tensors_of
from .uses import CapturedOp

if TYPE_CHECKING:
    from .capture import Capture
    from .program.facts import UseFacts

MULTIPLE = 16
"""Physical batches have a multiple of so many rows; below it libraries round by position."""

_ALIAS = "AliasBackward0"
"""A node of tensors that are followed, which computes nothing."""


class RowPadding:
    """Fills up the batches of one module.

    Args:
        capture: of the module.
    """

    def __init__(self, capture: Capture) -> None:
        self.capture = capture

    def enter(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments, filled up where each tensor has one row for each sample.

        Other inputs stay as they are, and nothing is said of their bits.
        """
        capture = self.capture
        capture.padded, capture.is_padded = 0, False
        sizes = {int(t.shape[0]) if t.dim() else 0 for t in tensors_of((args, kwargs))}
        records = self._records() if capture.handed_out else max(sizes, default=0)
        if not records or sizes != {records}:
            return args, kwargs
        if not all(isinstance(v, Tensor) for v in (*args, *kwargs.values()) if _holds_tensors(v)):
            return args, kwargs
        capture.padded, capture.is_padded = -records % MULTIPLE, True
        if capture.handed_out:
            capture.batch = records + capture.padded
        if not capture.padded:
            return args, kwargs
        filled: tuple[Any, Any] = mapped((args, kwargs), self._filled)
        return filled

    def _records(self) -> int:
        """Records of the current batch that this pass holds."""
        boundary = self.capture.boundary
        if boundary is None:
            return self.capture.records
        return boundary.entered_records or 0

    def _filled(self, tensor: Tensor) -> Tensor:
        return torch.cat([tensor, tensor.new_zeros(self.capture.padded, *tensor.shape[1:])])

    def leave(self, output: Any) -> Any:
        """Return the module's output without the rows that filled it up.

        Raises:
            UnsupportedModule: outputs that have other than rows of samples.
        """
        return mapped(output, self._cut) if self.capture.padded else output

    def _cut(self, tensor: Tensor) -> Tensor:
        capture = self.capture
        rows = capture.batch or 0
        if not tensor.dim() or not rows or tensor.shape[0] % rows:
            raise UnsupportedModule(
                type(capture.module).__name__,
                expected="outputs with rows for each sample, since batches are padded",
                got=f"an output of shape {list(tensor.shape)} for {rows} rows",
                remedy="Return from forward() what the loss needs, samples first, and compute the "
                "loss outside.",
            )
        return tensor[: tensor.shape[0] // rows * capture.records]


def _holds_tensors(value: Any) -> bool:
    return next(tensors_of(value), None) is not None


@dataclass
class UsePattern:
    """The uses of parameters in one step, the operations behind them and of its loss, and modes."""

    uses: list[tuple[Any, ...]] = field(default_factory=list)
    loss: tuple[str, ...] = ()

    modes: tuple[bool, ...] = ()

    def note(self, use: CapturedOp, x: Tensor) -> None:
        """Take note of one use, and of the operations behind its operand and its parameters."""
        cast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
        behind = [target.source.operations for target in use.targets if target is not None]
        operations = tuple(name for names in behind for name in names)
        kinds = _names(use.kinds)
        rows = use.in_rows(x)
        self.uses.append((use.site, tuple(x.shape[1:]), x.dtype, rows, cast, kinds, operations))

    def note_replayed(self, use: UseFacts) -> None:
        """Take note of a use that a program replays: never under autocast, of no expression."""
        kinds = _names(use.kinds)
        self.uses.append((use.key, use.tail, use.dtype, use.in_rows, False, kinds, ()))


def _names(kinds: Iterable[type[Any]]) -> tuple[str, ...]:
    return tuple(kind.__name__ for kind in kinds if kind.__name__ != _ALIAS)


def modes_of(module: nn.Module) -> tuple[bool, ...]:
    """Return the training mode of each part of a module, in their order."""
    return tuple(part.training for part in module.modules())


def loss_pattern(loss: Tensor, outputs: Collection[Any]) -> tuple[str, ...]:
    """Names of the graph's nodes between a loss and the module's outputs, sorted."""
    nodes = (node for node in nodes_of(loss.grad_fn, outputs) if node not in outputs)
    return tuple(sorted(name for name in (node.name() for node in nodes) if name != _ALIAS))


def _products() -> Mapping[torch.dtype, int]:
    """Return which matrix products are dpkern's now."""
    return direct.own_products() if availability("cpu")[0] else {}


class StaysAsTested:
    """Watches that the steps of a run are those that a test of batch invariance was about.

    Args:
        capture: of the module that is trained.
        pattern: of the test's passes.
        rows: the largest physical batch of the test.
        threads: of torch, during the test.
        leave: called once, with the reason, at the first step that is another.
    """

    def __init__(
        self,
        capture: Capture,
        pattern: UsePattern,
        *,
        rows: int,
        threads: int,
        leave: Callable[[str], None],
    ) -> None:
        self.capture, self.pattern = capture, pattern
        self.rows, self.threads = rows, threads
        self._products = _products()
        self._leave: Callable[[str], None] | None = leave
        self._seen, self._batch_id = UsePattern(), -1

    def note(self, use: CapturedOp, x: Tensor) -> None:
        """Take note of a use of a parameter."""
        if use.batch_id != self._batch_id:
            self.begin(use.batch_id)
        self._seen.note(use, x)

    def begin(self, batch_id: int) -> None:
        """Take note that the passes of other samples begin."""
        self._seen, self._batch_id = UsePattern(), batch_id

    def note_replayed(self, uses: Iterable[UseFacts]) -> None:
        """Take note of all uses of a pass that a program replays."""
        self._seen.uses = []
        for use in uses:
            self._seen.note_replayed(use)

    def note_loss(self, loss: Tensor, outputs: Collection[Any]) -> None:
        """Take note of a loss that goes backward."""
        self._seen.loss += loss_pattern(loss, outputs)

    def close(self) -> None:
        """Take note that the current samples are clipped now."""
        reason = self._reason()
        if reason and self._leave is not None:
            leave, self._leave = self._leave, None
            leave(reason)

    def _reason(self) -> str:
        capture = self.capture
        if not capture.is_padded:
            return "inputs that could not be padded"
        if capture.arrived_from != self._batch_id:
            return "several passes in one step"
        if capture.arrived_batch > self.rows:
            return "a larger physical batch"
        if torch.get_num_threads() != self.threads:
            return f"{torch.get_num_threads()} threads"
        if _products() != self._products:
            return "other matrix products (use_own_products)"
        if modes_of(capture.module) != self.pattern.modes:
            return "other modes of training and evaluation"
        if self._seen.uses != self.pattern.uses:
            return "other uses of parameters, or other shapes or operations behind them"
        if self._seen.loss != self.pattern.loss:
            return "another loss"
        return ""
