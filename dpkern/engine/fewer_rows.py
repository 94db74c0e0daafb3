"""Check that a sample's output does not depend on the number of other samples.

Replacing samples keeps their number, and so cannot expose a module that reads the size of its
batch. The module therefore also runs on the first four samples of the batch, of which two are NaN:
the other two must come out as in the whole batch, up to the rounding of kernels that are blocked by
size. Where they do not, further passes tell what changes them, the size or NaN: on four samples, on
two of these, and on four with two NaN. Modules that draw random numbers draw others for another
size, and are not compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..base.errors import UnsupportedModule
from .random_state import RandomState
from .replaced_rows import differing, fresh, mapped, tensors_of

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Tolerances relative to the largest output; 16-bit outputs have a tolerance of 0.1."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def check_fewer_rows(
    module: nn.Module,
    call: Callable[[Arguments], Any],
    arguments: Arguments,
    batch: int,
    draws: RandomState,
    whole: Any = None,
) -> UnsupportedModule | None:
    """Compare the module's outputs on few samples of the batch.

    Args:
        module: the module that the error names.
        call: runs the module from the same state each time, and puts that state back.
        arguments: a batch, samples first.
        batch: number of samples.
        draws: the random state that ``call`` begins with.
        whole: the module's output on the batch; None if it is not known.

    Returns:
        The error; None if the outputs agree or cannot be compared.
    """
    more, fewer = min(4, batch), min(4, batch) // 2
    if fewer == 0:
        return None
    if whole is not None and batch > more:
        both = _outputs(call, _without_numbers(first_rows(arguments, batch, more), more))
        if both is not None and draws.changed():
            return None
        if both is not None and _all_comparable(whole, both, batch, more, fewer):
            return None
    large = _outputs(call, first_rows(arguments, batch, more))
    if large is None or draws.changed():
        return None
    small = _outputs(call, first_rows(arguments, batch, fewer))
    if not _all_agree(large, small, more, fewer):
        return _found(module, "in a batch of another size", _NO_SIZES)
    broken = _outputs(call, _without_numbers(first_rows(arguments, batch, more), more))
    if broken is not None and differing(large, broken, more, range(more // 2)):
        return _found(module, "beside samples that are not finite", _NO_NANS)
    return None


_NO_SIZES = "Do not scale by the number of samples in the forward pass."
_NO_NANS = "Treat each sample by itself; samples that are not finite are dropped by the clipping."


def _found(module: nn.Module, where: str, remedy: str) -> UnsupportedModule:
    return UnsupportedModule(
        type(module).__name__,
        expected="outputs of one sample that depend on that sample alone",
        got=f"other outputs {where}",
        remedy=remedy,
    )


def _without_numbers(tree: Any, batch: int) -> Any:
    """Return the tree with NaN in the second half of every floating tensor's samples."""

    def change(tensor: Tensor) -> Tensor:
        if tensor.dim() and tensor.shape[0] % batch == 0 and tensor.is_floating_point():
            tensor = tensor.detach().clone().requires_grad_(tensor.requires_grad)
            tensor.data[tensor.shape[0] // 2 :] = float("nan")
        return tensor

    return mapped(tree, change)


def _all_agree(large: Any, small: Any, more: int, fewer: int) -> bool:
    """Whether floating outputs of the samples that both passes have are the same."""
    if small is None:
        return True
    one, two = ([t for t in tensors_of(x) if t.is_floating_point()] for x in (large, small))
    return len(one) != len(two) or all(
        _agree(a, b, more, fewer) for a, b in zip(one, two, strict=True) if a.dim()
    )


def _all_comparable(whole: Any, both: Any, batch: int, more: int, fewer: int) -> bool:
    """Whether all tensors can be compared, and agree in the first samples.

    Args:
        whole, both: outputs on the batch, and on ``more`` samples of which ``fewer`` are numbers.
    """
    one, two = list(tensors_of(whole)), list(tensors_of(both))
    for a, b in zip(one, two, strict=False):
        if not (a.dim() and b.dim() and a.shape[0] and a.is_floating_point()):
            return False
        each = a.shape[0] // batch
        if a.shape[0] != each * batch or b.shape[0] != each * more or a.shape[1:] != b.shape[1:]:
            return False
        b = b[: each * fewer]
        if a.dtype is not b.dtype or not _agree(a[: each * more], b, more, fewer):
            return False
        if bool(b.isnan().any()):
            return False  # the further passes tell whether it comes from the others
    return bool(one) and len(one) == len(two)


def first_rows(tree: Any, batch: int, count: int) -> Any:
    """Return the tree with the rows of the first ``count`` samples only."""

    def take(tensor: Tensor) -> Tensor:
        if not tensor.dim() or not tensor.shape[0] or tensor.shape[0] % batch:
            return tensor
        return tensor[: tensor.shape[0] // batch * count]

    return fresh(mapped(tree, take))  # a pass may write into its inputs


def _outputs(call: Callable[[Arguments], Any], arguments: Arguments) -> Any:
    """Return the output of a pass; None if the module does not run on so few samples."""
    try:
        return mapped(call(arguments), Tensor.detach)
    except Exception:  # noqa: BLE001 - the real pass has another size
        return None


def _agree(one: Tensor, two: Tensor, more: int, fewer: int) -> bool:
    rows = one.shape[0] * fewer // more
    if one.shape[0] % more or two.shape[0] != rows or one.shape[1:] != two.shape[1:]:
        return True
    a, b = one[:rows].double().nan_to_num(), two.double().nan_to_num()
    scale = float(a.abs().max()) if a.numel() else 0.0
    off = float((a - b).abs().max()) if a.numel() else 0.0
    return off <= _TOLERANCE.get(one.dtype, 0.1) * scale
