"""Select the backend that runs an audited release: on its device here, or emulated on the CPU."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from ...base import dispatch
from ...base.validate import choice
from ...ops import testing


def check_backend(backend: str | None) -> None:
    """Check that ``backend`` is a backend's name, or None.

    Raises:
        InvalidInput: no such backend.
    """
    choice((None, *dispatch.BACKENDS), backend=backend)


def running(backend: str | None) -> AbstractContextManager[None]:
    """Run backends of absent devices emulated inside the block, others as they are.

    Args:
        backend: a name of ``dpkern info``; None leaves the choice to dpkern.

    Raises:
        BackendError: one that can neither run nor be emulated here.
    """
    if backend is None or dispatch.availability(backend)[0]:
        return nullcontext()
    return testing.emulated(backend)


def named(backend: str | None) -> str:
    """Return the backend's name for reports, and whether it is emulated."""
    if backend is None:
        return "default backend"
    return backend if dispatch.availability(backend)[0] else f"{backend} emulated"


def here(*, emulated: bool = True) -> list[str]:
    """Return the backends that an audit can run on this machine.

    Args:
        emulated: whether to include backends that only an emulation can run.
    """
    found = []
    for name in dispatch.BACKENDS:
        available = dispatch.availability(name)[0]
        if available or (emulated and not isinstance(testing.emulation(name), str)):
            found.append(name)
    return found
