"""Item of AdLM on the readings of its printed noise: who shares a draw, and what |h0| counts.

Source: AdLM, (17), (20), (21).
"""

from __future__ import annotations

import math
from functools import partial

from ...privacy.accounting import shown_bound
from .. import intervals, runner
from ..result import Line, Panel, Result
from ..runner import ItemRequest
from . import setup as adlm_world
from . import verdicts
from .methods import COUNTS, READINGS, SHARING
from .published import PLAIN
from .setup import MNIST
from .training import last_accuracies, piece, row, trained, with_control


def readings(request: ItemRequest) -> Result:
    """Compare the readings of the printed noise: who shares a draw, and what |h0| counts."""
    here = adlm_world.world(MNIST, request)
    epsilon = request.one_epsilon(MNIST.quick_epsilons[-1] if request.quick else MNIST.curves[-1])
    seeds = request.repeats(2 if request.quick else 5)
    cells = [(PLAIN, math.inf), *((name, epsilon) for name in READINGS)]
    with adlm_world.one_thread():
        found = trained(request, [partial(piece, here, request, *cell) for cell in cells], seeds)
    numbers = dict(zip(cells, found, strict=True))
    rows = [row("readings", here, *cell, numbers[cell]) for cell in cells]
    lines = []
    for sharing in SHARING:
        own = [f"AdLM, |h0| {count}, {sharing}" for count in COUNTS]
        last = [intervals.interval(last_accuracies(numbers[name, epsilon])) for name in own]
        crosses = [bool(verdicts.hindered(numbers[name, epsilon])) for name in own]
        y, half = [one.mean for one in last], [one.half for one in last]
        lines.append(Line(label=sharing, x=range(1, len(own) + 1), y=y, half=half, spoiled=crosses))
    panel = Panel(
        title=f"claimed epsilon {shown_bound(epsilon)}",
        y_label="accuracy %",
        lines=lines,
        names=[f"|h0| {count}" for count in COUNTS],
    )
    result = Result(
        paper="adlm",
        item="readings",
        title="readings of the printed noise",
        rows=rows,
        panels=[panel],
        notes=(
            "A1, A3: the source says neither whether the records of a batch share a draw nor what "
            "|h0| counts in a convolution; relevances here are a public network's, so that A2 does "
            "not hide what the readings cost",
            *runner.SEEDED,
        ),
        settings={"quick": request.quick, "epochs": here.epochs, "seeds": seeds},
        verdicts=verdicts.of_readings(numbers, epsilon),
    )
    return with_control(result, here, numbers[PLAIN, math.inf])
