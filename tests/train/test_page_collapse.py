"""The page of a run says whether the outputs are the same for every held-out record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dpkern.reports.page import page
from dpkern.train.page import report_of
from dpkern.train.session import Session

pytestmark = pytest.mark.usefixtures("one_thread")


def run(tmp_path: Path, *, dead: bool) -> tuple[Session, dict[str, Any]]:
    """Train for an epoch; a dead network gives every record the same scores."""
    given = {"noise_multiplier": 1.0, "epochs": 1, "model": "linear", "out": tmp_path / "out"}
    made = Session({**given, "figure": False, "lr": 1e-9 if dead else 0.5})
    if dead:
        with torch.no_grad():
            for parameter in made.training.model.parameters():
                parameter.zero_()
    return made, made.run()


@pytest.mark.parametrize("dead", [False, True])
def test_the_page_has_the_detectors_verdict(tmp_path: Path, dead: bool) -> None:
    session, summary = run(tmp_path, dead=dead)
    report = report_of(summary, session.history, session._drawn(summary), session._shown(summary))
    ((_, said),) = [row for row in report.tables[1].rows if row[0] == "outputs"]
    assert ("COLLAPSED" in said) == dead
    assert ("COLLAPSED" in report.summary) == dead
    text = page(report)
    assert text.count("COLLAPSED") >= 2 if dead else "vary over records by" in text
