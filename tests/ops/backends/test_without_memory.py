"""Tensors without memory, and modes that make them: each call is one process, which may crash."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator

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
_FORKS = """
import json
import os
import sys
import traceback
from tempfile import TemporaryFile
import torch._dynamo  # modes import it when they are first entered
for line in sys.stdin:
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        child = os.fork()
        if not child:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            failed = True
            try:
                exec(json.loads(line))
                failed = False
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(failed)  # clearing up what was imported takes a second
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(json.dumps([code, *(file.seek(0) or file.read() for file in (out, err))]), flush=True)
"""
Print = Callable[[str], str]


@pytest.fixture(scope="module")
def printed() -> Iterator[Print]:
    """What a new process prints, in which warnings are no errors.

    Each is the child of one that has imported and called nothing: an import takes seconds.
    """
    command = [sys.executable, "-W", "ignore", "-c", _START + _FORKS]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        to, back = parent.stdin, parent.stdout

        def run(source: str) -> str:
            print(json.dumps(source), file=to, flush=True)
            code, out, err = json.loads(back.readline())
            assert code == 0, (code, err[-2000:])
            return out.strip()

        yield run


@pytest.mark.parametrize(
    "mode", ['torch.set_default_device("meta")', 'torch.device("meta").__enter__()']
)
def test_the_first_call_may_be_under_another_default_device(mode: str, printed: Print) -> None:
    out = printed(
        f"""
stream = Key.from_unsafe_seed(1).stream(Purpose.NOISE, 1)
{mode}
for backend in (None, "reference"):
    draws = noise.lattice_draws(stream, position=0, count=5, backend=backend)
    print(ghost.linear_norm(a, g, backend=backend).round().tolist(), draws.device)
print(_direct.connect(_extension.compiled()))
"""
    )
    assert out.splitlines() == [*["[90.0, 90.0, 90.0, 90.0] cpu"] * 2, "True"]


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
def test_tensors_without_memory_are_refused(made: str, printed: Print) -> None:
    assert printed(f"{made}\n{_CALLED}").split() == ["True"] * 9


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
def test_modes_whose_tensors_have_no_memory_are_refused(mode: str, printed: Print) -> None:
    """Nothing of the mode is kept: the next call outside runs."""
    out = printed(
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
    assert out.splitlines() == ["True", "True", "[90.0, 90.0, 90.0, 90.0] True"]


def test_a_storage_shorter_than_its_tensor_is_refused(printed: Print) -> None:
    out = printed(
        """
from dpkern.base import validate
try:
    a.untyped_storage().resize_(16)
    validate.tensor(a=a)
except InvalidInput as error:
    print(error)
"""
    )
    assert "too short" in out
