"""Whole private steps: what is counted in a run of them equals the closed form, phase by phase."""

from __future__ import annotations

import random

import pytest
import torch

from dpkern.cost import counting, steps
from dpkern.cost.primitives import Itemised
from tests.step_count_cases import CASES, Case

DRAWS = 50


def both(case: Case) -> tuple[Itemised, Itemised]:
    """Counted, and in closed form."""
    torch.manual_seed(case.draw.randrange(2**31))
    step = case.step()
    given = case.given(step)
    counted = counting.count(lambda: case.run(step, given)).items
    form = steps.form(
        case.mechanism,
        case.shapes,
        case.batch,
        dtype=case.dtype,
        rule=case.rule,
        clipped=case.clipped,
        number=case.number,
        samples=case.samples,
    )
    return counted, form


@pytest.mark.parametrize("name", CASES)
def test_counted_is_the_closed_form(name: str) -> None:
    draw = random.Random(name)
    for _ in range(DRAWS):
        case = CASES[name](draw)
        counted, form = both(case)
        assert counted == form, case
