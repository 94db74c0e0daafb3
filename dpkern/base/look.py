"""Look at a call's arguments one after the other, and name the first that does not fit.

This is the slow way, for calls that ``bind_source`` could not let pass at one look.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import validate
from .dtypes import DTYPES, sum_dtype
from .errors import InvalidInput
from .memory import is_dense, is_matrix
from .place import check_place
from .ranges import RANGES, has_range
from .signature import (
    LEADING,
    ChoiceParameter,
    DeviceParameter,
    DtypeParameter,
    NumberParameter,
    Parameter,
    TensorParameter,
    is_bound,
)


class Look:
    """The state of one call's checks: what is bound, and what is wrong with the next argument.

    Args:
        fake: whether tensors may lack memory.
    """

    def __init__(self, *, fake: bool) -> None:
        self.fake = fake
        self.sizes: dict[str, Any] = {}
        self.lists: dict[str, str] = {}
        self.kind: torch.dtype | None = None
        self.device: torch.device | None = None

    def at(self, parameter: Parameter, value: Any) -> None:
        if isinstance(parameter, TensorParameter):
            if value is not None or not parameter.optional:
                self._tensors(parameter, value)
        elif isinstance(parameter, DeviceParameter):
            self.device = check_place(value)
        elif isinstance(parameter, DtypeParameter):
            self.kind = validate.choice(DTYPES[parameter.group], **{parameter.name: value})
        elif isinstance(parameter, ChoiceParameter):
            validate.choice(parameter.options, **{parameter.name: value})
        elif isinstance(parameter, NumberParameter) and has_range(parameter):
            if value is not None or not parameter.optional:
                RANGES[parameter.rule].check(**{parameter.name: value})
            if parameter.rule == "Count":
                self.sizes[parameter.name] = value

    def _tensors(self, parameter: TensorParameter, value: Any) -> None:
        if not parameter.many:
            self._tensor(parameter, parameter.name, value, None)
            return
        if not isinstance(value, (list, tuple)) or (
            not value and "any_number" not in parameter.marks
        ):
            raise _no_list(parameter, value)
        spread = next((dim for dim in parameter.dims if dim.startswith("*")), None)
        known = None if spread is None else self.sizes.get(spread)
        if known and "repeated" in parameter.marks:
            known = [*known] * (len(value) // len(known))
        if known is not None and len(known) != len(value):
            raise InvalidInput(
                parameter.name,
                expected=f"{len(known)} tensors, one for each of {self.lists[str(spread)]}",
                got=str(len(value)),
                remedy="Give every gradient its own sum.",
            )
        shapes = []
        for i, item in enumerate(value):
            each = None if known is None else known[i]
            shapes.append(self._tensor(parameter, f"{parameter.name}[{i}]", item, each))
        if spread is not None:
            self.sizes.setdefault(spread, shapes)
            self.lists.setdefault(spread, parameter.name)

    def _tensor(
        self, parameter: TensorParameter, name: str, value: Any, spread: Any
    ) -> torch.Size | None:
        """Check one tensor, and return what ``*S`` stands for in it."""
        tensor = validate.tensor_at(
            name,
            value,
            shape=self._wanted(parameter, value, spread),
            dtypes=self._dtypes(parameter.group),
            device=self.device,
            contiguous=parameter.layout == "contiguous",
            fake=self.fake,
        )
        if parameter.layout == "dense" and not is_dense(tensor):
            raise _not_dense(name, tensor)
        if parameter.layout == "transposable" and not is_matrix(tensor):
            raise InvalidInput(
                name,
                expected="a contiguous matrix or the transpose of one",
                got=f"strides {tensor.stride()}",
                remedy="Call .contiguous() first.",
            )
        self.device = tensor.device
        if parameter.group in LEADING and self.kind is None:
            self.kind = tensor.dtype
        return self._bind(parameter, name, tensor)

    def _wanted(
        self, parameter: TensorParameter, value: Any, spread: Any
    ) -> tuple[int | None, ...] | None:
        """Return the shape in the message. None leaves the check to ``_bind``."""
        wanted: list[int | None] = []
        for dim in parameter.dims:
            if dim == "...":
                return None
            known = spread if dim.startswith("*") and parameter.many else self.sizes.get(dim)
            if dim.startswith("*"):
                if known is None:
                    return None
                wanted.extend(known)
            else:
                wanted.append(int(dim) if dim.isdecimal() else known)
        return tuple(wanted)

    def _dtypes(self, group: str) -> tuple[torch.dtype, ...]:
        if self.kind is None or group not in (*LEADING, "Sum"):
            return DTYPES[group]
        return (sum_dtype(self.kind) if group == "Sum" else self.kind,)

    def _bind(
        self, parameter: TensorParameter, name: str, tensor: torch.Tensor
    ) -> torch.Size | None:
        dims, shape = parameter.dims, tensor.shape
        fixed = [dim for dim in dims if dim != "..." and not dim.startswith("*")]
        rest = len(dims) > len(fixed)
        fits = len(shape) >= len(fixed) if rest else len(shape) == len(fixed)
        if fits:
            for dim, size in zip(fixed, shape, strict=False):
                if is_bound(dim):
                    fits = fits and self.sizes.setdefault(dim, size) == size
                elif dim != "_":
                    fits = fits and size == int(dim)
        if not fits:
            raise _not_shaped(name, dims, self.sizes, tensor)
        if dims and dims[-1].startswith("*"):
            shape = shape[len(fixed) :]
            if not parameter.many:
                self.sizes.setdefault(dims[-1], shape)
            return shape
        return None


def _no_list(parameter: TensorParameter, value: Any) -> InvalidInput:
    is_list = isinstance(value, (list, tuple))
    if parameter.alone:
        return InvalidInput(
            parameter.name,
            expected="a tensor [B, ...] or a non-empty list of them",
            got="an empty list" if is_list else type(value).__name__,
            remedy="Pass per-sample gradients, the batch first.",
        )
    some = "any_number" not in parameter.marks
    return InvalidInput(
        parameter.name,
        expected="a list of at least one tensor" if some else "a list of tensors",
        got="none" if is_list else type(value).__name__,
        remedy="Wrap a single tensor in a list.",
    )


def _not_shaped(
    name: str, dims: Sequence[str], sizes: dict[str, Any], tensor: torch.Tensor
) -> InvalidInput:
    known = ", ".join("..." if d[0] in "*." else str(sizes.get(d, d)) for d in dims)
    return InvalidInput(
        name, expected=f"shape [{known}]", got=str(list(tensor.shape)), remedy="Reshape the tensor."
    )


def _not_dense(name: str, tensor: torch.Tensor) -> InvalidInput:
    return InvalidInput(
        name,
        expected="[B, ...] without gaps, the samples outermost, one B for all",
        got=f"shape {list(tensor.shape)} with strides {tensor.stride()}",
        remedy="Call .contiguous() first.",
    )


__all__ = ["Look"]
