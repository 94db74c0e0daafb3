"""``dpkern cost frontier``: identical mechanisms tie, unequal guarantees are refused."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from dpkern import cli
from dpkern.commands import frontier_report

QUICK = ("--model", "linear", "--epochs", "1", "--epsilon", "3")
SAME = "dpsgd,gredp:allow_time_domain=true"
"""Corrected GReDP of a model without a frequency domain is DP-SGD with the same noise."""


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["cost", "frontier", *QUICK, *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def table(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_the_same_release_ties_and_the_tables_say_what_the_facts_say(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, _ = run(
        capsys, "--mechanisms", SAME, "--format", "json", "--tables", str(tmp_path / "t")
    )
    assert code == 0
    facts: dict[str, Any] = json.loads(out)
    assert facts["made"]["schema"] == "dpkern.cost"
    (at,) = facts["at"]
    (pair,) = at["pairs"]
    assert pair["accuracy"] == "identical"
    assert set(pair["costs"].values()) == {"tie"}
    assert pair["difference"] == {"value": 0, "low": 0, "high": 0}
    first, second = at["mechanisms"].values()
    assert first["digests"] == second["digests"]
    assert len(set(first["digests"])) == len(first["accuracies"]) == facts["needed_seeds"] == 8
    for each in (first, second):
        assert all(0.98 * 3 <= epsilon <= 3 for epsilon in each["certified"])
        assert all(each["frontier"].values())
    rows = table(tmp_path / "t/frontier-accuracy-at-equal-epsilon.csv")
    assert float(rows[0]["accuracy (%)"]) == round(100 * first["accuracy"]["value"], 2)
    costs = table(tmp_path / "t/frontier-what-a-step-costs.csv")
    millions = float(costs[0]["operations (millions)"])
    assert millions == pytest.approx(first["operations"] / 1e6, rel=1e-3)
    assert first["counted"]["noise_operations"] > 0
    assert first["operations"] == sum(
        n for name, n in first["counted"].items() if name.endswith("_operations")
    )


def test_text_fits_a_terminal_and_a_repetition_trains_the_same(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    texts = [run(capsys, "--mechanisms", "dpsgd,laplace_sgd")[1] for _ in range(2)]
    assert all(len(line) <= 80 for line in texts[0].splitlines())
    tables = [text.split("What a step costs")[0] for text in texts]  # times differ
    assert tables[0] == tables[1]
    assert "in a tie with" in tables[0] or "shown better" in tables[0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--mechanisms", SAME, "--seeds", "7"), "Pass --seeds 8"),
        (("--mechanisms", "dpsgd"), "at least two"),
        (("--mechanisms", "dpsgd,dpsgd"), "each once"),
        (("--mechanisms", "dpsgd,nothing"), "nothing"),
        (("--mechanisms", "dpsgd,dpsgd:lr=fast"), "lr=0.1"),
        (("--mechanisms", "dpsgd,dpsgd:colour=red"), "colour=red"),
        (("--mechanisms", "dpsgd,randomized_response"), "another promise"),
        (("--mechanisms", SAME, "--epsilon", "three"), "--epsilon 1,3"),
        (("--mechanisms", SAME, "--epsilon", "0"), "epsilon"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert code != 0
    assert said in " ".join((out + err).split())
    assert "Traceback" not in err


def test_a_run_file_may_not_decide_what_is_compared(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text("noise-multiplier = 1.0\n")
    code, _, err = run(capsys, "--mechanisms", SAME, "--config", "run.toml")
    assert code != 0
    assert "noise_multiplier" in err
    for line, said in (("users = 3", "users"), ('device = "cuda"', "of a processor")):
        (tmp_path / "run.toml").write_text(f"{line}\n")
        code, _, err = run(capsys, "--mechanisms", SAME, "--config", "run.toml")
        assert code != 0
        assert said in " ".join(err.split())
    with pytest.raises(ValueError, match="epsilon"):
        frontier_report.report(["dpsgd", "pruned"], epsilons=())
