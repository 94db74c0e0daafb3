"""Backends of devices, emulated or not, for tests on the CPU; order of files; chance; garbage."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Generator
from contextlib import nullcontext
from importlib.util import find_spec

if "torch" not in sys.modules:
    # Read once, when OpenMP is loaded: threads of two workers that spin take each other's cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # NumPy's threads spin, too: the singular values of a 64 x 64 matrix took nine times as long.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import torch

if not torch.cuda.is_available():
    # Read when Triton's kernels are decorated: without a device they run in the interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")
else:
    # Convolutions are compared with references that do not round their operands.
    torch.backends.cudnn.allow_tf32 = False

import pytest
from hypothesis import settings

from dpkern.base import dispatch
from dpkern.base.errors import BackendError
from dpkern.ops import testing
from tests import chance
from tests.longest import LONGEST
from tests.ops.backends import every_backend, quick_interpreter

CHANCE = chance.Chance()
_PATCH = pytest.StashKey[pytest.MonkeyPatch]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option by which no backend is skipped silently on a GPU machine."""
    parser.addoption("--require-backends", default="", help="fail without them: cuda,triton,cupy")


def pytest_configure(config: pytest.Config) -> None:
    """No test starts without the backends that were asked for."""
    for name in filter(None, config.getoption("--require-backends").split(",")):
        available, reason = dispatch.availability(name)
        if not available:
            raise pytest.UsageError(f"--require-backends: {name} {reason}")
    if not chance.FRESH:
        settings.load_profile("the same questions")
        CHANCE.install(config.stash.setdefault(_PATCH, pytest.MonkeyPatch()))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave the process as it was, where pytest was called in one."""
    if _PATCH in config.stash:
        config.stash[_PATCH].undo()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Each test, with its fixtures, has the chance that follows from its name."""
    if not chance.FRESH:
        CHANCE.start(item.nodeid)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave out of garbage collection what lives as long as the session: modules and tests.

    They are millions of objects. Each full collection looked at all of them, which took two
    seconds of whichever test it happened in; ``gc.collect()`` did so in every call. The end of
    the process looks at them again, for libraries that count what they have freed by then.
    """
    atexit.register(gc.unfreeze)
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the longest files first; within a file the order stays."""
    places = {path: place for place, path in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))


@pytest.fixture(scope="session", autouse=True)
def interpreter() -> Generator[None, None, None]:
    """Triton's interpreter, where kernels run in it, does nothing twice."""
    with pytest.MonkeyPatch.context() as patch:
        if find_spec("triton") is not None and not torch.cuda.is_available():
            quick_interpreter.without_repetitions(patch)
        yield


@pytest.fixture(scope="session", autouse=True)
def seeds() -> Generator[None, None, None]:
    """No seeds for devices that are not there: torch keeps each, with the stack of its call."""
    with pytest.MonkeyPatch.context() as patch:
        for device in (torch.cuda, torch.xpu, torch.mtia):
            if not device.is_available():
                patch.setattr(device, "manual_seed_all", lambda seed: None)
        yield


@pytest.fixture(scope="module")
def one_thread() -> Generator[None, None, None]:
    """Run modules of many small operations on one thread: several would wait for each other."""
    with testing.threads(1):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """The backend of the test's parameter, on the CPU if there is no device for it."""
    call = getattr(item, "callspec", None)
    backend = None if call is None else call.params.get("backend")
    with nullcontext() if backend is None else every_backend.running(backend):
        try:
            yield
        except BackendError as error:
            if error.got != "it has no kernel for this op":
                raise
            pytest.skip(f"{error.name}: no kernel")
