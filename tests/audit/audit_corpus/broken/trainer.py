"""Mistakes of trainers, as releases of gradients: clip to norm 1, claim mu = 1 / SIGMA."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial

import numpy as np
import torch
from torch import Generator, Tensor

from dpkern.audit.claims import GaussianDP
from dpkern.audit.subject import Pair

from ..kit import (
    Case,
    Mechanism,
    Neighbours,
    Release,
    add_record,
    bounded,
    clip,
    fixed,
    normal,
    rows,
    unit,
)

SIGMA = 1.1
CLAIM = GaussianDP(1 / SIGMA)
D = 16
LAYERS = 4


def per_layer(records: Tensor, runs: int, generator: Generator) -> Tensor:
    """Every layer is clipped to 1 and gets noise for 1: together that is 2."""
    layers = records.reshape(len(records), LAYERS, D // LAYERS)
    total = clip(layers).sum(0).reshape(-1)
    return total + normal(runs, len(total), generator, SIGMA)


def noisy(
    records: Tensor, runs: int, generator: Generator, *, summed: Callable[[Tensor], Tensor]
) -> Tensor:
    """``summed(records) + N(0, SIGMA^2 I)``."""
    return summed(records) + normal(runs, records.shape[1], generator, SIGMA)


def duplicated_lanes(records: Tensor, runs: int, generator: Generator) -> Tensor:
    """The second half of the lanes draws what the first half drew."""
    half = normal(runs, D // 2, generator, SIGMA)
    return clip(records).sum(0) + torch.cat([half, half], dim=-1)


def correlated_pair(records: Tensor, runs: int, generator: Generator) -> Tensor:
    """Two lanes have three quarters of their noise in common: little is left of the difference."""
    noise = normal(runs, D, generator, SIGMA)
    noise[:, 2] = 0.75 * noise[:, 1] + math.sqrt(1 - 0.75**2) * noise[:, 2]
    return clip(records).sum(0) + noise


def one_seed_per_layer(records: Tensor, runs: int, generator: Generator) -> Tensor:
    """The generator is seeded anew before every layer."""
    layer = normal(runs, D // LAYERS, generator, SIGMA)
    return clip(records).sum(0) + layer.repeat(1, LAYERS)


def noise_before_clip(records: Tensor, runs: int, generator: Generator) -> Tensor:
    """Noise on each gradient and then the clip: a large gradient drowns it."""
    total = torch.zeros(runs, D, dtype=torch.float64)
    for record in records:
        total += clip(record + normal(runs, D, generator, SIGMA))
    return total


def realised_size(records: Tensor, runs: int, generator: Generator) -> Tensor:
    """The noisy sum is divided by the number of records that came."""
    return (clip(records).sum(0) + normal(runs, D, generator, SIGMA)) / len(records)


def averaged_ranks(records: Tensor, runs: int, generator: Generator) -> Tensor:
    """Each of four ranks adds its own noise to the sum; the average has half the sd."""
    noise = sum(normal(runs, D, generator, SIGMA) for _ in range(4)) / 4
    return clip(records).sum(0) + noise


def by_value(records: Tensor) -> Tensor:
    """Every coordinate is clipped to 1, not the norm."""
    return records.nan_to_num(0.0).clamp(-1, 1).sum(0)


def added_twice(records: Tensor) -> Tensor:
    """A second backward adds the clipped gradients to those that are there."""
    total = clip(records).sum(0)
    return total + total


def not_a_number(records: Tensor) -> Tensor:
    """``g min(1, 1 / ||g||)`` of a NaN is NaN."""
    norm = torch.linalg.vector_norm(records, dim=-1, keepdim=True)
    return (records * torch.minimum(torch.ones_like(norm), 1 / norm)).sum(0)


def batch_norm(records: Tensor) -> Tensor:
    """Centred by the batch: one record moves what every other contributes."""
    if not len(records):
        return records.sum(0)
    finite = records.nan_to_num(0.0, 0.0, 0.0)
    return clip(10 * (finite - finite.mean(0))).sum(0)


BALANCED = torch.stack([sign * unit(D) for sign in (1, -1) * 4])


def float32_clip(records: Tensor) -> Tensor:
    """Norm, factor and product in float32: above the bound in every other case, by 1e-7."""
    return clip(records.float()).double().sum(0)


class Leftover:
    """Gradients of the last batch that nobody set to zero."""

    def __init__(self) -> None:
        self.left: Tensor | None = None

    def __call__(self, records: Tensor) -> Tensor:
        total = clip(records).sum(0)
        if self.left is not None and self.left.shape == total.shape:
            total = total + self.left
        self.left = total
        return total


@cache
def stagnant_norm(size: int) -> float:
    """Norm of a vector of ones, its squares added one by one in float32: stuck at 2^24."""
    total = np.float32(0)
    ones = np.ones(1 << 20, dtype=np.float32)
    for _ in range(size >> 20):
        ones[0] = total + np.float32(1)
        total = np.add.accumulate(ones)[-1]
    return math.sqrt(total)


def stagnation(records: Tensor, runs: int, generator: Generator) -> Tensor:
    """The coordinate along (1, ..., 1) of a clipped record of so many ones, plus noise."""
    total = sum(
        math.sqrt(size) * min(1.0, 1 / stagnant_norm(int(size))) for size in records[:, 0].tolist()
    )
    return total + normal(runs, 1, generator, SIGMA)


def uniform_noise(records: Tensor, runs: int, generator: Generator) -> Tensor:
    """Noise of the right variance, with ends."""
    u = 2 * torch.rand(runs, D, generator=generator, dtype=torch.float64) - 1
    return clip(records).sum(0) + math.sqrt(3) * SIGMA * u


def cut_tails(records: Tensor, runs: int, generator: Generator) -> Tensor:
    """Noise beyond 2 sd is moved to 2 sd."""
    noise = normal(runs, D, generator).clamp(-2, 2)
    return clip(records).sum(0) + SIGMA * noise


def seeded(records: Tensor, runs: int, generator: Generator) -> Tensor:
    """The same seed for every training."""
    noise = normal(1, D, generator.manual_seed(42), SIGMA)
    return (clip(records).sum(0) + noise).expand(runs, -1)


def plain(
    name: str,
    mechanism: Mechanism,
    truth: float,
    layers: tuple[str, ...],
    source: str,
    *,
    bounds: Sequence[float] = (1.0,),
) -> Case:
    """A row whose neighbours are a record at the boundary or none."""
    neighbours = add_record(D // len(bounds), bounds)
    subject = Release(
        name=name, claimed=CLAIM, mechanism=mechanism, neighbours=neighbours, sd=SIGMA
    )
    return Case(subject=subject, truth=truth, layers=layers, source=source)


def special(name: str, mechanism: Mechanism, pair: Pair, truth: float, source: str) -> Case:
    """A row with neighbours of its own."""
    subject = Release(name=name, claimed=CLAIM, mechanism=mechanism, neighbours=fixed(pair))
    return Case(subject=subject, truth=truth, layers=("canary",), source=source)


def sums(
    name: str,
    summed: Callable[[Tensor], Tensor],
    fails: tuple[str, ...],
    truth: float,
    source: str,
    *,
    neighbours: Neighbours | None = None,
    seen: bool = True,
    dtype: torch.dtype = torch.float64,
) -> Case:
    """A row whose sum is asked too; ``seen``: by a canary as well; ``dtype``: of the records."""
    subject = Release(
        name=name,
        claimed=CLAIM,
        mechanism=partial(noisy, summed=summed if seen else exact_sum),
        neighbours=neighbours or add_record(D),
        asked=bounded(summed, dtype=dtype),
    )
    layers = ("canary", "sensitivity") if seen else ("sensitivity",)
    return Case(subject=subject, truth=truth, layers=layers, fails=fails, source=source)


def exact_sum(records: Tensor) -> Tensor:
    """Return the right sum, up to what no output can show."""
    return clip(records).sum(0)


CANARY = ("canary",)
BOTH = ("covariance", "canary")
EMPTY = torch.zeros(0, D, dtype=torch.float64)

CASES = (
    plain(
        "per-layer clip accounted flat",
        per_layer,
        2 / SIGMA,
        CANARY,
        "GReDP and others: clip c for each layer, accounted as clip c",
        bounds=(1.0,) * LAYERS,
    ),
    plain("duplicated lanes", duplicated_lanes, math.inf, BOTH, "a kernel's counter"),
    plain("correlated lanes", correlated_pair, 2 / SIGMA, BOTH, "a weak generator"),
    plain("one seed per layer", one_seed_per_layer, math.inf, BOTH, "manual_seed in a loop"),
    plain("same seed every run", seeded, math.inf, BOTH, "manual_seed(42)"),
    plain("noise on every rank averaged", averaged_ranks, 2 / SIGMA, BOTH, "distributed training"),
    plain("uniform noise", uniform_noise, math.inf, CANARY, "right variance, wrong law"),
    plain("tails cut at 2 sd", cut_tails, math.inf, CANARY, "bounded noise"),
    special(
        "noise before the clip",
        noise_before_clip,
        Pair(
            name="huge record",
            without=1e6 * unit(D, 1)[None],
            present=1e6 * torch.stack([unit(D, 1), unit(D)]),
        ),
        math.inf,
        "noise and clip in the wrong order",
    ),
    special(
        "divided by the realised batch size",
        realised_size,
        Pair(
            name="against nine",
            without=unit(D).expand(9, -1),
            present=torch.cat([unit(D).expand(9, -1), -unit(D)[None]]),
        ),
        math.inf,
        "a mean over a Poisson batch",
    ),
    sums(
        "clip by value",
        by_value,
        ("bounded norm",),
        4 / SIGMA,
        "clip_grad_value_",
        neighbours=add_record(D, (4.0,)),
    ),
    sums("second backward added", added_twice, ("bounded norm",), 2 / SIGMA, "backward twice"),
    sums(
        "NaN passes the clip",
        not_a_number,
        ("records that are not finite",),
        math.inf,
        "min(1, C / norm)",
        neighbours=fixed(
            Pair(
                name="NaN",
                without=EMPTY,
                present=torch.full((1, D), math.nan, dtype=torch.float64),
            )
        ),
    ),
    sums(
        "batch norm mixes samples",
        batch_norm,
        ("remove one record",),
        7 / SIGMA,
        "clipping behind a batch norm",
        neighbours=fixed(
            Pair(
                name="far record",
                without=BALANCED,
                present=torch.cat([BALANCED, 100 * unit(D)[None]]),
            )
        ),
    ),
    sums(
        "clip in float32",
        float32_clip,
        ("bounded norm",),
        1 / SIGMA,
        "float32 norms and factors",
        seen=False,
        dtype=torch.float32,
    ),
    sums(
        "gradients not zeroed",
        Leftover(),
        ("repeated call",),
        1 / SIGMA,
        "optimizer.zero_grad() left out",
        seen=False,
    ),
    special(
        "float32 norm stagnates",
        stagnation,
        Pair(name="2^26 ones", without=EMPTY, present=rows([2.0**26])),
        2 / SIGMA,
        "sequential float32 sum of squares",
    ),
)
