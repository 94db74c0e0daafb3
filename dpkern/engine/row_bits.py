"""Compare the bits that operations make of one record in other company.

A pass holds copies of a few records among other rows. ``checksums`` maps each row of a tensor to
one number, so that copies can be compared over positions, batches and batch sizes. ``OperationLog``
takes them of everything that the operations of a pass read and make, the library's and ours.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ..base.dispatch import Op, intercepted
from ..ops import direct
from .replaced_rows import tensors_of

_AS_INTEGERS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}


@lru_cache(maxsize=16)
def _factors(size: int) -> Tensor:
    """Odd factors, always the same."""
    generator = torch.Generator().manual_seed(size)
    return torch.randint(-(2**62), 2**62, (size,), generator=generator) | 1


def checksums(tensor: Tensor, rows: int) -> Tensor | None:
    """One number for the bits of each row, int64 ``[rows]``; None for a tensor without rows.

    Several rows of the first dimension that follow each other count as one. Rows of the same bits
    have the same number; others have it by chance of about 2^-64.
    """
    usual = tensor.layout is torch.strided and not tensor.is_nested and tensor.dim()
    if not usual or not tensor.numel() or tensor.shape[0] % rows or tensor.is_complex():
        return None
    with torch.no_grad():
        flat = tensor.detach().contiguous().reshape(rows, -1)
        whole = flat.view(_AS_INTEGERS[flat.dtype]) if flat.is_floating_point() else flat
        return (whole.long() * _factors(whole.shape[1])).sum(1)


Seen = tuple[int, Tensor | None]
"""Number of rows that each record has in a tensor, and their checksums."""


@dataclass(frozen=True)
class LoggedOperation:
    """An operation of one pass.

    Attributes:
        name: as the library or dpkern calls it.
        ours: whether dpkern's compiled kernel ran.
        read, made: what went in and what came out.
    """

    name: str
    ours: bool
    read: tuple[Seen, ...]
    made: tuple[Seen, ...]


class OperationLog(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Logs every operation of a pass over ``rows`` rows.

    Attributes:
        operations: those that are not views, in their order.
        reads: names of those that let Python see what tensors hold: as a number (``item()``,
            ``bool()``), or as a size (``nonzero()``). What dpkern's own rules ask does not count.
    """

    def __init__(self, rows: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows = rows
        self.operations: list[LoggedOperation] = []
        self.reads: set[str] = set()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Log operations of this block; calls of ops on other threads are logged too."""
        with intercepted(self._own), _Exports(self.reads), self:
            yield

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        read = self._seen((args, kwargs))
        out = func(*args, **(kwargs or {}))
        if _shows_contents(func, args) and not _asked_by_rules():
            self.reads.add(str(func.overloadpacket.__name__))
        if not _moves_nothing(func):
            name = str(func.overloadpacket.__name__)
            self.operations.append(LoggedOperation(name, False, read, self._seen(out)))
        return out

    def _own(self, op: Op[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with _disable_current_modes(), intercepted(None):
            read = self._seen((args, kwargs))
            ours = _runs_compiled(op, args, kwargs)
            out = op(*args, **kwargs)
            # What it writes into its arguments is made by it as well.
            made = (*self._seen(out), *self._seen((args, kwargs)))
        self.operations.append(LoggedOperation(op.name, ours, read, made))
        return out

    def _seen(self, tree: Any) -> tuple[Seen, ...]:
        return tuple(
            (tensor.shape[0] // self.rows if tensor.dim() else 0, checksums(tensor, self.rows))
            for tensor in tensors_of(tree)
        )


class _Exports(TorchFunctionMode):
    """Notes what hands out whole tensors, of which no operation is dispatched."""

    def __init__(self, reads: set[str]) -> None:
        super().__init__()
        self.reads = reads

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _EXPORTS and not _asked_by_rules():
            self.reads.add(str(func.__name__))
        return func(*args, **(kwargs or {}))


_EXPORTS = (Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__)
_SHOWN = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_PACK = torch.ops.aten._pack_padded_sequence.default
"""Makes as many rows as the lengths add up to; torch has not tagged it."""


def _shows_contents(func: Any, args: Sequence[Any]) -> bool:
    """Whether what the tensors hold decides on a number, or on sizes, that Python sees."""
    if func is torch.ops.aten.index.Tensor:  # by integers there are as many rows as those
        return any(t.dtype in (torch.bool, torch.uint8) for t in tensors_of(args[1]))
    return func is _PACK or not _SHOWN.isdisjoint(func.tags)


_RULES = str(Path(__file__).parent)
_TORCH = Path(torch.__file__).parent
_BETWEEN = (__file__, str(_TORCH / "_dynamo"), str(_TORCH / "_compile.py"))
"""Files of what stands between the caller of an operation and ``__torch_dispatch__``."""


def _asked_by_rules() -> bool:
    """Whether dpkern's code has called the operation that is dispatched now."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_RULES)


def _moves_nothing(func: Any) -> bool:
    """Whether the operation only makes a view, or memory whose bits are what was there before."""
    return bool(func.is_view) or "empty" in func.overloadpacket.__name__


def _runs_compiled(op: Op[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if op.backend_of(*args, **kwargs) != "cpu":
        return False
    if op.name != "product.matmul":
        return True
    x, w = (args[i] if len(args) > i else kwargs[name] for i, name in enumerate(("x", "w")))
    return direct.is_own_product(x.dtype, w.numel())
