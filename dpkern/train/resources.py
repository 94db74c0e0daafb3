"""Choose the backend and threads of a run; neither changes a distribution."""

from __future__ import annotations

import platform
from collections.abc import Collection
from typing import Any

import torch

from ..base import dispatch
from ..base.commit import commit
from ..base.errors import BackendError
from ..base.version import __version__
from ..ops.backends import cpu


def backend_in_use(wanted: str | None, ops: Collection[str]) -> str:
    """Return the backend that training steps run on.

    Args:
        wanted: name of the backend; None selects that of the environment, else the first that has
            kernels for all of ``ops``.
        ops: names of the ops that a step cannot do without.

    Raises:
        InvalidInput: an unknown name.
        BackendError: the requested backend cannot run here.
    """
    by_option = bool(wanted)
    wanted = wanted or dispatch.environment_choice()
    if wanted is None:
        order = dispatch.PREFERENCE["cpu"]
        return next(name for name in order if not missing(name, ops))
    with dispatch.use(wanted):  # refuses unknown names
        reasons = missing(wanted, ops)
    if reasons:
        raise BackendError(
            "backend",
            expected="a backend that can run on this machine",
            got=f"{wanted}: {reasons[0]}",
            remedy="Choose one that `dpkern info` lists, or "
            + ("leave --backend out." if by_option else "unset DPKERN_BACKEND."),
        )
    return wanted


def missing(backend: str, ops: Collection[str]) -> list[str]:
    """Return why this backend cannot run some of these ops; the list is empty if it can."""
    rows = [row for row in dispatch.table() if row["backend"] == backend]
    return [row["reason"] for row in rows if row["op"] in ops and not row["available"]]


def environment(backend: str | None, threads: int) -> dict[str, Any]:
    """Describe the machine for a report; the instruction set is given if kernels were chosen."""
    facts: dict[str, Any] = {
        "dpkern": __version__,
        "commit": commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if backend is not None:
        facts["isa"] = cpu.build_config().get("isa") if backend == "cpu" else None
    return facts | {"threads": threads}
