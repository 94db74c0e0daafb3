"""Projections on the CPU: onto a ball or a simplex compiled kernels, onto a box torch's clamp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...base.signature import Float, Positive, written
from .. import _project as op
from ._extension import on_cpu
from ._native import compiled


@compiled
def project_ball(params: Sequence[Float[Tensor, "*S", written]], radius: Positive) -> None:
    """Scale ``x`` by ``min(1, radius / ||x||)``, in place; inside, nothing is written."""


@compiled
def project_simplex(params: Sequence[Float[Tensor, "*S", written]], total: Positive) -> None:
    """Write ``max(x - t, 0)`` with the t for which they add to ``total``, in place."""


def _refuse(params: Sequence[Tensor], onto: op.Projection) -> str | None:
    if any(param.dtype is not params[0].dtype for param in params):
        return "takes parameters of one dtype"
    if not all(param.is_contiguous() for param in params):
        return "takes contiguous parameters"
    return on_cpu(params[0])


def _project(params: Sequence[Tensor], onto: op.Projection) -> None:
    if isinstance(onto, op.Ball):
        project_ball(params, onto.radius)
    elif isinstance(onto, op.Simplex):
        project_simplex(params, onto.total)
    else:
        op.move(params, onto)


KERNELS: tuple[tuple[str, Any, Any], ...] = (("update.project", _project, _refuse),)
"""``(op, run, refuse)``."""
