"""Tables of the lecture notes on private projected SGD: the noise, the chain, the rules, the bound.

Source: lecture notes on private projected SGD, subsampling and local differential privacy.
"""

from __future__ import annotations

import math

from ..accounting import events
from ..theory import composition, gaussian, pnsgd, rdp
from .claims import certified
from .result import Line, Panel, Result, Row
from .runner import Request

EPSILON, DELTA, LIPSCHITZ = 1.0, 1e-5, 1.0
SIZES = (100, 1000)
RELATION = "replace_one"
NOTES = (
    "N1: the notes drop the second term of advanced composition and use the constant 1 in the "
    "Gaussian tail",
    "N2: gamma = n is read as 1/n, sqrt(log n / delta) as sqrt(log(n / delta))",
)


def table(request: Request) -> Result:
    """The notes' steps 1 to 5 for n = 100 and 1000."""
    del request
    rows = []
    for n in SIZES:
        sigma = pnsgd.pnsgd_sigma(n, LIPSCHITZ, EPSILON, DELTA)
        chain = pnsgd.pnsgd_chain(sigma, n, LIPSCHITZ, DELTA)
        steps = (
            ("step 1: one query, before sampling", "epsilon", chain.query),
            ("step 2: after sampling 1 of n", "epsilon", chain.sampled[0]),
            ("step 3: n^2 steps, leading term", "epsilon", chain.composed[0]),
            ("step 4: in terms of n", "epsilon", chain.total),
            ("step 5: the noise", "sigma / (n L)", sigma / (n * LIPSCHITZ)),
            ("step 1 holds up to", "epsilon", composition.SIMPLIFIED_UP_TO),
            ("remark: factor of a moments accountant", "factor", math.sqrt(math.log(n / DELTA))),
        )
        rows += [
            Row(item="table", setting=f"n {n}, {name}", quantity=quantity, ours=value)
            for name, quantity, value in steps
        ]
    rows += [
        Row(
            item="table",
            setting=f"Gaussian mechanism at (1, 1e-5), constant {constant:g}",
            quantity="sigma",
            ours=gaussian.classic_sigma(EPSILON, DELTA, constant=constant),
        )
        for constant in (gaussian.CLASSIC, 1.0)
    ]
    return _result("table", "the notes' noise, step by step", rows)


def rules(request: Request) -> Result:
    """The epsilon of the notes' noise under four rules, and the certified one."""
    del request
    rows = []
    for n in SIZES:
        for target in (1.0, 4.0):
            sigma = pnsgd.pnsgd_sigma(n, LIPSCHITZ, target, DELTA)
            proved = _certified(n, sigma)
            for rule in pnsgd.RULES:
                rows.append(
                    Row(
                        item="rules",
                        setting=f"n {n}, sigma for epsilon {target:g}, rule {rule}",
                        quantity="epsilon",
                        published=target if rule == "notes" else None,
                        ours=pnsgd.pnsgd_epsilon(sigma, n, LIPSCHITZ, DELTA, rule=rule),
                        epsilon_claimed=target,
                        epsilon_certified=proved,
                        relation=RELATION,
                    )
                )
    accountant = rdp.rdp_epsilon(0.01, 4.0, 10_000, DELTA)
    rows.append(
        Row(
            item="rules",
            setting="sampled Gaussian q 0.01, z 4, 10^4 steps",
            quantity="epsilon",
            published=1.26,
            ours=accountant.epsilon,
            note=f"order {accountant.order}; the figure usually quoted for the moments accountant",
        )
    )
    return _result("rules", "one noise scale under four rules", rows)


def bound(request: Request) -> Result:
    """The utility bound over n, which does not fall: the loss is a sum."""
    del request
    dimension, diameter = 10, 1.0
    sizes = (30, 100, 300, 1000, 3000, 10_000)
    values = []
    for n in sizes:
        sigma = pnsgd.pnsgd_sigma(n, LIPSCHITZ, EPSILON, DELTA)
        values.append(pnsgd.utility_bound(n, LIPSCHITZ, dimension, sigma, diameter))
    rows = [
        Row(
            item="bound",
            setting=f"n {n}, d {dimension}, L 1, diameter 1, n^2 steps",
            quantity="bound on the excess of the summed loss",
            ours=value,
            epsilon_claimed=EPSILON,
            epsilon_certified=_certified(n, pnsgd.pnsgd_sigma(n, LIPSCHITZ, EPSILON, DELTA)),
            relation=RELATION,
        )
        for n, value in zip(sizes, values, strict=True)
    ]
    panel = Panel(
        title="bound on the excess risk",
        x_label="n",
        y_label="sum over records",
        lines=[Line(label="epsilon 1", x=sizes, y=values)],
        log_x=True,
    )
    return _result("bound", "utility bound of private projected SGD", rows, [panel])


def _certified(n: int, sigma: float) -> float:
    """Of n^2 steps on one record each, under replacement."""
    epsilon, _ = certified(
        events.gaussian(sigma / (n * LIPSCHITZ)),
        neighbouring=RELATION,
        sampling="fixed",
        dataset_size=n,
        sample_rate=1 / n,
        steps=n * n,
    )
    return epsilon


def _result(item: str, title: str, rows: list[Row], panels: list[Panel] | None = None) -> Result:
    return Result(
        paper="pnsgd",
        item=item,
        title=title,
        rows=rows,
        panels=panels or (),
        notes=NOTES,
        settings={"epsilon": EPSILON, "delta": DELTA, "lipschitz": LIPSCHITZ, "steps": "n^2"},
    )
