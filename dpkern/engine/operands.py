"""Refuse tensors that are written to between the norm of a gradient and its sum.

Norms are taken when gradients arrive, sums when the samples are closed, both from the same tensors:
an edit in between would leave a sample with more than the bound. torch counts the writes to each
tensor, those through its views included. It does not count writes through ``.data`` or NumPy.
"""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor

from ..base.errors import PrivacyError
from .parameter import without_torch_function
from .per_sample_gradients import PerSampleGradients


def versions_of(record: PerSampleGradients) -> tuple[int, ...]:
    """Return how often each tensor of the record has been written to."""
    versions: list[int] = []
    with without_torch_function():
        _add_versions(record, versions)
    return tuple(versions)


def _add_versions(record: PerSampleGradients, versions: list[int]) -> None:
    for value in vars(record).values():
        if isinstance(value, Tensor):
            versions.append(value._version)
        elif isinstance(value, PerSampleGradients):
            _add_versions(value, versions)


def refuse_change(use: str) -> NoReturn:
    """Refuse to close samples whose operands have changed.

    Raises:
        PrivacyError: always; nothing has been released.
    """
    raise PrivacyError(
        use,
        expected="its input and output gradient as they were in the backward pass",
        got="one that was changed in place since",
        remedy="Leave activations and gradients alone between backward() and optimizer.step().",
    )
