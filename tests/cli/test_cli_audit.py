"""``dpkern audit``: verdicts, exit codes, what is printed where, what is refused before any work.

Verdicts are random. Scripts draw from torch's generator, seeded by the audit's own random seed: a
sound release fails with the probability 1e-6 that ``--confidence`` leaves, and the broken ones here
are wrong by so much that missing them is far less likely still.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dpkern import cli
from dpkern.audit import running
from dpkern.audit.claims import ApproximateDP, Claim, GaussianDP, PureDP
from dpkern.audit.findings import Findings
from dpkern.audit.subjects import catalogue, script
from dpkern.commands import audit as cli_audit
from tests.audit.audit_samples import BROKEN, SOUND

SCRIPT = """
import torch

from dpkern.audit.claims import GaussianDP

DIMENSION = 6
CLAIM = GaussianDP(1.0)

print("importing")


def _total(records):
    records = records.nan_to_num(0.0, 0.0, 0.0)
    return (records / records.norm(dim=1, keepdim=True).clamp(min=1.0)).sum(0)


def _on_a_grid(values):
    return (values * 64).round() / 64


def release(records, runs):
    return _on_a_grid(_total(records) + torch.randn(runs, 6))


def too_quiet(records, runs):
    return _on_a_grid(_total(records) + torch.randn(runs, 6) / 3)


def float_noise(records, runs):
    return _total(records) + torch.randn(runs, 6)


def lets_nan_pass(records, runs):
    norms = records.norm(dim=1, keepdim=True).clamp(min=1.0)
    return _on_a_grid((records / norms).sum(0) + torch.randn(runs, 6))
"""
SURE = ("--confidence", "0.999999", "--runs", "2000")


@pytest.fixture(autouse=True)
def _in_a_folder_with_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(SCRIPT)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["audit", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code, out, _ = run(capsys, *arguments, "--json")
    assert out.count("\n") == 1
    found = json.loads(out, parse_constant=pytest.fail)
    assert isinstance(found, dict)
    return code, found


@pytest.mark.parametrize(
    ("name", "options", "code", "verdict"),
    [
        ("release", (), 0, "Nothing contradicts mu 1"),
        ("release", ("--claim-mu", "0.3"), 1, "The claim of mine.py:release is contradicted"),
        ("release", ("--claim", "5", "--delta", "1e-5"), 0, "Nothing contradicts (5, 1e-05)"),
        ("too_quiet", (), 1, "The claim of mine.py:too_quiet is contradicted"),
        ("too_quiet", ("--claim", "0.5", "--delta", "0"), 1, "epsilon 0.5 is claimed"),
        ("lets_nan_pass", (), 1, "hostile records"),
    ],
)
def test_verdicts_and_exit_codes(
    capsys: pytest.CaptureFixture[str],
    name: str,
    options: tuple[str, ...],
    code: int,
    verdict: str,
) -> None:
    found_code, facts = run_json(capsys, f"mine.py:{name}", *SURE, *options)
    assert verdict in facts["verdict"]
    assert found_code == code
    assert facts["passed"] is (code == 0)


def test_noise_in_floating_point_is_contradicted(capsys: pytest.CaptureFixture[str]) -> None:
    code, facts = run_json(capsys, "mine.py:float_noise", *SURE)
    assert code == 1
    bits = [found for found in facts["evidence"] if found["layer"] == "bits"]
    assert max(found["epsilon_lower"] for found in bits) > 1


@pytest.mark.parametrize("name", ["add_noise", "randomized_response"])
def test_our_own_releases_keep_their_certificates(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    code, facts = run_json(capsys, name, *SURE)
    assert code == 0, facts["verdict"]
    assert facts["claimed"]["epsilon"] == pytest.approx(facts["certified"]["epsilon"])
    assert facts["audited"]["epsilon_lower"] > 0.3


def test_a_published_claim_is_contradicted_and_its_certificate_is_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Its coefficients cost sqrt(2) epsilon, which 20 000 runs show: about 1.2 against 1, +- 0.02.
    options = ("--mode", "published", "--set", "epsilon=1.0", "--runs", "20000")
    code, facts = run_json(capsys, "spof", *options, "--confidence", "0.999999")
    assert code == 1
    assert facts["contradicts_claim"]
    assert not facts["contradicts_certificate"]


def test_what_a_script_prints_in_other_processes_stays_out_of_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # What a process of the audit does when it begins, here: starting real ones takes seconds.
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    monkeypatch.setattr(running, "_SUBJECT", None)
    running._start(script.load("mine.py:release"))
    assert sys.stdout is sys.stderr


def test_text_page_and_figures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = run(
        capsys, "mine.py:release", *SURE, "--html", "page.html", "--figures", "drawn"
    )
    assert code == 0
    assert out.startswith("Audit of mine.py:release\nNothing contradicts mu 1")
    assert "importing" not in out
    assert "Wrote page.html" in err
    assert "dpkern · audit report" in (tmp_path / "page.html").read_text()
    drawn = {path.name for path in (tmp_path / "drawn").iterdir()}
    assert {"audit-tradeoff.png", "audit-tradeoff.svg", "audit-spectrum.png"} <= drawn


class Asked:
    """An audit without its work; what it was asked for."""

    def __init__(self, answer: Findings) -> None:
        self.answer = answer
        self.options: dict[str, Any] = {}

    def __call__(self, subject: Any, *, progress: Any, **options: Any) -> Findings:
        progress("canary weakest", 0.5)
        self.options = {"subject": subject, **options}
        return self.answer


@pytest.mark.parametrize(("answer", "code"), [(SOUND, 0), (BROKEN, 1)])
def test_options_reach_the_audit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: Findings, code: int
) -> None:
    asked = Asked(answer)
    made: list[dict[str, Any]] = []

    def make(name: str, **options: Any) -> str:
        made.append({"name": name, **options})
        return "the subject"

    monkeypatch.setattr(cli_audit, "run", asked)
    monkeypatch.setattr(cli_audit.catalogue, "make", make)
    options = (
        "--mode published --set noise_kind=real --set noise_multiplier=2 --backend cpu --steps 2 "
    )
    options += "--runs 5000 --confidence 0.99 --delta 1e-6 --claim 2 --workers 2 --quick"
    assert run(capsys, "gredp", *options.split())[0] == code
    (found,) = made
    assert found == {
        "name": "gredp",
        "mode": "published",
        "settings": {"noise_kind": "real", "noise_multiplier": 2.0},
        "backend": "cpu",
        "steps": 2,
    }
    assert asked.options == {
        "subject": "the subject",
        "runs": 5000,
        "confidence": 0.99,
        "delta": 1e-6,
        "workers": 2,
        "quick": True,
        "claim": ApproximateDP(2.0, 1e-6),
    }


@pytest.mark.parametrize(
    ("options", "claim"),
    [
        ((), None),
        (("--claim", "2"), ApproximateDP(2.0, 1e-5)),
        (("--claim", "2", "--delta", "0"), PureDP(2.0)),
        (("--claim-mu", "0.7", "--delta", "1e-3"), GaussianDP(0.7)),
    ],
)
def test_claims(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: Sequence[str],
    claim: Claim | None,
) -> None:
    asked = Asked(SOUND)
    monkeypatch.setattr(cli_audit, "run", asked)
    assert run(capsys, "mine.py:release", *options)[0] == 0
    assert asked.options["claim"] == claim
    assert asked.options["delta"] == (1e-3 if "1e-3" in options else 1e-5)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("nobody",), "subject"),
        (("nowhere.py:release",), "script"),
        (("mine.py:nothing",), "script"),
        (("mine.py:DIMENSION",), "mine.py:DIMENSION"),
        (("mine.py:release", "--mode", "published"), "mode"),
        (("mine.py:release", "--set", "a=1"), "settings"),
        (("mine.py:release", "--backend", "cpu"), "backend"),
        (("mine.py:release", "--steps", "2"), "steps"),
        (("mine.py:release", "--claim", "1", "--claim-mu", "1"), "claim, claim_mu"),
        (("mine.py:release", "--claim", "-1"), "claim"),
        (("mine.py:release", "--claim", "nan"), "claim"),
        (("mine.py:release", "--claim-mu", "-1"), "claim_mu"),
        (("mine.py:release", "--delta", "0"), "delta"),
        (("mine.py:release", "--delta", "1"), "delta"),
        (("mine.py:release", "--delta", "nan"), "delta"),
        (("mine.py:release", "--runs", "10"), "runs"),
        (("mine.py:release", "--confidence", "1"), "confidence"),
        (("mine.py:release", "--workers", "0"), "workers"),
        (("mine.py:release", "--html", "."), "html"),
        (("mine.py:release", "--figures", "mine.py"), "figures"),
        (("dpsgd", "--mode", "other"), "mode"),
        (("dpsgd", "--backend", "other"), "backend"),
        (("dpsgd", "--steps", "0"), "steps"),
        (("dpsgd", "--set", "nonsense=1"), "set"),
        (("dpsgd", "--set", "mode=published"), "set"),
        (("dpsgd", "--set", "noise_multiplier=loud"), "set"),
    ],
)
def test_refused(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], name: str) -> None:
    code, out, err = run(capsys, *arguments, "--json")
    assert code == 2
    error = json.loads(out)["error"]
    assert error["name"] == name
    assert error["remedy"]
    assert error["type"] in err


def test_the_help_lists_what_can_be_audited(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for name in catalogue.names():
        assert name.split(".")[0] in out
