"""Item of the directional paper's table 1: the printed defaults, and what is known of the data.

Source: directional noise for DP-SGD, table 1.
"""

from __future__ import annotations

from ...engine.demo import models
from ...engine.demo.sources import SOURCES
from ..result import ComparisonRow, Paper, Result
from ..runner import ItemRequest
from ..verdict import exact
from .cases import CASES, DELTA

ROWS = {"MNIST": (55_000, 60_000), "SVHN": (73_257, 73_257), "CIFAR-10": (60_000, 50_000)}
"""Training rows as printed, and of the data set."""
PAPER = Paper("directional", settings={"delta": DELTA})


def table1(request: ItemRequest) -> Result:
    """List the printed settings beside the data sets' sizes and the networks that are built."""
    del request
    rows, verdicts = [], []
    for name, case in CASES.items():
        printed, real = ROWS[name]
        source = SOURCES[case.model]
        model = models.build(case.model, row_shape=source.rows, classes=10)
        size = float(sum(p.numel() for p in model.parameters()))
        for quantity, told, ours in (
            ("training rows", float(printed), float(real)),
            ("lot", float(case.lot), float(case.lot)),
            ("epochs", float(case.epochs), float(case.epochs)),
            ("steps k", None, float(case.epochs * (printed // case.lot))),
            ("alpha", case.clip, case.clip),
            ("pruning ratio", case.pruning, case.pruning),
            ("parameters of the network", None, size),
        ):
            rows.append(
                ComparisonRow(
                    item="table1", setting=name, quantity=quantity, published=told, ours=ours
                )
            )
        verdicts.append(
            exact(
                f"{name} has {printed} training rows",
                printed <= real,
                unit="rows of the data set",
                published=float(printed),
                ours=float(real),
                reason="the data set's own number"
                if printed == real
                else "D7: the data set's own number",
            )
        )
    notes = tuple(
        f"{name}: {'; '.join(SOURCES[case.model].readings)}" for name, case in CASES.items()
    )
    return PAPER.result("table1", "settings", rows, (), notes).judged(verdicts)


__all__ = ["table1"]
