"""Plot strong composition against a moments accountant, and against a certificate, up to n = 1e5.

Source: lecture notes on private projected SGD, remark on the moments accountant.
"""

from __future__ import annotations

import math
from typing import Any

from ...privacy.accounting import shown_bound
from ...privacy.theory import pnsgd, rdp
from ..result import ComparisonRow, Line, Panel, Result
from ..runner import ItemRequest
from . import verdicts
from .items import LIPSCHITZ, PAPER, RELATION, budget, certified_epsilon

SIZES, QUICK_SIZES = (100, 1000, 10_000, 100_000), (100, 1000, 100_000)
RULES = {
    "notes": "strong composition, leading term (the notes)",
    "full_advanced": "strong composition with both terms",
    "exact_amplification": "with the exact amplification as well",
    "rdp": "moments accountant",
}
CERTIFIED = "certified"


def plot(request: ItemRequest) -> Result:
    """Compute epsilon of the notes' noise over n by every rule, and the noise that each needs."""
    sizes = QUICK_SIZES if request.quick else SIZES
    epsilon, delta = budget(request)
    sigmas = {n: pnsgd.pnsgd_sigma(n, LIPSCHITZ, epsilon, delta) for n in sizes}
    curves = {
        rule: [pnsgd.pnsgd_epsilon(sigmas[n], n, LIPSCHITZ, delta, rule=rule) for n in sizes]
        for rule in RULES
    }
    curves[CERTIFIED] = [certified_epsilon(n, sigmas[n], delta=delta) for n in sizes]
    # The accountant's multiplier is noise over sensitivity, which is 2 n L under replacement.
    needed = [2 * rdp.rdp_multiplier(1 / n, n * n, epsilon, delta) for n in sizes]
    printed = [sigmas[n] / (n * LIPSCHITZ) for n in sizes]
    factors = [a / b for a, b in zip(printed, needed, strict=True)]
    remark = [math.sqrt(math.log(n / delta)) for n in sizes]
    rows = [
        ComparisonRow(
            item="plot",
            setting=f"n {n}, n^2 steps, sigma / (n L) {sigmas[n] / n:.5g}: {label}",
            quantity="epsilon",
            published=epsilon if rule == "notes" else None,
            ours=curves[rule][index],
            epsilon_claimed=epsilon,
            epsilon_certified=curves[CERTIFIED][index],
            relation=RELATION,
        )
        for index, n in enumerate(sizes)
        for rule, label in {**RULES, CERTIFIED: CERTIFIED}.items()
    ]
    rows += [
        ComparisonRow(
            item="plot",
            setting=f"n {n}, n^2 steps: the notes' noise over the moments accountant's",
            quantity="factor",
            published=remark[index],
            ours=factors[index],
            note="N2: the remark's factor is read as sqrt(log(n / delta))",
        )
        for index, n in enumerate(sizes)
    ]
    axes: dict[str, Any] = {"x_label": "n", "log_x": True, "log_y": True}
    panels = [
        Panel(
            title="epsilon of the notes' noise, n^2 steps",
            y_label="epsilon",
            lines=[
                Line(label={**RULES, CERTIFIED: CERTIFIED}[rule], x=sizes, y=y)
                for rule, y in curves.items()
            ],
            **axes,
        ),
        Panel(
            title=f"noise for epsilon {shown_bound(epsilon)}, n^2 steps",
            y_label="sigma / (n L)",
            lines=[
                Line(label="strong composition (the notes)", x=sizes, y=printed),
                Line(label="moments accountant", x=sizes, y=needed),
            ],
            **axes,
        ),
    ]
    result = PAPER.result(
        "plot", "strong composition and the moments accountant", rows, panels, quick=request.quick
    )
    return result.judged(
        [
            *verdicts.of_plot(curves["notes"][-1], curves["rdp"][-1], curves[CERTIFIED][-1]),
            verdicts.of_factor(remark[-1], factors[-1]),
        ]
    )


__all__ = ["plot"]
