"""The compiled CPU kernels of projections: a ball's and a simplex's; a box is torch's clamp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version

from .. import _project as op
from . import cpu as _cpu  # used when called: cpu imports this module to register it

Tensors = Sequence[torch.Tensor]


def _refuse(params: Tensors, onto: op.Projection, **_: Any) -> str | None:
    if any(param.dtype is not params[0].dtype for param in params):
        return "takes parameters of one dtype"
    if not all(param.is_contiguous() for param in params):
        return "takes contiguous parameters"
    return _cpu._on_cpu(params[0])


def _project(params: Tensors, onto: op.Projection, *, backend: str | None = None) -> None:
    if isinstance(onto, op.Box):
        op.move(params, onto)
        return
    name, number = ("ball", onto.radius) if isinstance(onto, op.Ball) else ("simplex", onto.total)
    kind = "float64" if params[0].dtype is torch.float64 else "float32"
    run = getattr(_cpu._C, f"project_{name}_{kind}")
    run([p.data_ptr() for p in params], [p.numel() for p in params], number, _cpu._threads())
    increment_version(list(params))


KERNELS: tuple[tuple[str, Any, Any], ...] = (("update.project", _project, _refuse),)
"""``(op, run, refuse)``."""
