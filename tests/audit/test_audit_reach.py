"""Audits of a name, or of a script's statement: the checks that they reach.

No false alarm here is likelier than 1e-6: checks of batches are sure to 1 - 1e-9, a shuffled loader
is only held to exact facts.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dpkern.audit.auditing import run
from dpkern.audit.claims import ApproximateDP, Claim, GaussianDP, NoClaim
from dpkern.audit.findings import Check
from dpkern.audit.subject import Pair, Subject
from dpkern.audit.subjects import batches, catalogue
from dpkern.audit.subjects.script import load
from dpkern.audit.subjects.step import PrivateStep
from dpkern.base import dispatch
from dpkern.base.errors import InvalidInput
from dpkern.engine.sampling import FixedSizeSampler

STEPS = [
    (name, mode)
    for name in catalogue.names()
    for mode in ("corrected", "published")
    if isinstance(catalogue.make(name, mode=mode), PrivateStep)
]


def asked(subject: Subject, *, quick: bool) -> dict[str, Check]:
    return {check.name: check for check in subject.checks(quick=quick) if check.layer == "plan"}


@pytest.mark.parametrize(("name", "mode"), STEPS)
def test_every_mechanism_is_asked_about_its_plan(name: str, mode: str) -> None:
    found = asked(catalogue.make(name, mode=mode), quick=True)
    assert {"every coordinate protected", "noise places", "noise multiplier"} <= found.keys()
    assert not [check for check in found.values() if check.passed is False]


@pytest.mark.parametrize(("name", "law"), [("dpsgd", "batch sizes"), ("projected_sgd", "size")])
def test_the_sampler_of_a_mechanism_is_asked_about(name: str, law: str) -> None:
    found = asked(catalogue.make(name), quick=False)
    assert found[f"sampler: {law}"].passed
    assert not [check for check in found.values() if check.passed is False]


def test_a_sampler_of_another_law_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fixed(*, dataset_size: int, sample_rate: float, steps: int) -> FixedSizeSampler:
        made = FixedSizeSampler(
            dataset_size=dataset_size, batch_size=round(sample_rate * dataset_size), steps=steps
        )
        made.sampling = "poisson"  # type: ignore[misc]
        return made

    monkeypatch.setattr(batches, "PoissonSampler", fixed)
    found = asked(catalogue.make("dpsgd"), quick=False)
    assert found["sampler: batch sizes"].passed is False


class Few(Subject):
    name, usual_runs = "few", 200
    claimed: Claim = GaussianDP(10.0)
    certified: Claim = NoClaim()

    def release(self, data: float, runs: int, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.round((data + torch.randn(runs, 1, generator=generator)) * 64) / 64

    def pairs(self, weakest: torch.Tensor | None) -> list[Pair]:
        return [Pair(name="one", without=0.0, present=1.0)]


def test_a_subject_says_how_many_runs_are_usual() -> None:
    assert run(Few(), seed=1).runs == 200
    assert run(Few(), runs=300, seed=1).runs == 300
    assert catalogue.make("dpsgd").usual_runs < catalogue.make("add_noise").usual_runs


@pytest.mark.parametrize("name", ["peer:torch", "peer:numpy"])
def test_the_noise_of_others_has_names(name: str) -> None:
    found = run(catalogue.make(name), seed=1, layers=("bits",))
    assert found.contradicts_claim
    assert "opacus" in "".join(catalogue.names())


STATEMENT = """
import torch
from torch.utils.data import DataLoader, TensorDataset

from dpkern.accounting import events
from dpkern.audit.plan import Statement

STATEMENT = Statement(
    event=events.gaussian(1.1),
    steps=1000,
    epsilon={epsilon},
    delta=1e-5,
    sampling="{sampling}",
    relation="{relation}",
    sample_rate=0.01,
)


def release(records):
    return torch.zeros(2)
"""
LOADER = "LOADER = DataLoader(TensorDataset(torch.zeros(500)), batch_size=5, shuffle=True)\n"


def stated(folder: Path, text: str, symbol: str = "STATEMENT", **said: object) -> Subject:
    values = {"epsilon": 2.0, "sampling": "poisson", "relation": "add_remove"} | said
    path = folder / "run.py"
    path.write_text(text.format(**values))
    return load(f"{path}:{symbol}")


def test_a_statement_is_compared_with_its_event(tmp_path: Path) -> None:
    found = run(stated(tmp_path, STATEMENT))
    assert found.passed
    assert found.total_runs == 0
    assert found.claimed == ApproximateDP(2.0, 1e-5)
    assert 1 < found.certified.epsilon(1e-5) < 2
    small = run(stated(tmp_path, STATEMENT, epsilon=0.5))
    assert [check.name for check in small.failed] == ["epsilon"]
    assert not small.passed


def test_a_loader_is_compared_with_the_statement(tmp_path: Path) -> None:
    poisson = run(stated(tmp_path, STATEMENT + LOADER))
    assert "sampler: batch sizes" in [check.name for check in poisson.failed]
    said = {"sampling": "shuffled", "relation": "zero_out", "epsilon": 100.0}
    assert run(stated(tmp_path, STATEMENT + LOADER, **said)).passed


def test_a_function_brings_its_statement_along(tmp_path: Path) -> None:
    found = asked(stated(tmp_path, STATEMENT, "release", epsilon=0.5), quick=True)
    assert found["epsilon"].passed is False


def test_what_is_no_statement_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="STATEMENT"):
        stated(tmp_path, "STATEMENT = 3\ndef release(records):\n    return records\n", "release")
    said = {"sampling": "with_replacement", "relation": "replace_one"}
    text = STATEMENT.replace("0.01,", "0.01, dataset_size=500,") + LOADER
    with pytest.raises(InvalidInput, match="LOADER"):
        stated(tmp_path, text, **said)


@pytest.mark.parametrize("name", ["add_noise", "dpsgd", "randomized_response"])
def test_a_report_says_what_is_only_emulated(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "availability", lambda backend: (backend == "cpu", "no device"))
    assert "cuda emulated" in catalogue.make(name, backend="cuda").name
    assert "emulated" not in catalogue.make(name, backend="cpu").name
