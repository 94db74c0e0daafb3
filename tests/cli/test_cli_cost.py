"""``dpkern cost``: what is printed where, what is written, and what is refused before any work."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dpkern import cli
from dpkern.base.commit import version_with_commit
from dpkern.base.counts import EXECUTED, FORMULA, WALK
from dpkern.base.errors import DPKernError, InvalidInput
from dpkern.base.report import Report
from dpkern.commands import cost as cli_cost
from dpkern.commands import predict as cli_predict
from dpkern.cost.autoencoder import CORRECTED, PRINTED
from tests.reports.cost_samples import REPORT

ISSUE = ("--mechanisms", "spof,dpsgd-da", "-n", "14", "-l", "7", "--processor", "k7")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["cost", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code, out, _ = run(capsys, *arguments, "--format", "json")
    assert out.count("\n") == 1
    found = json.loads(out, parse_constant=pytest.fail)
    assert isinstance(found, dict)
    if code == 0:
        assert found.pop("made")["version"] == 1
    return code, found


def made(monkeypatch: pytest.MonkeyPatch, report: Report = REPORT) -> list[dict[str, Any]]:
    """``compare`` without its work; what it was asked for."""
    asked: list[dict[str, Any]] = []

    def answer(mechanisms: list[str], **options: Any) -> Report:
        asked.append({"mechanisms": mechanisms, **options})
        return report

    monkeypatch.setattr(cli_cost.cost_compare, "report", answer)
    return asked


def test_the_published_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    code, facts = run_json(capsys, "compare", *ISSUE, "--noise", "table")
    assert code == 0
    assert [cost["cost"] for cost in facts["costs"]] == [364, 1403]
    assert [entry["reduction_percent"] for entry in facts["reductions"]] == [74.06]


@pytest.mark.parametrize(
    ("options", "cost", "percent"),
    [
        (("--set", "squarings=1"), 1361, 73.25),
        (("--set", "squarings=1", "--set", "a_zero_shortcut=true"), 899, 59.51),
    ],
)
def test_other_ways_of_counting(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], cost: int, percent: float
) -> None:
    _, facts = run_json(capsys, "compare", *ISSUE, *options)
    assert facts["costs"][1]["cost"] == cost
    assert facts["reductions"][0]["reduction_percent"] == percent


def test_count_prints_the_lines_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "count", "--mechanism", "spof")
    assert code == 0
    assert "stabilisation" in out
    assert "364" in out


def test_sizes_and_processors_are_lists(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = made(monkeypatch)
    arguments = ("-n", "8, 14", "-l", "4,7", "--processor", "k7,mine.toml")
    assert run(capsys, "compare", *arguments, "--mode", "corrected")[0] == 0
    assert asked == [
        {
            "mechanisms": ["spof", "dpsgd-da"],
            "sizes": [(8, 4), (14, 7)],
            "processors": ["k7", "mine.toml"],
            "options": CORRECTED,
            "noise": None,
            "layer": None,
            "batches": [1],
        }
    ]
    assert run(capsys, "compare", "--noise", "cdt, table", "--layer", "conv")[0] == 0
    assert (asked[1]["noise"], asked[1]["layer"]) == (["cdt", "table"], "conv")


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("-n", "14,15"), "l"),
        (("-n", "x"), "n"),
        (("--set", "squarings"), "set"),
        (("--set", "speed=1"), "set"),
        (("--set", "squarings=true"), "squarings"),
        (("--set", "shared_exp=1"), "shared_exp"),
        (("--mode", "exact"), "mode"),
        (("--figures", "taken"), "figures"),
        (("--out", "."), "out"),
    ],
)
def test_refused_before_any_work(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    name: str,
) -> None:
    asked = made(monkeypatch)
    Path("taken").touch()
    code, facts = run_json(capsys, "compare", *arguments)
    assert (code, facts["error"]["name"]) == (cli.REFUSED, name)
    assert facts["error"]["remedy"]
    assert asked == []
    assert [path.name for path in Path().iterdir()] == ["taken"]


def test_an_unknown_format_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "compare", "--format", "pdf")
    assert (code, out) == (cli.REFUSED, "")
    assert "'text', 'json', 'csv', 'html'" in err


@pytest.mark.parametrize("arguments", [("--format", "html"), ("--figures", "figures")])
def test_without_matplotlib_nothing_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    asked = made(monkeypatch)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = run(capsys, "compare", *arguments)
    assert (code, out, asked) == (cli.REFUSED, "", [])
    assert "pip install matplotlib" in err
    assert list(Path().iterdir()) == []


def test_files_are_written_and_said_on_standard_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made(monkeypatch, Report(name="few", title="t", summary="s", facts={"one": 1}))
    code, out, err = run(capsys, "compare", "--format", "html")
    assert (code, out) == (0, "")
    assert "few.html" in err
    assert Path("few.html").read_text().startswith("<!doctype html>")
    code, out, err = run(capsys, "compare", "--format", "json", "--out", "deep/few.json")
    assert (code, out) == (0, "")
    written = json.loads(Path("deep/few.json").read_text())
    assert written.pop("made")["report"] == "few"
    assert written == {"one": 1, "made_by": f"dpkern {version_with_commit()}"}
    assert "deep/few.json" in err


def test_csv_and_text_go_to_standard_output(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made(monkeypatch)
    _, out, err = run(capsys, "compare", "--format", "csv")
    assert out.startswith("Operations & costs\nsystem,operations,ratio,source\n")
    assert err == ""
    _, out, err = run(capsys, "compare")
    assert REPORT.title in out
    assert err == ""


def test_what_a_model_prints_stays_off_standard_output(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def noisy(model: str, **options: Any) -> Report:
        print("from the user's code")
        assert options["row_shape"] == [1, 8, 8]
        return Report(name="n", title="t", summary="s", facts={"model": model})

    monkeypatch.setattr(cli_cost.cost_model, "report", noisy)
    code, facts = run_json(capsys, "model", "mine:net", "--row-shape", "1,8,8")
    assert (code, facts["model"]) == (0, "mine:net")


def test_tables_of_noise(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = run(capsys, "table", "samples", "--entries", "64", "--law", "laplace")
    assert code == 0
    assert "No DP guarantee" in out
    code, facts = run_json(capsys, "table", "samples", "--entries", "100")
    assert (code, facts["error"]["name"]) == (cli.REFUSED, "entries")
    asked: list[dict[str, Any]] = []

    def answer(**options: Any) -> Report:
        asked.append(options)
        return REPORT

    monkeypatch.setattr(cli_cost.cost_tables, "cdt_report", answer)
    assert run(capsys, "table", "--word-bits", "24", "--law", "laplace")[0] == 0
    assert asked == [{"law": "laplace", "word_bits": 24}]
    assert run_json(capsys, "table", "ring")[1]["error"]["name"] == "kind"


def test_a_report_that_fails_leaves_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any, **__: Any) -> Report:
        raise InvalidInput("mechanism", expected="another", got="this", remedy="Take another.")

    monkeypatch.setattr(cli_cost.cost_compare, "report", failing)
    arguments = ("--format", "html", "--out", "a.html", "--figures", "figures")
    assert run(capsys, "compare", *arguments)[0] == cli.REFUSED
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("cdt", "--entries", "65536"), "entries"),
        (("--scrambled",), "scrambled"),
        (("cdt", "--word-bits", "0"), "word_bits"),
        (("samples", "--word-bits", "0"), "word_bits"),
        (("rows",), "kind"),
    ],
)
def test_what_a_table_has_not_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], name: str
) -> None:
    code, facts = run_json(capsys, "table", *arguments)
    assert (code, facts["error"]["name"]) == (cli.REFUSED, name)


def test_a_private_step_is_counted_in_three_ways(capsys: pytest.CaptureFixture[str]) -> None:
    _, facts = run_json(capsys, "count", "--mechanism", "dpsgd", "-n", "6", "-l", "3")
    assert facts["execution"]["agrees"]
    assert facts["execution"]["seconds"] > 0
    assert [op["op"] for op in facts["execution"]["ops"]] == ["clip.clip_sum", "update.step"]


def test_every_count_says_how_it_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    _, facts = run_json(capsys, "count", "--mechanism", "dpsgd", "-n", "6", "-l", "3")
    known = {item["item"]: item["evidence"] for item in facts["items"]}
    assert known["update: rule"] == EXECUTED
    assert known["clip and sum: norms"] == WALK
    assert known["clip and sum: factors"] == FORMULA
    assert {op["op"]: op["evidence"] for op in facts["execution"]["ops"]} == {
        "clip.clip_sum": FORMULA,
        "update.step": EXECUTED,
    }
    assert facts["evidence"] == FORMULA
    _, facts = run_json(capsys, "compare", "--mechanisms", "spof,fm", "-n", "6", "-l", "3")
    assert {m["name"]: m["evidence"] for m in facts["mechanisms"]} == {
        "spof": FORMULA,  # the constant, the sensitivity and the scaling are left out of it
        "fm": WALK,
    }
    _, out, _ = run(capsys, "count", "--mechanism", "dpsgd", "-n", "6", "-l", "3")
    assert "evidence" in out


def test_a_prediction_takes_a_span_of_batches(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def answer(model: str, **options: Any) -> Report:
        asked.update(options, model=model)
        return REPORT

    monkeypatch.setattr(cli_predict.prediction, "report", answer)
    given = ("predict", "gpt2-small", "--processor", "zen4:avx2", "--seq", "64", "--threads", "2")
    code, _ = run_json(capsys, *given, "--batch", "32..200")
    assert code == 0
    assert (asked["model"], asked["batches"]) == ("gpt2-small", [32, 64, 128])
    assert (asked["processor"], asked["positions"], asked["threads"]) == ("zen4:avx2", 64, 2)
    for text in ("64..32", "0..8", "1..2..3", "few"):
        code, facts = run_json(capsys, "predict", "gpt2-small", "--batch", text)
        assert code != 0
        assert "batch" in facts["error"]["name"]


def test_modes_and_settings() -> None:
    assert cli_cost.counting("published", None) == PRINTED
    assert cli_cost.counting("corrected", ["shared_exp=False"]).shared_exp is False
    assert cli_cost.counting("published", ["gate_weight=32"]).gate_weight == 32
    with pytest.raises(DPKernError, match="gate_weight"):
        cli_cost.counting("published", ["gate_weight=0"])
