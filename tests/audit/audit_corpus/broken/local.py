"""False claims about Laplace noise and randomized response: SPOF, AdLM, and a wrong bound."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Generator, Tensor

from dpkern.audit.claims import PureDP
from dpkern.audit.likelihood import LaplaceRatio, ResponseRatio, rounded
from dpkern.audit.subject import Pair
from dpkern.privacy.theory import spof_sensitivity

from ..kit import Case, Mechanism, Release, clip, fixed, laplace, laplace_pair, rows, unit

EPSILON = 1.0
CODE = 8


def coefficients(records: Tensor) -> Tensor:
    """SPOF's (alpha_2, alpha_3) = (1/2 - x, x/2 - 1/4) of one record with one feature."""
    x = records[0, 0]
    return torch.stack([0.5 - x, 0.5 * x - 0.25])


def split_noise(records: Tensor, runs: int, generator: Generator) -> Tensor:
    """Laplace noise "split" in two of half the variance: sqrt 2 too little for each."""
    scale = spof_sensitivity.spof_scale(1, EPSILON, 0.0)
    return coefficients(records) + laplace(runs, 2, generator, scale)


def own_scale(records: Tensor, runs: int, generator: Generator) -> Tensor:
    """The scale follows c_j = c sum h_j, which the record itself determines."""
    scale = spof_sensitivity.spof_scale(1, EPSILON, float(records[0, 1]))
    return coefficients(records) + laplace(runs, 2, generator, scale)


def scale_ratio(y: Tensor, *, without: Tensor, present: Tensor) -> Tensor:
    """The log-likelihood ratio of two records whose noise has different scales."""
    far, scales = [], []
    for record in (without, present):
        scale = spof_sensitivity.spof_scale(1, EPSILON, float(record[0, 1]))
        far.append((y - coefficients(record)).abs().sum(-1) / scale)
        scales.append(scale)
    return rounded(far[0] - far[1] + 2 * math.log(scales[0] / scales[1]))


def codes(records: Tensor) -> Tensor:
    """A public encoder's hidden vector: sigmoid of fixed weights."""
    weights = torch.randn(CODE, 4, generator=Generator().manual_seed(3), dtype=torch.float64)
    return torch.sigmoid(records[0] @ weights.T)


def decoder_gradient(records: Tensor, runs: int, generator: Generator) -> Tensor:
    """h (x) (alpha_2 + noise): every column is a multiple of the private code h."""
    scale = spof_sensitivity.spof_scale(4, EPSILON, 0.0)
    noisy = 0.5 - records[0] + laplace(runs, 4, generator, scale)
    return (codes(records)[:, None] * noisy[:, None, :]).reshape(runs, -1)


def outside_span(y: Tensor, *, code: Tensor) -> Tensor:
    """Share of the gradient outside the span of a code; 0 for the record whose code it is."""
    gradient = y.reshape(len(y), CODE, -1)
    h = code / code.norm()
    rest = gradient - h[:, None] * (h @ gradient)[:, None, :]
    share = rest.square().sum((1, 2)) / gradient.square().sum((1, 2))
    return torch.round(share * 1e6) / 1e6


ADLM = {"batch": 1800, "hidden": 32, "epsilon": 0.1, "features": 784}
"""AdLM's published setting for MNIST: |L|, |h_0|, epsilon_2, d."""


def adlm_scale() -> float:
    """``2 |h0| d / (|L| beta epsilon_2)`` of the one relevant feature, beta = d."""
    return 2 * ADLM["hidden"] / (ADLM["batch"] * ADLM["epsilon"])


def adlm_independent(records: Tensor, runs: int, generator: Generator) -> Tensor:
    """Noise for the sum of the batch on each tuple by itself."""
    return records[0] + laplace(runs, records.shape[1], generator, adlm_scale())


def adlm_shared(records: Tensor, runs: int, generator: Generator) -> Tensor:
    """One draw for all tuples: their differences carry no noise."""
    noise = laplace(runs, records.shape[1], generator, 1 / ADLM["epsilon"])
    return (records[None] + noise[:, None]).reshape(runs, -1)


def private_relevance(records: Tensor, runs: int, generator: Generator) -> Tensor:
    """Mean relevance by a net that one of 1000 tuples can turn over, noised for a fixed net."""
    moved = float(records.amin() < 0)
    return moved + laplace(runs, 1, generator, 2 / 1000 / EPSILON)


def l2_clip(records: Tensor, runs: int, generator: Generator) -> Tensor:
    """Laplace noise for an L1 bound of 1 on gradients with an L2 bound of 1."""
    return clip(records).sum(0) + laplace(runs, records.shape[1], generator, 1 / EPSILON)


KEPT = 1 / (1 + math.exp(-EPSILON))
"""The probability of the kept symbol that is right for two symbols."""


def wrong_arity(records: Tensor, runs: int, generator: Generator) -> Tensor:
    """Ten symbols, kept with the probability that is right for two."""
    kept = torch.rand(runs, generator=generator) < KEPT
    other = torch.randint(1, 10, (runs,), generator=generator)
    symbol = int(records[0, 0])
    return torch.where(kept, symbol, (symbol + other) % 10)[:, None].double()


def row(
    name: str,
    mechanism: Mechanism,
    pair: Pair,
    truth: float,
    layer: str,
    source: str,
    *,
    claim: float = EPSILON,
) -> Case:
    """A row with one pair."""
    subject = Release(name=name, claimed=PureDP(claim), mechanism=mechanism, neighbours=fixed(pair))
    return Case(subject=subject, truth=truth, layers=(layer,), source=source)


ZERO, ONE = rows([0.0]), rows([1.0])
SMALL, LARGE = rows([0.0, 0.0]), rows([1.0, 2.5])
BLACK, WHITE = rows([0.0] * 4), rows([1.0] * 4)

CASES = (
    row(
        "SPOF split noise",
        split_noise,
        Pair(
            name="target",
            without=ZERO,
            present=ONE,
            score=LaplaceRatio(
                coefficients(ZERO), coefficients(ONE), spof_sensitivity.spof_scale(1, EPSILON, 0.0)
            ),
            layer="likelihood",
        ),
        math.sqrt(2),
        "likelihood",
        "SPOF, algorithm 1 step 5",
    ),
    row(
        "SPOF scale from the record",
        own_scale,
        Pair(
            name="constant",
            without=SMALL,
            present=LARGE,
            score=partial(scale_ratio, without=SMALL, present=LARGE),
            layer="likelihood",
        ),
        math.inf,
        "likelihood",
        "SPOF, (32): c_j from the record's code",
    ),
    row(
        "SPOF decoder gradient",
        decoder_gradient,
        Pair(
            name="span of the code",
            without=BLACK,
            present=WHITE,
            score=partial(outside_span, code=codes(BLACK)),
        ),
        math.inf,
        "canary",
        "SPOF: the loss is noised, the gradient released",
    ),
    row(
        "AdLM independent draws",
        adlm_independent,
        laplace_pair(
            "pixel",
            torch.zeros(1, dtype=torch.float64),
            torch.ones(1, dtype=torch.float64),
            adlm_scale(),
        ),
        ADLM["batch"] * ADLM["epsilon"] / (2 * ADLM["hidden"]),
        "likelihood",
        "AdLM, algorithm 1 lines 12-13 and (20)-(21)",
        claim=ADLM["epsilon"],
    ),
    row(
        "AdLM shared draws",
        adlm_shared,
        Pair(
            name="one of two tuples",
            without=torch.zeros(2, 4, dtype=torch.float64),
            present=torch.stack([unit(4), 0 * unit(4)]),
        ),
        math.inf,
        "canary",
        "AdLM's published code: generateNoise broadcast to the batch",
        claim=ADLM["epsilon"],
    ),
    row(
        "AdLM private relevance net",
        private_relevance,
        Pair(name="turned net", without=rows([1.0]), present=rows([-1.0])),
        500.0,
        "canary",
        "AdLM, relevance from a net trained on the data",
    ),
    row(
        "Laplace noise after an L2 clip",
        l2_clip,
        laplace_pair(
            "uniform",
            torch.zeros(4, dtype=torch.float64),
            torch.full((4,), 0.5, dtype=torch.float64),
            1.0,
        ),
        2.0,
        "likelihood",
        "SPOF, algorithm 2: Laplace noise on L2-clipped gradients",
    ),
    row(
        "randomized response of wrong arity",
        wrong_arity,
        Pair(
            name="symbol",
            without=ZERO,
            present=ONE,
            score=ResponseRatio(0, 1, keep=KEPT, lie=(1 - KEPT) / 9),
            layer="likelihood",
        ),
        EPSILON + math.log(9),
        "likelihood",
        "keep probability of a coin for ten symbols",
    ),
)
