"""Take CuPy arrays in place of tensors: the same memory, handed over by DLPack.

Ops take CuPy arrays themselves; ``call`` does it for any other function that takes tensors. Work
joins CuPy's current stream, as it does for CuPy's own functions.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from .errors import BackendError, InvalidInput

_CPU = 1
_PER_THREAD_STREAM = 2
"""CuPy's address of the stream that every thread has for itself."""


def has_arrays(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an argument is a CuPy array, or a list that begins with one."""
    array = _array_type()
    for values in (args, kwargs.values()):
        for value in values:
            if type(value) is list or type(value) is tuple:
                value = value[0] if value else None
            if isinstance(value, array):
                return True
    return False


def call(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` with tensors for CuPy arrays, and return CuPy arrays for its results.

    Args:
        function: takes tensors, such as ``rule.init``.
        args, kwargs: arrays may stand in lists, tuples, dicts and dataclasses (``update.State``).
            Nothing is copied: what the function changes in place is changed in the arrays.

    Returns:
        The result. A tensor that was one of the arrays becomes that array, any other on their
        device a new one; without arrays among the arguments nothing is converted.

    Raises:
        BackendError: torch has no CUDA, or CuPy uses a stream per thread.
        InvalidInput: an array that no tensor can share memory with.
    """
    arrays: list[Any] = []

    def note(array: Any) -> Any:
        arrays.append(array)
        return array

    _each((args, kwargs), _array_type(), note)
    if not arrays:
        return function(*args, **kwargs)
    with _stream(arrays[0]):
        crossing = _Crossing()
        args, kwargs = crossing.inward((args, kwargs))
        return crossing.outward(function(*args, **kwargs))


class _Crossing:
    """The arrays and their tensors during one call."""

    def __init__(self) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        self.arrays: dict[int, Any] = {}
        self.copies: list[tuple[Any, Any]] = []

    def inward(self, value: Any) -> Any:
        return _each(value, _array_type(), self._tensor, self.copies)

    def outward(self, value: Any) -> Any:
        for given, copy in self.copies:  # the step count of a State
            for field in dataclasses.fields(given):
                new = getattr(copy, field.name)
                if isinstance(new, int) and new != getattr(given, field.name):
                    setattr(given, field.name, new)
        return _each(value, torch.Tensor, self._array)

    def _tensor(self, array: Any) -> torch.Tensor:
        tensor = self.tensors.get(id(array))
        if tensor is None:
            tensor = self.tensors[id(array)] = _shared(array)
            self.arrays[id(tensor)] = array
        return tensor

    def _array(self, tensor: torch.Tensor) -> Any:
        array = self.arrays.get(id(tensor))
        if array is not None:
            return array
        device = next(iter(self.tensors.values())).device
        if tensor.device != device:
            return tensor
        return sys.modules["cupy"].from_dlpack(tensor.detach())


def _array_type() -> Any:
    """Return CuPy's array type, or None before CuPy was imported."""
    return getattr(sys.modules.get("cupy"), "ndarray", ())


def _each(
    value: Any, kind: Any, change: Callable[[Any], Any], copies: list[tuple[Any, Any]] | None = None
) -> Any:
    """Return the value with ``change`` applied to every ``kind`` in it, or the value itself.

    Args:
        value: ``kind``, or lists, tuples, dicts and dataclasses of them, or anything else.
        kind: the type.
        change: what becomes of each.
        copies: receives each dataclass that was replaced, with its copy.
    """
    if isinstance(value, kind):
        return change(value)
    if type(value) in (list, tuple):
        new = [_each(item, kind, change, copies) for item in value]
        return value if all(map(is_, new, value)) else type(value)(new)
    if type(value) is dict:
        new = [_each(item, kind, change, copies) for item in value.values()]
        same = all(map(is_, new, value.values()))
        return value if same else dict(zip(value, new, strict=True))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        before = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        after = _each(before, kind, change, copies)
        if after is before:
            return value
        copy = dataclasses.replace(value, **after)
        if copies is not None:
            copies.append((value, copy))
        return copy
    return value


def _shared(array: Any) -> torch.Tensor:
    """Return a tensor in the array's memory.

    Raises:
        InvalidInput: torch cannot have one.
    """
    # from_dlpack ends the process at these.
    if any(stride < 0 for stride in array.strides):
        raise InvalidInput(
            "CuPy array",
            expected="strides of at least 0",
            got=f"strides {array.strides}",
            remedy="Call cupy.ascontiguousarray first.",
        )
    try:
        return from_dlpack(array)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidInput(
            "CuPy array",
            expected="memory and dtype that torch can share",
            got=f"dtype {array.dtype} ({str(error).splitlines()[0]})",
            remedy="Convert the array with .astype, and allocate it in ordinary device memory.",
        ) from error


@contextmanager
def _stream(array: Any) -> Iterator[None]:
    """Make CuPy's current stream on the array's device torch's as well.

    Tensors made inside belong to that stream: their memory is reused in its order. Where
    torch had another one, either waits for what the other was given before.

    Raises:
        BackendError: torch cannot use it.
    """
    kind, index = array.__dlpack_device__()
    if kind == _CPU:
        yield
        return
    if torch.version.cuda is None:
        raise BackendError(
            "CuPy arrays",
            expected="a CUDA build of torch",
            got=torch.__version__,
            remedy="Install torch for CUDA: its tensors share the arrays' memory.",
        )
    device = torch.device("cuda", index)
    pointer = sys.modules["cupy"].cuda.get_current_stream(index).ptr
    if pointer == _PER_THREAD_STREAM:
        raise BackendError(
            "CuPy's current stream",
            expected="the default stream, or one that was made",
            got="the stream per thread, which torch does not know",
            remedy="Unset CUPY_CUDA_PER_THREAD_DEFAULT_STREAM, or use a cupy.cuda.Stream.",
        )
    before = torch.cuda.current_stream(device)
    if before.cuda_stream == pointer:
        with torch.cuda.device(device):
            yield
        return
    stream = torch.cuda.ExternalStream(pointer, device=device)  # type: ignore[no-untyped-call]
    stream.wait_stream(before)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        before.wait_stream(stream)


__all__ = ["call", "has_arrays"]
