"""Opacus' functional module, for loops that compute per-sample gradients themselves."""

from __future__ import annotations

from typing import Any, NoReturn

from ....base.errors import InvalidInput


def make_functional(*_: Any, **__: Any) -> NoReturn:
    """Refuse ``grad_sample_mode="no_op"``: parameters carry no ``grad_sample`` here.

    Raises:
        InvalidInput: always.
    """
    raise InvalidInput(
        "make_functional",
        expected="an ordinary backward pass of the batch's loss",
        got="per-sample gradients of the loop's own, for p.grad_sample",
        remedy="Call loss.backward(); dpkern captures per-sample gradients in it. For gradients of "
        "your own pass them to dpkern.DPStep(...).add(per_sample=...).",
    )


__all__ = ["make_functional"]
