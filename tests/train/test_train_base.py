"""The common parts of all kinds of training sessions: interrupts, resuming, files, the report."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from dpkern import cli
from dpkern.base.errors import InvalidInput, PrivacyError
from dpkern.base.outputs import CHECKPOINT, PAGE, REPORT, RESULTS
from dpkern.base.report import Report
from dpkern.train import checkpoint
from dpkern.train.objective_report import Reconstruction
from dpkern.train.report import FigureSpec, statement, write_figure
from dpkern.train.session_factory import NAMES, SESSIONS, AnySession, make_session

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = {"batch_size": 12, "unsafe_seed": 7, "epochs": 2}
OPTIONS: dict[str, dict[str, Any]] = {
    "dpsgd": {**ROWS, "model": "linear", "noise_multiplier": 1.0},
    "ilm": {**ROWS, "epsilon": 3.0},
    "spof": {"epsilon": 2.0, "samples": 4, "features": 4, "code": 2, "epochs": 2, "unsafe_seed": 7},
}
"""Two epochs of four steps each."""

COMMON = {
    *("statement", "mechanism", "mode", "epsilon_claimed", "claim", "epsilon_certified"),
    *("non_private", "notes", "delta", "relation", "accountant", "certified_for"),
    *("test_accuracy", "test_note", "seconds", "report", "checkpoint", "figure", "steps"),
    *("certificate", "public", "options", "environment", "epsilon_if_seed_secret"),
    *("collapsed", "output_spread"),
}


@pytest.fixture(params=OPTIONS)
def options(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    given = {**OPTIONS[request.param], "mechanism": request.param, "figure": False}
    if "batch_size" in given:
        given["data"] = str(rows(tmp_path))
    return given | {"out": tmp_path / "out"}


def rows(folder: Path, count: int = 60) -> Path:
    y = np.arange(count) % 3
    x = np.random.default_rng(0).random((count, 6))
    x[:, 0] = y / 2
    np.savez(folder / "rows.npz", x=x, y=y)
    return folder / "rows.npz"


def before_step(session: AnySession, number: int, action: Callable[[], None]) -> None:
    """Do this within a step, before anything of it is done."""
    take = session.steps.take

    def first_this() -> object:
        if session.steps_done == number:
            action()
        return take()

    session.steps.take = first_this  # type: ignore[method-assign]


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_signal_lets_the_step_finish_and_the_run_resumes(
    options: dict[str, Any], number: signal.Signals, tmp_path: Path
) -> None:
    whole = make_session(options | {"out": tmp_path / "whole"}).run()
    session = make_session(options)
    before_step(session, 4, lambda: os.kill(os.getpid(), number))
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        session.run()
    assert (session.between_steps, session.steps_done, session.steps_total) == (True, 5, 8)
    assert signal.getsignal(number) is before
    assert not options["out"].exists()
    session.save()
    again = make_session({"out": options["out"], "resume": True, "figure": False})
    assert again.steps_done == 5
    assert again.history == session.history
    assert again.steps.seconds == pytest.approx(session.steps.seconds)
    again.steps.seconds = 1000.0
    summary = again.run()
    assert again.steps.seconds > 1000
    assert summary["test_accuracy"] == whole["test_accuracy"]
    assert [record.step for record in again.history] == [4, 8]


def test_a_signal_within_the_last_step_ends_nothing(options: dict[str, Any]) -> None:
    session = make_session(options)
    before_step(session, 7, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert session.run()["steps"] == 8


def test_within_a_step_there_is_no_state_to_save(
    options: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = make_session(options)
    before_step(session, 2, interrupt)
    monkeypatch.setattr("dpkern.commands.train.make_session", lambda *given: session)
    assert cli.main(["train", "--json"]) == 130
    assert json.loads(capsys.readouterr().out) == {"interrupted": True, "checkpoint": None}
    assert not session.between_steps
    assert not options["out"].exists()


def test_what_every_report_says(options: dict[str, Any]) -> None:
    session = make_session(options | {"figure": True})
    summary = session.run()
    assert summary.keys() >= COMMON
    assert next(iter(summary)) == "statement"
    written = json.loads((options["out"] / REPORT).read_text(), parse_constant=pytest.fail)
    assert len(written.pop("history")) == 2
    assert written == summary
    assert {path.name for path in options["out"].iterdir()} == set(RESULTS) - {PAGE}
    assert summary["statement"] == "not private against anyone who knows the seed of the noise"
    assert checkpoint.read(options["out"] / CHECKPOINT, kind=session.FORMAT)["seconds"] > 0
    with pytest.raises(InvalidInput, match="complete after 8 steps"):
        make_session({"out": options["out"], "resume": True, "figure": False})


def test_other_data_and_options_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    session = make_session(options)
    session.save()
    resumed = {"out": options["out"], "resume": True, "figure": False}
    with pytest.raises(PrivacyError, match=r"^unsafe_seed: "):
        make_session({**resumed, "unsafe_seed": 8})
    with pytest.raises(InvalidInput, match=r"^lr: "):
        make_session({**resumed, "lr": 0.7})
    with pytest.raises(InvalidInput, match=r"^colour: .*no such option"):
        make_session({**options, "colour": "red"})
    if "data" in options:
        rows(tmp_path, count=90)
        with pytest.raises(PrivacyError, match=r"^data: .*training_rows"):
            make_session(resumed)


def test_the_table_shows_statement_warnings_and_divergence(
    options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    session = make_session(options)
    summary = session.run()
    name = "data_notes" if "data_notes" in summary else "data_warnings"
    session.show(Console(width=400), summary | {name: ["beware"], "diverged": True})
    shown = capsys.readouterr().out
    for said in (summary["statement"], "beware", "its weights stay as they were"):
        assert said in shown


def test_every_mechanism_has_one_kind_of_session() -> None:
    kinds = set(SESSIONS.values())
    assert {kind.__name__ for kind in kinds} == {
        "Session",
        "ObjectiveSession",
        "AdlmSession",
        "MomentsSession",
    }
    assert sum(len(kind.KINDS[0].NAMES) for kind in kinds) == len(NAMES)


RECONSTRUCTION: dict[str, Any] = {
    "step": 4,
    "heldout_accuracy": 1.0,
    "heldout_mse": 1.0,
    "heldout_bce": 1.0,
}
CERTIFICATE = {"delta": 1.25e-5, "relation": "add_remove", "certified_for": "released bits"}


@pytest.mark.parametrize(
    ("epsilon", "delta", "facts", "said"),
    [
        (
            1.23456,
            1.25e-5,
            {},
            "(1.2346, 1.25e-05)-differentially private if one record is added or removed: proved "
            "for ",
        ),
        (2.0, 0, {}, "2-differentially private if "),
        ("inf", 1e-5, {"epsilon_if_seed_secret": 2.0}, "not private against anyone who knows "),
        ("inf", 1e-5, {"epsilon_if_seed_secret": "inf"}, "not private: no noise"),
        ("inf", 1e-5, {"epsilon_if_seed_secret": math.inf}, "not private: no noise"),
        ("inf", 1e-5, {}, "not private: no noise"),
        ("inf", 1e-5, {"non_private": None}, "not private: nothing can be certified"),
    ],
)
def test_a_statement_is_one_sentence(
    epsilon: Any, delta: float, facts: dict[str, Any], said: str
) -> None:
    certificate = CERTIFICATE | {"epsilon": epsilon, "delta": delta}
    assert statement({"non_private": "no noise", **facts}, certificate).startswith(said)


def test_a_figure_says_in_words_what_it_cannot_draw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words: list[str] = []
    axes = pytest.importorskip("matplotlib.axes")
    text = axes.Axes.text
    monkeypatch.setattr(
        axes.Axes, "text", lambda self, x, y, s, **k: words.append(s) or text(self, x, y, s, **k)
    )
    past = [Reconstruction(**RECONSTRUCTION, epoch=n, diverged=False) for n in (1, 2)]
    panels = {"drawn": [1.0, 2.0], "at once": [None, None], "none": [None, math.inf]}
    write_figure(tmp_path / "a.png", past, FigureSpec(title="a", panels=panels))
    assert words == ["spent at once", "infinite"]
    words.clear()
    ended = [*past[:1], Reconstruction(**RECONSTRUCTION, epoch=2, diverged=True)]
    broken = FigureSpec(title="b", panels={"drawn": [1.0, math.nan]})
    write_figure(tmp_path / "b.png", ended, broken)
    assert words == ["diverged"]


def test_a_constant_is_said_in_report_table_and_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    given = ["--data", str(rows(tmp_path)), "--model", "linear", "--batch-size", "12"]
    given += ["--epochs", "1", "--unsafe-seed", "7", "--threads", "1"]
    told = []
    with pytest.MonkeyPatch.context() as patch:
        title = figures.Figure.suptitle
        patch.setattr(
            figures.Figure,
            "suptitle",
            lambda self, text, **more: told.append(text) or title(self, text, **more),
        )
        # Noise of this size moves the bias so far that one class is told to every row.
        for name, noise, lr in (("drowned", "500", "1000"), ("quiet", "0.1", "0.1")):
            out = ["--out", str(tmp_path / name), "--noise-multiplier", noise, "--lr", lr]
            assert cli.main(["train", *given, *out]) == 0
    drowned, quiet = (
        json.loads((tmp_path / name / REPORT).read_text()) for name in ("drowned", "quiet")
    )
    assert (drowned["collapsed"], drowned["classes_told"]) == (True, 1)
    assert (quiet["collapsed"], quiet["output_spread"] > 1e-3) == (False, True)
    assert "COLLAPSED" in told[0]
    assert "COLLAPSED" not in told[1]
    assert capsys.readouterr().out.count("COLLAPSED") == 1


def test_a_run_with_a_figure_hands_its_page_to_the_renderer(options: dict[str, Any]) -> None:
    reports: list[Report] = []

    def render(report: Report) -> str:
        reports.append(report)
        return "the page"

    session = make_session(options | {"figure": True}, render=render)
    summary = session.run()
    (report,) = reports
    assert summary["page"] == str(options["out"] / PAGE)
    assert (options["out"] / PAGE).read_text() == "the page"
    assert summary["statement"] in report.summary
    assert any(note.startswith("Epsilon covers the parameters") for note in report.notes)
    claimed, certified, audited = report.tables[0].rows
    assert (claimed[0], certified[:2], audited[:2]) == (
        "claimed",
        ("certified", "none"),  # the seed is known
        ("audited", "not audited"),
    )
    steps = [record.step for record in session.history]
    for figure in report.figures:
        assert set(figure.series[0].x) <= set(steps)
        assert all(len(series.x) == len(series.y) for series in figure.series)
    absent = [note for note in report.notes if "no finite values" in note]
    assert len(report.figures) + len(absent) >= 2
    assert len(report.facts["history"]) == len(steps)


def test_without_a_figure_there_is_no_page(options: dict[str, Any]) -> None:
    session = make_session(options, render=lambda report: pytest.fail("rendered"))
    assert session.run()["page"] is None
    assert not (options["out"] / PAGE).exists()
