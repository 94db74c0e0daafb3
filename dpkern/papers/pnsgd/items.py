"""Tables of the lecture notes on private projected SGD: the noise, the chain, the rules, the bound.

Source: lecture notes on private projected SGD, subsampling and local differential privacy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from ...base.rng import Key
from ...engine.sampling import make_batches
from ...ops.update import SGD, Ball
from ...privacy.accounting import events, shown_bound
from ...privacy.mechanisms import ProjectedSGD
from ...privacy.theory import composition, gaussian, pnsgd, rdp
from ...step.step import DPStep
from ...train.hooks import around
from ..claims import certified
from ..result import ComparisonRow, Line, Panel, Paper, Result
from ..runner import ItemRequest

EPSILON, DELTA, LIPSCHITZ = 1.0, 1e-5, 1.0
SIZES = (100, 1000)
RELATION = "replace_one"
NOTES = (
    "N1: the notes drop the second term of advanced composition and use the constant 1 in the "
    "Gaussian tail",
    "N2: gamma = n is read as 1/n, sqrt(log n / delta) as sqrt(log(n / delta))",
)
PAPER = Paper(
    "pnsgd",
    settings={"epsilon": EPSILON, "delta": DELTA, "lipschitz": LIPSCHITZ, "steps": "n^2"},
    notes=NOTES,
)


def table(request: ItemRequest) -> Result:
    """Compute the notes' steps 1 to 5 for n = 100 and 1000."""
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
            ComparisonRow(item="table", setting=f"n {n}, {name}", quantity=quantity, ours=value)
            for name, quantity, value in steps
        ]
    rows += [
        ComparisonRow(
            item="table",
            setting=f"Gaussian mechanism at (1, 1e-5), constant {constant:g}",
            quantity="sigma",
            ours=gaussian.classic_sigma(EPSILON, DELTA, constant=constant),
        )
        for constant in (gaussian.CLASSIC, 1.0)
    ]
    return PAPER.result("table", "the notes' noise, step by step", rows)


def rules(request: ItemRequest) -> Result:
    """Compare the epsilon of the notes' noise under four rules with the certified one."""
    del request
    rows = []
    for n in SIZES:
        for target in (1.0, 4.0):
            sigma = pnsgd.pnsgd_sigma(n, LIPSCHITZ, target, DELTA)
            proved = _certified(n, sigma)
            for rule in pnsgd.RULES:
                rows.append(
                    ComparisonRow(
                        item="rules",
                        setting=f"n {n}, sigma for epsilon {shown_bound(target)}, rule {rule}",
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
        ComparisonRow(
            item="rules",
            setting="sampled Gaussian q 0.01, z 4, 10^4 steps",
            quantity="epsilon",
            published=1.26,
            ours=accountant.epsilon,
            note=f"order {accountant.order}; the figure usually quoted for the moments accountant",
        )
    )
    return PAPER.result("rules", "one noise scale under four rules", rows)


def bound(request: ItemRequest) -> Result:
    """Compute the utility bound over n, which does not fall: the loss is a sum."""
    del request
    dimension, diameter = 10, 1.0
    sizes = (30, 100, 300, 1000, 3000, 10_000)
    values = []
    for n in sizes:
        sigma = pnsgd.pnsgd_sigma(n, LIPSCHITZ, EPSILON, DELTA)
        values.append(pnsgd.utility_bound(n, LIPSCHITZ, dimension, sigma, diameter))
    rows = [
        ComparisonRow(
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
    return PAPER.result("bound", "utility bound of private projected SGD", rows, [panel])


def experiment(request: ItemRequest) -> Result:
    """Measure the excess risk of both losses against the bound, beside a run without noise.

    Unit-ball features and parameters: the logistic loss is 1-Lipschitz, least squares 2-Lipschitz.
    """
    n, dimension = (40 if request.quick else 100), 5
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(n, dimension, generator=draw, dtype=torch.float64)
    x /= x.norm(dim=1, keepdim=True).clamp(min=1)
    truth = torch.ones(dimension, dtype=torch.float64) / math.sqrt(dimension)
    noisy = x @ truth + 0.1 * torch.randn(n, generator=draw, dtype=torch.float64)
    rows = []
    for loss in (Logistic(x, torch.sign(noisy)), LeastSquares(x, noisy.clamp(-1, 1))):
        private = ProjectedSGD.from_budget(
            n, loss.lipschitz, EPSILON, DELTA, projection=Ball(1.0), mode="published"
        )
        limit = pnsgd.utility_bound(n, loss.lipschitz, dimension, private.sigma, 2.0)
        best = loss.least()
        for name, mechanism in (
            ("epsilon 1", private),
            ("without noise", replace(private, noise_multiplier=0.0)),
        ):
            found = [_descend(loss, mechanism, seed) - best for seed in range(request.repeats(3))]
            proved = _certified(n, private.sigma / loss.lipschitz)
            noised = mechanism.private
            rows.append(
                ComparisonRow(
                    item="experiment",
                    setting=f"{loss.name}, {name}, n {n}, d {dimension}, {n * n} steps",
                    quantity="excess of the summed loss",
                    published=limit if noised else None,
                    ours=sum(found) / len(found),
                    epsilon_claimed=EPSILON if noised else None,
                    epsilon_certified=proved if noised else None,
                    relation=RELATION if noised else "",
                    data="generated: unit ball",
                    seeds=len(found),
                    spread=(max(found) - min(found)) / 2,
                    note="published: the notes' bound at these numbers",
                )
            )
    return PAPER.result("experiment", "measured excess risk", rows)


@dataclass(frozen=True, eq=False)
class Logistic:
    """The logistic loss ``log(1 + exp(-y x.theta))``, y in -1, 1."""

    x: torch.Tensor
    y: torch.Tensor
    name = "logistic"
    lipschitz = 1.0

    def value(self, theta: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.softplus(-self.y * (self.x @ theta)).sum()

    def gradient(self, theta: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the gradient of each record, ``[B, d]``."""
        x, y = self.x[rows], self.y[rows]
        return (-y * torch.sigmoid(-y * (x @ theta)))[:, None] * x

    def least(self) -> float:
        """Return the minimum over the unit ball."""
        return _least(self)


class LeastSquares(Logistic):
    """The least-squares loss ``(x.theta - y)^2 / 2``, |y| <= 1."""

    name = "least squares"
    lipschitz = 2.0

    def value(self, theta: torch.Tensor) -> torch.Tensor:
        return (self.x @ theta - self.y).square().sum() / 2

    def gradient(self, theta: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        x, y = self.x[rows], self.y[rows]
        return (x @ theta - y)[:, None] * x


def _least(loss: Logistic) -> float:
    theta = torch.zeros(loss.x.shape[1], dtype=torch.float64)
    everything = torch.arange(len(loss.x))
    for _ in range(2000):  # the summed loss is n-smooth
        theta = theta - loss.gradient(theta, everything).sum(0) / len(everything)
        theta = theta / theta.norm().clamp(min=1)
    return float(loss.value(theta))


def _descend(loss: Logistic, mechanism: ProjectedSGD, seed: int) -> float:
    """Return the summed loss after n^2 private steps."""
    n, dimension = loss.x.shape
    theta = torch.zeros(dimension, dtype=torch.float64)
    step = DPStep(
        mechanism,
        [theta],
        expected_batch_size=1,
        sample_rate=1 / n,
        sampling="fixed",
        dataset_size=n,
        optimizer=SGD(lr=1.0),
        unsafe_seed=seed,
    )
    before, after = around(mechanism)
    batches = make_batches(
        "fixed", dataset_size=n, batch_size=1, steps=n * n, key=Key.from_unsafe_seed(seed)
    )
    for rows in batches:
        step.add([loss.gradient(theta, rows)])
        before(step)
        step.finish()
        after(step)
    return float(loss.value(theta))


def _certified(n: int, sigma: float) -> float:
    """Return the certified epsilon of n^2 steps on one record each, under replacement."""
    epsilon, _ = certified(
        events.gaussian(sigma / (n * LIPSCHITZ)),
        neighbouring=RELATION,
        sampling="fixed",
        dataset_size=n,
        sample_rate=1 / n,
        steps=n * n,
    )
    return epsilon
