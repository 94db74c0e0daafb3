"""What a run uses of the machine: a backend and threads; neither changes a distribution."""

from __future__ import annotations

import platform
from typing import Any

import torch

from .. import __version__, _dispatch
from ..backends import cpu
from ..errors import BackendError

TRAINING_OPS = ("clip.clip_sum", "update.step")


def backend_in_use(wanted: str | None) -> str:
    """The backend that training steps run on.

    Raises:
        InvalidInput: an unknown name.
        BackendError: the one asked for cannot run here.
    """
    wanted = wanted or _dispatch.environment_choice()
    if wanted is None:
        order = _dispatch.PREFERENCE["cpu"]
        return next(name for name in order if not _missing(name))
    with _dispatch.use(wanted):  # refuses unknown names
        reasons = _missing(wanted)
    if reasons:
        raise BackendError(
            "backend",
            expected="a backend that can run on this machine",
            got=f"{wanted}: {reasons[0]}",
            remedy="See `dpkern info`, or leave --backend out.",
        )
    return wanted


def _missing(backend: str) -> list[str]:
    """Why this backend cannot run training steps; empty if it can."""
    rows = [row for row in _dispatch.table() if row["backend"] == backend]
    return [row["reason"] for row in rows if row["op"] in TRAINING_OPS and not row["available"]]


def environment(backend: str | None, threads: int) -> dict[str, Any]:
    """What a report says of the machine; the instruction set where kernels were chosen."""
    facts: dict[str, Any] = {
        "dpkern": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if backend is not None:
        facts["isa"] = cpu.build_config().get("isa") if backend == "cpu" else None
    return facts | {"threads": threads}
