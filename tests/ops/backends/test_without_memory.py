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


_MADE = {
    "fake, outside its mode": "with FakeTensorMode(): made = torch.ones(4, 3, 5)",
    "fake, inside its mode": "FakeTensorMode().__enter__(); made = torch.ones(4, 3, 5)",
    "a wrapper": "made = TwoTensor(a, a.clone())",
    "freed": "made = a.clone(); made.untyped_storage().resize_(0)",
    "freed, as FSDP's parts": "made = torch.ones(99)[7:67].view(4, 3, 5); "
    "made.untyped_storage().resize_(0)",
}
_CALLED = """
for backend in (None, "cpu", "reference"):
    for call in (
        lambda: ghost.linear_norm(made, g, backend=backend),
        lambda: ghost.contract([torch.ones(2, 4, 3, 5)], torch.ones(2), [made], backend=backend),
        lambda: clip.clip_sum([made], 1.0, backend=backend),
    ):
        try:
            print(call())
        except InvalidInput as error:
            print("memory" in str(error))
"""


@pytest.mark.parametrize("made", _MADE.values(), ids=_MADE)
def test_tensors_without_memory_are_refused(made: str) -> None:
    assert _printed(f"{made}\n{_CALLED}").split() == ["True"] * 9


@pytest.mark.parametrize(
    "mode",
    [
        "with FakeTensorMode(allow_non_fake_inputs=True): call()",
        "with FakeTensorMode(): call()",
        "torch.func.functionalize(lambda _: call())(torch.ones(1))",
        "torch.func.functionalize(lambda made: call(made))(a)",
        "torch.func.vmap(lambda made: call(made))(a[:, None])",
    ],
)
def test_modes_whose_tensors_have_no_memory_are_refused(mode: str) -> None:
    """Nothing of the mode is kept: the next call outside runs."""
    printed = _printed(
        f"""
def call(made=a):
    for backend in (None, "reference"):
        try:
            print(ghost.linear_norm(made, g, backend=backend))
        except InvalidInput as error:
            print("memory" in str(error))
    return made
{mode}
print(ghost.linear_norm(a, g).round().tolist(), _direct.connect(_extension.compiled()))
"""
    )
    assert printed.splitlines() == ["True", "True", "[90.0, 90.0, 90.0, 90.0] True"]


def test_a_storage_shorter_than_its_tensor_is_refused() -> None:
    printed = _printed(
        """
from dpkern.base import validate
try:
    a.untyped_storage().resize_(16)
    validate.tensor(a=a)
except InvalidInput as error:
    print(error)
"""
    )
    assert "too short" in printed
