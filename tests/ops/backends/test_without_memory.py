"""Tensors without memory, and modes that make them: each call is one process, which may crash."""

from __future__ import annotations

import subprocess
import sys

import pytest

_START = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from dpkern.base.errors import InvalidInput
from dpkern.base.rng import Key, Purpose
from dpkern.ops import clip, ghost, noise
from dpkern.ops.backends import _direct, _extension
a, g = torch.ones(4, 3, 5, device="cpu"), torch.ones(4, 3, 2, device="cpu")
"""


def _printed(source: str) -> str:
    """Return what a new process prints, in which warnings are no errors."""
    command = [sys.executable, "-W", "ignore", "-c", _START + source]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@pytest.mark.parametrize(
    "mode", ['torch.set_default_device("meta")', 'torch.device("meta").__enter__()']
)
def test_the_first_call_may_be_under_another_default_device(mode: str) -> None:
    printed = _printed(
        f"""
stream = Key.from_unsafe_seed(1).stream(Purpose.NOISE, 1)
{mode}
for backend in (None, "reference"):
    draws = noise.lattice_draws(stream, position=0, count=5, backend=backend)
    print(ghost.linear_norm(a, g, backend=backend).round().tolist(), draws.device)
print(_direct.connect(_extension.compiled()))
"""
    )
    assert printed.splitlines() == [*["[90.0, 90.0, 90.0, 90.0] cpu"] * 2, "True"]
