"""Tables of the lecture notes on private projected SGD: the noise, the chain, the rules, the bound.

Source: lecture notes on private projected SGD, subsampling and local differential privacy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...base.rng import Key
from ...engine.sampling import make_batches
from ...ops.update import SGD, Ball
from ...privacy import accounting
from ...privacy.accounting import events, shown_bound
from ...privacy.mechanisms import ProjectedSGD
from ...privacy.theory import composition, gaussian, pnsgd, rdp
from ...step.step import DPStep
from ...train.hooks import around
from ..claims import certified
from ..pieces import CachedRun, OnStep
from ..result import ComparisonRow, Line, Panel, Paper, Result
from ..runner import ItemRequest
from ..verdict import LEAST_RUNS
from . import verdicts

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


def budget(request: ItemRequest) -> tuple[float, float]:
    """Return the epsilon and delta that noise is computed for."""
    return request.one_epsilon(EPSILON), request.delta or DELTA


def table(request: ItemRequest) -> Result:
    """Compute the notes' steps 1 to 5 for n = 100 and 1000."""
    epsilon, delta = budget(request)
    rows = []
    for n in SIZES:
        sigma = pnsgd.pnsgd_sigma(n, LIPSCHITZ, epsilon, delta)
        chain = pnsgd.pnsgd_chain(sigma, n, LIPSCHITZ, delta)
        steps = (
            ("step 1: one query, before sampling", "epsilon", chain.query),
            ("step 2: after sampling 1 of n", "epsilon", chain.sampled[0]),
            ("step 3: n^2 steps, leading term", "epsilon", chain.composed[0]),
            ("step 4: in terms of n", "epsilon", chain.total),
            ("step 5: the noise", "sigma / (n L)", sigma / (n * LIPSCHITZ)),
            ("step 1 holds up to", "epsilon", composition.SIMPLIFIED_UP_TO),
            ("remark: factor of a moments accountant", "factor", math.sqrt(math.log(n / delta))),
        )
        rows += [
            ComparisonRow(item="table", setting=f"n {n}, {name}", quantity=quantity, ours=value)
            for name, quantity, value in steps
        ]
    at = f"({shown_bound(epsilon)}, {shown_bound(delta)})"
    rows += [
        ComparisonRow(
            item="table",
            setting=f"Gaussian mechanism at {at}, constant {constant:g}",
            quantity="sigma",
            ours=gaussian.classic_sigma(epsilon, delta, constant=constant),
        )
        for constant in (gaussian.CLASSIC, 1.0)
    ]
    asked: dict[str, Any] = {"epsilon": epsilon, "delta": delta}
    result = PAPER.result("table", "the notes' noise, step by step", rows, **asked)
    return result.judged(verdicts.of_chain(rows, epsilon))


def rules(request: ItemRequest) -> Result:
    """Compare the epsilon of the notes' noise under four rules with the certified one."""
    targets, delta = request.epsilons((EPSILON, 4.0)), request.delta or DELTA
    rows = []
    for n in SIZES:
        for target in targets:
            sigma = pnsgd.pnsgd_sigma(n, LIPSCHITZ, target, delta)
            proved = certified_epsilon(n, sigma, delta=delta)
            for rule in pnsgd.RULES:
                rows.append(
                    ComparisonRow(
                        item="rules",
                        setting=f"n {n}, sigma for epsilon {shown_bound(target)}, rule {rule}",
                        quantity="epsilon",
                        published=target if rule == "notes" else None,
                        ours=pnsgd.pnsgd_epsilon(sigma, n, LIPSCHITZ, delta, rule=rule),
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
    asked: dict[str, Any] = {"epsilon": targets, "delta": delta}
    result = PAPER.result("rules", "one noise scale under four rules", rows, **asked)
    return result.judged(verdicts.of_rules(rows, targets[0]))


def bound(request: ItemRequest) -> Result:
    """Compute the utility bound over n, which does not fall: the loss is a sum."""
    epsilon, delta = budget(request)
    dimension, diameter = 10, 1.0
    sizes = (30, 100, 300, 1000, 3000, 10_000)
    values = []
    for n in sizes:
        sigma = pnsgd.pnsgd_sigma(n, LIPSCHITZ, epsilon, delta)
        values.append(pnsgd.utility_bound(n, LIPSCHITZ, dimension, sigma, diameter))
    rows = [
        ComparisonRow(
            item="bound",
            setting=f"n {n}, d {dimension}, L 1, diameter 1, n^2 steps",
            quantity="bound on the excess of the summed loss",
            ours=value,
            epsilon_claimed=epsilon,
            epsilon_certified=certified_epsilon(
                n, pnsgd.pnsgd_sigma(n, LIPSCHITZ, epsilon, delta), delta=delta
            ),
            relation=RELATION,
        )
        for n, value in zip(sizes, values, strict=True)
    ]
    panel = Panel(
        title="bound on the excess risk",
        x_label="n",
        y_label="sum over records",
        lines=[Line(label=f"epsilon {shown_bound(epsilon)}", x=sizes, y=values)],
        log_x=True,
    )
    title = "utility bound of private projected SGD"
    result = PAPER.result("bound", title, rows, [panel], epsilon=epsilon, delta=delta)
    return result.judged(verdicts.of_bound(rows))


@dataclass(frozen=True, eq=False, kw_only=True)
class Descent:
    """One kind of run of the experiment: data, loss, mechanism, number of steps."""

    name: str
    loss: Logistic
    mechanism: ProjectedSGD
    steps: int
    seeds: int

    @property
    def n(self) -> int:
        return len(self.loss.x)

    @property
    def tight(self) -> bool:
        """Whether the noise is what a certificate asks for, instead of the notes'."""
        return self.name.startswith(TIGHT)

    def piece(self) -> CachedRun:
        """Return the runs of all seeds; the result is their excesses of the summed loss."""
        key = {
            "paper": "pnsgd",
            "loss": self.loss.name,
            "n": self.n,
            "dimension": int(self.loss.x.shape[1]),
            "mechanism": self.mechanism.fingerprint,
            "steps": self.steps,
            "seeds": self.seeds,
        }

        def compute(on_step: OnStep) -> Mapping[str, Any]:
            best = self.loss.least()
            found = []
            for seed in range(self.seeds):
                before = seed * self.steps
                found.append(_descend(self, seed, on_step, before) - best)
            return {"excess": found}

        label = f"{self.loss.name}, {self.name}, n {self.n}"
        return CachedRun(label=label, key=key, compute=compute, steps=self.seeds * self.steps)


def experiment(request: ItemRequest) -> Result:
    """Measure the excess risk of both losses against the bound, beside a run without noise.

    Unit-ball features and parameters: the logistic loss is 1-Lipschitz, least squares 2-Lipschitz.
    The notes' noise is run for n^2 steps. At the largest n there are n steps, with the noise that a
    certificate asks for.
    """
    epsilon, delta = budget(request)
    seeds = request.repeats(LEAST_RUNS)
    n, many = (40, 1000) if request.quick else (100, 100_000)
    runs = []
    for loss in _losses(n):
        private = ProjectedSGD.from_budget(
            n, loss.lipschitz, epsilon, delta, projection=Ball(1.0), mode="published"
        )
        free = replace(private, noise_multiplier=0.0)
        for name, mechanism in ((f"epsilon {shown_bound(epsilon)}", private), (WITHOUT, free)):
            runs.append(
                Descent(name=name, loss=loss, mechanism=mechanism, steps=n * n, seeds=seeds)
            )
    tight_name = f"{TIGHT} {shown_bound(epsilon)}"
    for loss in _losses(many):
        run: dict[str, Any] = {
            "steps": many,
            "sample_rate": 1 / many,
            "delta": delta,
            "sampling": "fixed",
        }
        tight = accounting.calibrate(
            ProjectedSGD(
                n=many,
                noise_multiplier=1.0,
                max_grad_norm=loss.lipschitz,
                projection=Ball(1.0),
            ),
            target_epsilon=epsilon,
            dataset_size=many,
            **run,
        )
        few = LEAST_RUNS if request.quick else 1
        runs.append(
            Descent(name=tight_name, loss=loss, mechanism=tight, steps=many, seeds=min(seeds, few))
        )
    numbers = request.through([run.piece() for run in runs])
    found = {run: of_it["excess"] for run, of_it in zip(runs, numbers, strict=True)}
    rows = [_row_of(run, excess, epsilon, delta) for run, excess in found.items()]
    judged = {
        run.loss.name: (excess, _limit(run))
        for run, excess in found.items()
        if not run.tight and run.mechanism.private
    }
    asked: dict[str, Any] = {"quick": request.quick, "epsilon": epsilon, "delta": delta}
    result = PAPER.result("experiment", "measured excess risk", rows, **asked)
    return result.judged(verdicts.of_excess(judged))


WITHOUT, TIGHT = "without noise", "tight accounting, certified epsilon"


def _limit(run: Descent) -> float:
    """Return the notes' bound on the excess at the run's numbers."""
    n, dimension = run.loss.x.shape
    return pnsgd.utility_bound(n, run.loss.lipschitz, dimension, run.mechanism.sigma, 2.0)


def _row_of(run: Descent, excess: Sequence[float], epsilon: float, delta: float) -> ComparisonRow:
    noised = run.mechanism.private
    n, dimension = run.loss.x.shape
    proved = None
    if noised:
        sigma = run.mechanism.noise_multiplier * n
        proved = certified_epsilon(n, sigma, run.steps, delta=delta)
    return ComparisonRow(
        item="experiment",
        setting=f"{run.loss.name}, {run.name}, n {n}, d {dimension}, {run.steps} steps",
        quantity="excess of the summed loss",
        published=_limit(run) if noised and not run.tight else None,
        ours=sum(excess) / len(excess),
        epsilon_claimed=epsilon if noised else None,
        epsilon_certified=proved,
        relation=RELATION if noised else "",
        data="generated: unit ball",
        seeds=len(excess),
        spread=(max(excess) - min(excess)) / 2,
        note="published: the notes' bound at these numbers",
    )


def _losses(n: int) -> tuple[Logistic, LeastSquares]:
    """Return both losses on the same n generated records."""
    dimension = 5
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(n, dimension, generator=draw, dtype=torch.float64)
    x /= x.norm(dim=1, keepdim=True).clamp(min=1)
    truth = torch.ones(dimension, dtype=torch.float64) / math.sqrt(dimension)
    noisy = x @ truth + 0.1 * torch.randn(n, generator=draw, dtype=torch.float64)
    return Logistic(x, torch.sign(noisy)), LeastSquares(x, noisy.clamp(-1, 1))


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


def _descend(run: Descent, seed: int, on_step: OnStep, before: int) -> float:
    """Return the summed loss after the run's private steps."""
    loss, mechanism = run.loss, run.mechanism
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
    started, after = around(mechanism)
    batches = make_batches(
        "fixed", dataset_size=n, batch_size=1, steps=run.steps, key=Key.from_unsafe_seed(seed)
    )
    for number, rows in enumerate(batches, start=before + 1):
        step.add([loss.gradient(theta, rows)])
        started(step)
        step.finish()
        after(step)
        on_step(number)
    return float(loss.value(theta))


def certified_epsilon(
    n: int, sigma: float, steps: int | None = None, *, delta: float = DELTA
) -> float:
    """Return the certified epsilon of steps on one record each, n^2 by default, replace-one."""
    epsilon, _ = certified(
        events.gaussian(sigma / (n * LIPSCHITZ)),
        neighbouring=RELATION,
        sampling="fixed",
        dataset_size=n,
        sample_rate=1 / n,
        steps=n * n if steps is None else steps,
        delta=delta,
    )
    return epsilon
