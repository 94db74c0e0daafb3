"""Two revisions in processes that take turns: verdicts, their conditions, and a real slowdown."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpkern.base.errors import InvalidInput
from dpkern.bench import compare, revision, suite
from dpkern.bench.guard import QuietVerdict
from dpkern.bench.paired import FASTER, SAME, SLOWER, UNCLEAR, Rounds
from dpkern.bench.revision import SOURCE, Revision
from dpkern.bench.server import Server
from dpkern.bench.worker import variables


def _quiet(*flags: str) -> QuietVerdict:
    return QuietVerdict(
        wall=1.0, cpu_over_wall=1.0, waited=0.0, others=0.0, steal=0.0, switches=0.0, flags=flags
    )


def _part(factor: float, *flags: str, seed: int = 0, spread: float = 0.01) -> dict[str, Any]:
    """Samples of a pair of processes in which the new revision takes so much longer."""
    draw = np.random.default_rng(seed)
    old, new = (list(1e-3 * np.exp(spread * draw.standard_normal(60))) for _ in range(2))
    rounds = Rounds({"old": old, "new": [factor * s for s in new]})
    return {"rounds": rounds, "quiet": _quiet(*flags)}


@pytest.mark.parametrize(
    ("factors", "verdict"),
    [
        ((1.0, 1.0, 1.0), SAME),
        ((1.06, 1.05, 1.07), SLOWER),
        ((0.93, 0.95, 0.94), FASTER),
        ((1.2, 1.2, 1.0), UNCLEAR),
        ((1.0, 1.3, 1.3), UNCLEAR),
    ],
)
def test_a_verdict_needs_every_pair_of_processes(factors: Sequence[float], verdict: str) -> None:
    parts = [_part(factor, seed=i) for i, factor in enumerate(factors)]
    assert compare.judged(parts)["verdict"] == verdict


def test_a_busy_machine_decides_nothing() -> None:
    found = compare.judged([_part(1.2), _part(1.2, "others")])
    assert (found["verdict"], found["flags"]) == (UNCLEAR, ["others"])
    assert found["ratio"] == pytest.approx(1.2, rel=0.02)


def test_a_disturbed_pair_is_left_out_if_most_were_not() -> None:
    found = compare.judged([_part(1.2, seed=1), _part(1.2, seed=2), _part(1.0, "others")])
    assert (found["verdict"], found["flags"]) == (SLOWER, [])
    assert len(found["guards"]) == 3
    assert len(found["pairs"]) == 2


def test_a_new_revision_that_is_wrong_fails() -> None:
    wrong, refused = ({why: "it"} for why in ("wrong", "refused"))
    assert compare.is_wrong(compare.judged([{"failed": {"new": wrong}}]))
    assert not compare.is_wrong(compare.judged([{"failed": {"new": refused}}]))
    assert not compare.is_wrong(compare.judged([{"failed": {"old": wrong}}]))
    assert not compare.is_wrong(compare.judged([_part(1.2)]))


def test_a_side_without_the_case_is_named() -> None:
    row = {"op": "a.b", "case": "tiny", "backend": "cpu"}
    found = row | compare.judged([{"failed": {"old": {"wrong": "KeyError: 'a.b'"}}}])
    assert found["verdict"] == UNCLEAR
    assert "old wrong: KeyError" in list(compare.lines([found]))[-1]


@pytest.fixture(scope="module")
def slowed(tmp_path_factory: pytest.TempPathFactory) -> Revision:
    """A copy of the package whose reference of ``clip_factors`` takes a square root too often."""
    folder = tmp_path_factory.mktemp("revision")
    ignored = shutil.ignore_patterns("__pycache__", "papers", "train", "audit", "engine")
    shutil.copytree(SOURCE / "dpkern", folder / "dpkern", ignore=ignored)
    for name in ("papers", "train", "audit", "engine"):
        (folder / "dpkern" / name).symlink_to(SOURCE / "dpkern" / name)
    path = folder / "dpkern" / "ops" / "ghost" / "explicit.py"
    text, line = path.read_text(), "    norms = torch.stack(list(squares)).sum(0).sqrt() * scale\n"
    assert line in text
    path.write_text(text.replace(line, line + "    [norms.sqrt() for _ in range(40)]\n"))
    return Revision("slowed", None, folder)


@pytest.mark.evidence
def test_a_planted_slowdown_is_found_and_the_same_code_never_is(
    slowed: Revision, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What else runs here while tests do would make every verdict unclear.
    names = ("idle", "waited", "others", "steal", "switches")
    monkeypatch.setattr(compare, "LIMITS", compare.QuietLimits(**dict.fromkeys(names, 1e9)))
    here = revision.ready(revision.HERE)
    plan = suite.BenchPlan(
        ops=("ghost.clip_factors",), backends=("reference",), sizes=("typical",), quick=True
    )
    (row,) = compare.compared(here, slowed, plan, pairs=1)
    assert row["verdict"] == SLOWER
    assert row["ratio"] > 1.5
    (row,) = compare.compared(here, here, plan, pairs=1)
    assert row["verdict"] in (SAME, UNCLEAR)
    assert 0.6 < row["ratio"] < 1.6


def test_both_sides_run_the_cases_of_today_with_their_own_ops(slowed: Revision) -> None:
    with Server(slowed.folder, 1, variables()) as server:
        case = {"op": "ghost.clip_factors", "case": "typical", "dtype": "float32"}
        assert server.ask(prepare={**case, "backend": "reference"})["burst"] >= 1
        assert server.ask(sample=3) > 0
        found = server.ask(prepare={**case, "op": "ghost.none", "backend": "reference"})
        assert "KeyError" in found["wrong"]
        assert server.ask(counters=True)["cpu"] > 0


def test_two_comparisons_at_once_build_a_revision_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []

    def unpack(commit: str, source: Path, folder: Path) -> None:
        built.append(commit)
        folder.mkdir(parents=True, exist_ok=True)
        time.sleep(0.2)

    monkeypatch.setattr(revision, "git", lambda *_: "c0ffee")
    monkeypatch.setattr(revision, "_unpack", unpack)
    monkeypatch.setattr(revision, "_compile", lambda *_: None)
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda _: revision.ready("main", tmp_path), range(3)))
    assert built == ["c0ffee"]
    assert len(set(found)) == 1
    (tmp_path / "build/bench/c0ffee" / revision.BUILT).unlink()  # as where a build broke off
    revision.ready("main", tmp_path)
    assert len(built) == 2


def test_revisions_that_are_none_are_refused(tmp_path: Path) -> None:
    if (SOURCE / ".git").exists():
        with pytest.raises(InvalidInput, match="expected a commit"):
            revision.ready("no-such-revision")
    with pytest.raises(InvalidInput, match="run from its repository"):
        revision.ready("HEAD", tmp_path)
