"""Triton's kernels in its interpreter, as a fixture."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dpkern.ops import testing


@pytest.fixture
def interpreted() -> Iterator[Callable[[str], Any]]:
    """Interpret kernels wherever ``triton`` is asked for; yield what gives a module of theirs.

    Only a process that interprets may import these modules.
    """
    reason = testing.emulation("triton")
    if isinstance(reason, str):
        pytest.skip(f"triton {reason}")
    with testing.emulated("triton"):
        yield lambda name: importlib.import_module(f"dpkern.ops.backends._triton.{name}")
