"""Count what torch's own operations move and compute, while they run.

Bytes are those of every operation's operands, each read or written once (views move nothing).
Floating-point operations are those of products and convolutions, by torch's own formulas
(``torch.utils.flop_counter``); what is done element by element adds none. The work inside an op of
dpkern is left out: the op declares it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from .trace import StepTracer, divided

_REPLACING = ("copy_", "fill_", "zero_")
_FRESH = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


@dataclass
class Moved:
    """Bytes and floating-point operations."""

    bytes: int = 0
    flops: int = 0


class Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A counter of torch's operations by phase and layer of a trace.

    Args:
        trace: trace that knows the phase and layer that run.
    """

    def __init__(self, trace: StepTracer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = trace
        self.moved: dict[tuple[str, str], Moved] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        out = func(*args, **named)
        if not self.trace.inside_op:
            phase, shares = self.trace.top
            formula = flop_registry.get(func._overloadpacket)
            flops = 0 if formula is None else int(formula(*args, **named, out_val=out))
            for field, total in (("bytes", bytes_of(func, args, named, out)), ("flops", flops)):
                for layer, part in divided(total, shares).items():
                    moved = self.moved.setdefault((phase, layer), Moved())
                    setattr(moved, field, getattr(moved, field) + part)
        return out


def bytes_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Return the bytes that an operation reads and writes if each operand is touched once."""
    name = func._overloadpacket.__name__
    aliases = [r.alias_info for r in func._schema.returns]
    if name in _FRESH or any(a is not None and not a.is_write for a in aliases):
        return 0
    given = list(zip(func._schema.arguments, args, strict=False))
    given += [(a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs]
    read, written = {}, {_key(t): _size(t) for t in _tensors(out)}
    for argument, value in given:
        changed = argument.alias_info is not None and argument.alias_info.is_write
        for tensor in _tensors(value):
            if changed:
                written[_key(tensor)] = _size(tensor)
            if not (changed and name in _REPLACING):
                read[_key(tensor)] = _size(tensor)
    return sum(read.values()) + sum(written.values())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _key(tensor: Tensor) -> tuple[Any, ...]:
    # Tensors without data have no pointer: the storage tells them apart.
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape


def _size(tensor: Tensor) -> int:
    """Return the bytes of a tensor; expanded elements count once."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())
