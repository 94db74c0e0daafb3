"""Private projected SGD on one random record a step: the notes' derivation, number by number.

    theta_t = Pi( theta_{t-1} - eta_t (n grad l(theta_{t-1}, x_I) + N(0, s^2 I)) ),   I uniform

The notes' chain for T = n^2 steps ends at ``s^2 = 64 n^2 L^2 log(2n/delta) log(2/delta) / eps^2``.
``epsilon`` gives what each rule makes of a noise scale; only ``dpkern.accounting`` certifies.

Reference: lecture notes on private projected SGD, subsampling and local differential privacy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from ...base.validate import choice, integer, open_unit, positive
from . import composition, rdp

RULES = ("notes", "full_advanced", "exact_amplification", "rdp")
"""The notes' leading term; with the dropped second term; with the exact amplification as well;
Renyi accounting of the sampled Gaussian."""


class Chain(NamedTuple):
    """The five steps of the notes, for one noise scale.

    Attributes:
        step_delta: delta_0 of one release, before sampling.
        slack: delta' of advanced composition.
        query: 1. epsilon_0 of one release on the whole data.
        sampled: 2. after the simplified amplification, epsilon and delta.
        composed: 3. after T steps, leading term only, epsilon and delta.
        total: 4. the same as a function of n alone where T = n^2.
        sigma: 5. the noise scale that makes ``total`` the wanted epsilon.
    """

    step_delta: float
    slack: float
    query: float
    sampled: composition.Budget
    composed: composition.Budget
    total: float
    sigma: float


def pnsgd_sigma(n: int, lipschitz: float, epsilon: float, delta: float) -> float:
    """Return the noise scale for T = n^2: ``8 n L sqrt(log(2n/delta) log(2/delta)) / epsilon``.

    Raises:
        InvalidInput: a number out of its range.
    """
    integer(1, n=n)
    positive(lipschitz=lipschitz)
    positive(epsilon=epsilon)
    logs = math.log(2 * n / open_unit(delta=delta)) * math.log(2 / delta)
    return 8 * n * lipschitz * math.sqrt(logs) / epsilon


def pnsgd_chain(
    sigma: float, n: int, lipschitz: float, delta: float, *, steps: int | None = None
) -> Chain:
    """Run steps 1 to 5 of the notes; half of delta goes to the releases, half to the slack.

    Raises:
        InvalidInput: a number out of its range.
    """
    positive(sigma=sigma)
    integer(1, n=n)
    positive(lipschitz=lipschitz)
    count = n * n if steps is None else integer(1, steps=steps)
    # Few steps of many records would give a release more delta than the whole run has.
    step_delta = min(open_unit(delta=delta) * n / (2 * count), delta / 2)
    query = 2 * n * lipschitz / sigma * math.sqrt(2 * math.log(1 / step_delta))
    sampled = composition.amplified_simplified(query, step_delta, 1 / n)
    composed = composition.advanced(*sampled, count, delta / 2, second_term=False)
    logs = 2 * math.sqrt(math.log(2 * n / delta) * math.log(2 / delta))
    return Chain(
        step_delta=step_delta,
        slack=delta / 2,
        query=query,
        sampled=sampled,
        composed=composed,
        total=4 * lipschitz * n / sigma * logs,
        sigma=pnsgd_sigma(n, lipschitz, composed[0], delta),
    )


def pnsgd_epsilon(
    sigma: float,
    n: int,
    lipschitz: float,
    delta: float,
    *,
    rule: str = "notes",
    steps: int | None = None,
) -> float:
    """Return epsilon of T steps under one of ``RULES``. None stands for n^2 steps.

    Raises:
        InvalidInput: an unknown rule, or a number out of its range.
    """
    choice(RULES, rule=rule)
    chain = pnsgd_chain(sigma, n, lipschitz, delta, steps=steps)
    count = n * n if steps is None else int(steps)
    if rule == "notes":
        return chain.composed[0]
    if rule == "full_advanced":
        return composition.advanced(*chain.sampled, count, chain.slack)[0]
    if rule == "exact_amplification":
        sampled = composition.amplified(chain.query, chain.step_delta, 1 / n)
        return composition.advanced(*sampled, count, chain.slack)[0]
    return rdp.rdp_epsilon(1 / n, sigma / (2 * n * lipschitz), count, delta).epsilon


def gradient_bound(n: int, lipschitz: float, dimension: int, sigma: float) -> float:
    """Return ``G = sqrt(n^2 L^2 + d s^2)``, the root mean squared norm of one noisy gradient.

    Raises:
        InvalidInput: a number out of its range.
    """
    integer(1, n=n)
    integer(1, dimension=dimension)
    positive(lipschitz=lipschitz)
    if sigma:
        positive(sigma=sigma)
    return math.hypot(n * lipschitz, math.sqrt(dimension) * sigma)


def utility_bound(
    n: int,
    lipschitz: float,
    dimension: int,
    sigma: float,
    diameter: float,
    *,
    steps: int | None = None,
) -> float:
    """Return ``diameter G log(T) / sqrt(T)``.

    It bounds the mean excess of the summed loss after T steps.

    It does not fall with n: the loss is a sum.

    Raises:
        InvalidInput: a number out of its range.
    """
    count = n * n if steps is None else integer(2, steps=steps)
    bound = gradient_bound(n, lipschitz, dimension, sigma)
    return positive(diameter=diameter) * bound * math.log(count) / math.sqrt(count)


def step_sizes(diameter: float, bound: float) -> Callable[[int], float]:
    """Return ``eta_t = diameter / (G sqrt(t))`` for t = 1, 2, ...

    Raises:
        InvalidInput: a number that is not positive.
    """
    first = positive(diameter=diameter) / positive(bound=bound)
    return lambda t: first / math.sqrt(t)
