"""All argument checks in one place; the name in the message is the keyword at the call.

``positive(max_grad_norm=x)`` returns ``x`` or raises ``InvalidInput`` naming ``max_grad_norm``.
Tensors are checked in the order type, layout, shape, dtype, device, contiguity.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from .errors import InvalidInput, MissingDependency, brief
from .memory import has_memory

_REMEDY_NUMBER = "Pass a finite Python number."


def that(ok: bool, name: str, expected: str, got: object, remedy: str) -> None:
    """Raise ``InvalidInput`` for ``name`` unless ``ok``."""
    if not ok:
        raise InvalidInput(name, expected=expected, got=got, remedy=remedy)


def _number(
    kind: str, accepted: Callable[[float], bool], values: dict[str, Any], remedy: str
) -> float:
    ((name, value),) = values.items()
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not _finite(value) or not accepted(value):
        raise InvalidInput(name, expected=kind, got=value, remedy=remedy)
    return float(value)


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond the range of floats
        return False


def positive(remedy: str = _REMEDY_NUMBER, **value: Any) -> float:
    """Check that a value is a finite number > 0, and return it as a float."""
    return _number("a finite number > 0", lambda x: x > 0, value, remedy)


def positive_at(name: str, got: Any) -> float:
    """Check as ``positive`` does, for a name that is no keyword, such as ``unit[3]``."""
    return _number("a finite number > 0", lambda x: x > 0, {name: got}, _REMEDY_NUMBER)


def non_negative(remedy: str = _REMEDY_NUMBER, **value: Any) -> float:
    """Check that a value is a finite number >= 0, and return it as a float."""
    return _number("a finite number >= 0", lambda x: x >= 0, value, remedy)


def probability(remedy: str = _REMEDY_NUMBER, **value: Any) -> float:
    """Check that a value is a number in (0, 1], and return it as a float."""
    return _number("a number in (0, 1]", lambda x: 0 < x <= 1, value, remedy)


def open_unit(remedy: str = _REMEDY_NUMBER, **value: Any) -> float:
    """Check that a value is a number in (0, 1), such as delta, and return it as a float."""
    return _number("a number in (0, 1)", lambda x: 0 < x < 1, value, remedy)


def half_open_unit(remedy: str = _REMEDY_NUMBER, **value: Any) -> float:
    """Check that a value is a number in [0, 1), such as a decay rate, and return it as a float."""
    return _number("a number in [0, 1)", lambda x: 0 <= x < 1, value, remedy)


def integer(minimum: int = 0, maximum: int | None = None, **value: Any) -> int:
    """Check that a value is an int in [minimum, maximum], and return it."""
    ((name, got),) = value.items()
    in_range = (
        isinstance(got, int)
        and not isinstance(got, bool)
        and got >= minimum
        and (maximum is None or got <= maximum)
    )
    if not in_range:
        upper = "" if maximum is None else f" and <= {maximum}"
        raise InvalidInput(
            name,
            expected=f"an int >= {minimum}{upper}",
            got=got,
            remedy="Pass a Python int in that range.",
        )
    return int(got)


def choice(options: Collection[Any], **value: Any) -> Any:
    """Check that a value is one of ``options``, and return that option.

    Types must agree: 2.0 and True are not the ints 2 and 1.
    """
    ((name, got),) = value.items()
    for option in options:
        if type(got) is type(option) and got == option:
            return got
    listed = ", ".join(repr(o) for o in options)
    raise InvalidInput(name, expected=f"one of {listed}", got=got, remedy="Choose one of these.")


def tensor(
    *,
    shape: Sequence[int | None] | None = None,
    dtypes: Collection[torch.dtype] | None = None,
    device: torch.device | None = None,
    contiguous: bool = False,
    **value: Any,
) -> torch.Tensor:
    """Check that a value is a tensor of this shape, dtype and device, and return it.

    None in the shape allows any extent.
    """
    ((name, got),) = value.items()
    return tensor_at(name, got, shape=shape, dtypes=dtypes, device=device, contiguous=contiguous)


def tensor_at(
    name: str,
    got: Any,
    *,
    shape: Sequence[int | None] | None = None,
    dtypes: Collection[torch.dtype] | None = None,
    device: torch.device | None = None,
    contiguous: bool = False,
    fake: bool = False,
) -> torch.Tensor:
    """Check as ``tensor`` does, for a name that is no keyword, such as ``params[3]``.

    A fake tensor may lack memory.
    """
    if not isinstance(got, torch.Tensor):
        raise InvalidInput(
            name, expected="a torch.Tensor", got=type(got).__name__, remedy="Pass a tensor."
        )
    if got.layout is not torch.strided or got.is_meta:
        raise InvalidInput(
            name,
            expected="a dense tensor with data",
            got="a meta tensor" if got.is_meta else f"layout {got.layout}",
            remedy="Call .to_dense(), or put the tensor on a device with .to(device).",
        )
    if not holds_its_numbers(got):
        raise InvalidInput(
            name,
            expected="a tensor whose memory holds its numbers",
            got="a view that negates another tensor" if got.is_neg() else "zeros without memory",
            remedy="Call .resolve_neg(), or .clone(), first.",
        )
    if not fake and not has_memory(got):
        raise InvalidInput(
            name,
            expected="a tensor whose memory holds its numbers",
            got=f"a {type(got).__name__} whose storage is missing or too short",
            remedy="Pass the tensor that it stands for (DTensor.to_local(), a parameter that FSDP "
            "has gathered), or call the op in torch.ops.dpkern.",
        )
    if shape is not None and got.shape != shape:
        same = got.dim() == len(shape) and all(
            want is None or want == have for want, have in zip(shape, got.shape, strict=True)
        )
        if not same:
            wanted = "[" + ", ".join("*" if s is None else str(s) for s in shape) + "]"
            raise InvalidInput(
                name,
                expected=f"shape {wanted}",
                got=str(list(got.shape)),
                remedy="Reshape the tensor.",
            )
    if dtypes is not None and got.dtype not in dtypes:
        listed = ", ".join(str(d) for d in dtypes)
        raise InvalidInput(
            name,
            expected=f"dtype {listed}",
            got=str(got.dtype),
            remedy="Convert the tensor with .to(dtype).",
        )
    if device is not None and got.device != device:
        raise InvalidInput(
            name,
            expected=f"a tensor on {device}",
            got=str(got.device),
            remedy="Move the tensors of one call to the same device.",
        )
    if contiguous and not got.is_contiguous():
        raise InvalidInput(
            name,
            expected="a contiguous tensor",
            got=f"strides {got.stride()}",
            remedy="Call .contiguous() first.",
        )
    return got


def holds_its_numbers(tensor: torch.Tensor) -> bool:
    """Whether kernels find a tensor's numbers in its memory.

    torch may only note that they are to be negated (the imaginary part of a conjugate), or that all
    are zero (some derivatives).
    """
    return not (tensor.is_neg() or (tensor._is_zerotensor() and tensor.numel() > 0))


def same_kind(saved: object, mine: torch.Tensor) -> bool:
    """Whether ``mine.copy_(saved)`` keeps every value: a tensor of its shape, dtype and layout."""
    return (
        isinstance(saved, torch.Tensor)
        and saved.shape == mine.shape
        and saved.dtype is mine.dtype
        and saved.layout is mine.layout
        and (mine.is_meta or not saved.is_meta)
    )


_LEAVES = {str, int, float, bool, type(None)}
_MAX_DEPTH = 50
_MAX_VALUES = 10_000_000


def plain_values(name: str, got: object, *, tensors: Collection[str] = ()) -> None:
    """Refuse a saved state that holds anything but plain values, or more than can be looked at.

    After this check comparisons, loops and messages are safe: no foreign ``__eq__`` or ``__repr__``
    runs, and what a list repeats was counted as often as it stands there.

    Args:
        name: of the state, for the message.
        got: dicts with strings as keys, lists and tuples of ``str, int, float, bool, None``.
        tensors: keys below which tensors may stand too.

    Raises:
        InvalidInput: another type, more than 50 levels or 10^7 values.
    """
    sizes: dict[tuple[int, bool], int] = {}

    def refuse(what: str) -> InvalidInput:
        return InvalidInput(
            name,
            expected="plain values, as state_dict() returns them",
            got=what,
            remedy="Pass what state_dict() returned.",
        )

    def size(value: object, depth: int, with_tensors: bool) -> int:
        kind = type(value)
        if kind in _LEAVES or (with_tensors and isinstance(value, torch.Tensor)):
            return 1
        if kind not in (dict, OrderedDict, list, tuple):
            raise refuse(f"a {kind.__name__} in it")
        if depth == _MAX_DEPTH:
            raise refuse(f"more than {_MAX_DEPTH} levels")
        seen = id(value), with_tensors
        if seen not in sizes:
            if isinstance(value, dict):
                foreign = [key for key in value if type(key) is not str]
                if foreign:
                    raise refuse(f"the key {brief(foreign[0])}")
                parts = [(part, with_tensors or key in tensors) for key, part in value.items()]
            else:
                items: Sequence[object] = value  # type: ignore[assignment]
                parts = [(part, with_tensors) for part in items]
            sizes[seen] = 1 + sum(size(part, depth + 1, may) for part, may in parts)
        return sizes[seen]

    if size(got, 0, False) > _MAX_VALUES:
        raise refuse(f"more than {_MAX_VALUES} values")


def plain_copy(value: Any) -> Any:
    """Return the value with built-in types for NumPy's floats and other subclasses of theirs."""
    if isinstance(value, Mapping):
        return {key: plain_copy(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(plain_copy(part) for part in value)
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value


def one_each(name: str, got: Sequence[object], count: int) -> None:
    """Check that there is one entry for each parameter."""
    if len(got) != count:
        raise InvalidInput(
            name,
            expected=f"{count} entries, one per parameter",
            got=str(len(got)),
            remedy="Give exactly one for each parameter.",
        )


def hold(condition: torch.Tensor, error: Callable[[], InvalidInput]) -> None:
    """Raise unless the condition (a 0-d bool) holds.

    On a device the host does not wait: the check runs there, and a failure stops the program with
    CUDA's device-side assertion at its next transfer.
    """
    if not condition.is_cpu:
        torch._assert_async(condition)
    elif not bool(condition):
        raise error()


Seen = Callable[[Any, Any, Any, bool], bool]


def _never(*_: Any) -> bool:
    return False


_seen: Seen = _never


def see_by(seen: Seen) -> None:
    """Let another function see at one look whether tensors on the CPU are ``alike``.

    It takes tensors, shapes, dtypes and whether they are contiguous; where it answers False, Python
    looks again.
    """
    global _seen
    _seen = seen


def alike(
    tensors: Collection[Any],
    *,
    dtypes: Collection[torch.dtype],
    device: torch.device,
    shapes: Collection[Sequence[int] | None] | None = None,
    contiguous: bool = False,
) -> bool:
    """Whether ``tensor_at`` would let all of these pass: one look at each, no message."""
    if device.type == "cpu" and _seen(tensors, shapes, dtypes, contiguous):
        return True
    return (shapes is None or [getattr(t, "shape", None) for t in tensors] == list(shapes)) and all(
        isinstance(t, torch.Tensor)
        and t.dtype in dtypes
        and t.device == device
        and t.layout is torch.strided
        and not t.is_meta
        and holds_its_numbers(t)
        and has_memory(t)
        and (not contiguous or t.is_contiguous())
        for t in tensors
    )


_DISTRIBUTIONS = {"flint": "python-flint", "sklearn": "scikit-learn"}
"""Packages that are installed under another name than they are imported by."""


def require(package: str) -> ModuleType:
    """Import a package on first use, or say what to install.

    Raises:
        MissingDependency: it is not installed.
    """
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        name = package.split(".")[0]
        raise MissingDependency(
            package,
            expected="an installed package",
            got=str(error),
            remedy=f"Install it with: pip install {_DISTRIBUTIONS.get(name, name)}",
        ) from error
