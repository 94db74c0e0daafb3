"""Releases of scripts: how they are called, what is caught of them, what is refused.

Seeds are fixed: the noise of these scripts comes from torch's generator.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from dpkern.audit.auditing import run
from dpkern.audit.claims import GaussianDP, NoClaim
from dpkern.audit.findings import Findings
from dpkern.audit.subjects.script import UNBOUNDED, is_script, load
from dpkern.base.errors import InvalidInput

HEAD = """
import math
import torch
from dpkern.audit.claims import GaussianDP, NoClaim
from dpkern.audit.subject import Pair, Subject

DIMENSION = 6
CLAIM = GaussianDP(1.0)


def noise(*shape):
    return torch.round(torch.randn(*shape) * 256) / 256


def clipped(records):
    records = records.nan_to_num(0.0, 0.0, 0.0).double()
    rows = records * (1 / records.norm(dim=1, keepdim=True).clamp(min=1))
    return torch.round(rows * 256) / 256
"""

SOUND = "def release(records, runs):\n    return clipped(records).sum(0) + noise(runs, 6)\n"
ONE = "def release(records):\n    return clipped(records).sum(0) + noise(6)\n"
HALF = "def release(records, runs):\n    return clipped(records).sum(0) + 0.5 * noise(runs, 6)\n"
OPEN = "def release(records, runs):\n    return records.sum(0) + noise(runs, 6)\n"
BOUNDED = (
    "BOUND = 1.0\n"
    "def release(records, runs):\n"
    "    return torch.round(records.double() * 256).sum(0) / 256 + noise(runs, 6)\n"
)
FINE = "BOUND = 1.0\n" + OPEN
LAST = (
    "def release(records, runs):\n"
    "    scale = torch.ones(6)\n"
    "    scale[-1] = 0\n"
    "    return clipped(records).sum(0) + scale * noise(runs, 6)\n"
)
OWN = """
class Own(Subject):
    name, claimed, certified = "own", GaussianDP(2.0), NoClaim()

    def release(self, data, runs, seed):
        generator = torch.Generator().manual_seed(seed)
        return data + torch.randn(runs, 1, generator=generator)

    def pairs(self, weakest):
        return (Pair(name="moved", without=0.0, present=1.0),)


own = Own()
"""


@pytest.fixture
def audited(tmp_path: Path) -> Any:
    def audit(body: str, **options: Any) -> Findings:
        path = tmp_path / "script.py"
        path.write_text(HEAD + body)
        found = run(load(f"{path}:release"), runs=4000, seed=1, **options)
        assert isinstance(found, Findings)
        return found

    return audit


@pytest.mark.parametrize("body", [SOUND, BOUNDED], ids=("clips", "bounded"))
def test_sound_releases_pass(audited: Any, body: str) -> None:
    found = audited(body)
    assert found.passed, found.sentence
    assert found.claimed == GaussianDP(1.0)
    assert 0.75 < found.mu_lower < 1
    assert {e.pair for e in found.evidence} >= {"coordinate", "uniform", "random"}


@pytest.mark.parametrize(
    "body", [HALF, OPEN, LAST, FINE], ids=("noise", "clip", "coordinate", "grid")
)
def test_broken_releases_are_caught(audited: Any, body: str) -> None:
    assert audited(body).contradicts_claim


def test_hostile_records(audited: Any) -> None:
    failed = audited(OPEN, layers=("sensitivity",)).failed
    assert [check.name for check in failed] == ["hostile records"]
    assert audited(SOUND, layers=("sensitivity",)).checks[0].passed
    assert not audited(BOUNDED, layers=("sensitivity",)).checks  # promised away


def test_one_call_for_each_run_gives_what_one_for_all_gives(tmp_path: Path) -> None:
    path = tmp_path / "both.py"
    path.write_text(HEAD + ONE + SOUND.replace("def release", "def all_runs"))
    for name in ("release", "all_runs"):
        subject = load(f"{path}:{name}")
        released = subject.release(subject.null(), 5, 3)
        assert released.shape == (5, 6)
        assert len(released.unique(dim=0)) == 5
        assert torch.equal(released, subject.release(subject.null(), 5, 3))
        assert not torch.equal(released, subject.release(subject.null(), 5, 4))


def test_canaries_have_the_norm_that_is_promised(tmp_path: Path) -> None:
    for name, body, bound in (("a", OPEN, UNBOUNDED), ("b", "BOUND = 0.3\n" + OPEN, 0.3)):
        path = tmp_path / f"{name}.py"
        path.write_text(HEAD + body)
        weakest = torch.arange(6.0)
        pairs = load(str(path)).pairs(weakest)
        assert [pair.name for pair in pairs][-1] == "weakest"
        for pair in pairs:
            assert torch.equal(pair.present[:-1], pair.without)
            assert pair.present.shape == (5, 6)
            norm = float(pair.present[-1].double().norm())
            assert bound * (1 - 1e-6) < norm <= bound * (1 if "BOUND" in body else 1 + 1e-6)


def test_a_subject_of_a_script_and_its_pickle(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(HEAD + OWN)
    subject = load(f"{path}:own")
    assert subject.name == "own"
    assert subject.claimed == GaussianDP(2.0)
    assert isinstance(subject.certified, NoClaim)
    assert subject.noise_sd() is None
    other = pickle.loads(pickle.dumps(subject))
    assert torch.equal(other.release(1.0, 3, 5), subject.release(1.0, 3, 5))
    assert run(subject, runs=1000, seed=1).passed


def test_the_caller_keeps_its_generator(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(HEAD + SOUND)
    subject = load(str(path))
    torch.manual_seed(7)
    expected = torch.randn(1)
    torch.manual_seed(7)
    subject.release(subject.null(), 3, 0)
    assert torch.equal(torch.randn(1), expected)


@pytest.mark.parametrize(
    ("body", "name", "message"),
    [
        (SOUND, "other", "Name one of: .*release"),
        ("release = 3\n", "release", "function of"),
        ("def release():\n    return 1\n", "release", "function of"),
        ("def release(a, b, c):\n    return 1\n", "release", "function of"),
        ("def release(a, *, b):\n    return 1\n", "release", "function of"),
        ("CLAIM = 1.0\n" + SOUND, "release", "claim"),
        ("DIMENSION = 0\n" + SOUND, "release", "dimension"),
        ("BOUND = -1.0\n" + SOUND, "release", "bound"),
    ],
)
def test_refused_scripts(tmp_path: Path, body: str, name: str, message: str) -> None:
    path = tmp_path / "script.py"
    path.write_text(HEAD + body)
    with pytest.raises(InvalidInput, match=message):
        load(f"{path}:{name}")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("1 / 0\n", r"ZeroDivisionError.*script\.py:\d+"),
        ("import sys\nsys.exit(0)\n", "SystemExit: 0"),
        ("def f(:\n", "SyntaxError"),
    ],
    ids=("raises", "exits", "syntax"),
)
def test_files_that_do_not_load_are_refused(tmp_path: Path, body: str, message: str) -> None:
    path = tmp_path / "script.py"
    path.write_text(HEAD + body + SOUND)
    with pytest.raises(InvalidInput, match=message):
        load(f"{path}:release")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("raise ValueError('mine')", "ValueError: mine"),
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("return None", "RuntimeError"),
        ("return torch.zeros(runs, 0)", "some numbers"),
        ("return torch.randn(runs, len(records))", "4 numbers in every release"),
        ("return torch.zeros(runs, 2, dtype=torch.complex64)", "real numbers"),
    ],
    ids=("raises", "exits", "nothing", "empty", "as long as the batch", "complex"),
)
def test_releases_that_do_not_answer_are_refused(audited: Any, line: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        audited(f"def release(records, runs):\n    {line}\n")


def test_refusals_of_other_processes_arrive(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(HEAD + "def release(records, runs):\n    raise ValueError('mine')\n")
    subject = load(f"{path}:release")
    with pytest.raises(InvalidInput, match="ValueError: mine"):
        run(subject, runs=100, workers=2)


def test_large_numbers_are_told_apart(audited: Any) -> None:
    body = (
        "def release(records, runs):\n    return 1e200 * (clipped(records).sum(0) + noise(runs, 6))"
    )
    assert audited(body, layers=("covariance", "canary")).runs == 4000


def test_refused_shapes_and_files(tmp_path: Path) -> None:
    path = tmp_path / "flat.py"
    path.write_text(HEAD + "def release(records, runs):\n    return noise(6)\n")
    subject = load(str(path))
    with pytest.raises(InvalidInput, match=r"\[runs, n\]"):
        subject.release(subject.null(), 3, 0)
    with pytest.raises(InvalidInput, match="Python file"):
        load(f"{tmp_path}/nothing.py:release")
    assert is_script("a/b.py:x")
    assert is_script("b.py")
    assert not is_script("dpsgd")
