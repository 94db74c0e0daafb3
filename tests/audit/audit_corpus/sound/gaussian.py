"""Gaussian releases that keep what they claim."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Generator, Tensor

from dpkern.audit import sensitivity
from dpkern.audit.claims import GaussianDP
from dpkern.audit.findings import Check
from dpkern.audit.subject import Pair
from dpkern.base.laws import SCALE_CELLS, SCALE_UNITS
from dpkern.base.rng import Key, Purpose, Stream
from dpkern.ops import clip as clip_ops
from dpkern.ops import noise as noise_ops

from ..broken.sources import complex_noise, low_pass, tone
from ..broken.trainer import LAYERS, per_layer
from ..kit import (
    GRID,
    Asked,
    Case,
    Mechanism,
    Neighbours,
    Release,
    add_record,
    bounded,
    clip,
    fixed,
    normal,
    unit,
)

SIGMA = 1.1
D = 16
SCALES = torch.logspace(-1, 1, D, dtype=torch.float64)


def dpsgd(records: Tensor, runs: int, generator: Generator) -> Tensor:
    """``sum clip(g) + N(0, SIGMA^2 I)``."""
    return clip(records).sum(0) + normal(runs, records.shape[1], generator, SIGMA)


def clipped_sum(records: Tensor) -> Tensor:
    """Return the clipped sum without noise."""
    return clip(records).sum(0)


def constant_mean(records: Tensor, runs: int, generator: Generator) -> Tensor:
    """Divided by the expected batch size, a public constant."""
    return dpsgd(records, runs, generator) / 8


def whitened(records: Tensor, runs: int, generator: Generator) -> Tensor:
    """AdaClip: ``s (clip(g / s) + noise)``."""
    return SCALES * (clip(records / SCALES).sum(0) + normal(runs, D, generator, SIGMA))


def two_steps(records: Tensor, runs: int, generator: Generator) -> Tensor:
    """Fresh noise in each step."""
    total = clip(records.reshape(len(records), 2, D)).sum(0).reshape(-1)
    return total + normal(runs, 2 * D, generator, SIGMA)


def orthonormal_rfft(records: Tensor, runs: int, generator: Generator) -> Tensor:
    """Noise in rfft's bins with sd SIGMA on DC and Nyquist, SIGMA / sqrt 2 on other parts."""
    sd = torch.full((D // 2 + 1,), SIGMA / math.sqrt(2), dtype=torch.float64)
    sd[[0, -1]] = SIGMA
    real = normal(runs, D // 2 + 1, generator) * sd
    imaginary = normal(runs, D // 2 + 1, generator) * sd
    noise = torch.fft.irfft(torch.complex(real, imaginary), n=D, norm="ortho")
    return clip(records).sum(0) + noise


def filtered(records: Tensor, runs: int, generator: Generator) -> Tensor:
    """A fixed filter after the noise is post-processing."""
    return low_pass(dpsgd(records, runs, generator))


def filtered_first(records: Tensor, runs: int, generator: Generator) -> Tensor:
    """Filter each gradient, then clip, then noise."""
    return dpsgd(low_pass(records), runs, generator)


def shared_seed_of_ranks(records: Tensor, runs: int, generator: Generator) -> Tensor:
    """Four ranks with one noise key: the average of four equal draws is that draw."""
    noise = normal(runs, D, generator, SIGMA)
    return clip(records).sum(0) + (noise + noise + noise + noise) / 4


def noise_streams(generator: Generator) -> dict[str, Stream]:
    """Streams of a key that the generator chooses, so that an audit can be repeated."""
    key = Key.from_unsafe_seed(int(torch.randint(2**62, (), generator=generator)))
    return {"stream": key.stream(Purpose.NOISE, 0), "rounding": key.stream(Purpose.ROUNDING, 0)}


def float_kernel(records: Tensor, runs: int, generator: Generator) -> Tensor:
    """dpkern's noise on the float32 sum, all runs as one call."""
    total = clip(records).sum(0).float().expand(runs, -1).contiguous()
    return noise_ops.add_noise(total, scale=SIGMA, **noise_streams(generator))


UNIT = SIGMA / SCALE_UNITS


def integer_sum(records: Tensor) -> Tensor:
    """dpkern's clip in integers, counts of ``UNIT``."""
    return clip_ops.clip_sum(records.float(), 1.0, arithmetic="exact", unit=UNIT).sums[0]


def integer_checks(quick: bool) -> Sequence[Check]:
    """The same sum with hostile records, without any slack."""
    given = sensitivity.Summation(summed=integer_sum, bound=1.0, unit=UNIT, widths=(1, 3, 1000))
    return sensitivity.checks(given, quick=quick)


def exact_kernel(records: Tensor, runs: int, generator: Generator) -> Tensor:
    """dpkern's noise on its integer sum, as counts of the output cell."""
    total = integer_sum(records).expand(runs, -1).contiguous()
    cells = noise_ops.add_noise(total, stream=noise_streams(generator)["stream"])
    return cells.to(torch.float64) * (SIGMA / SCALE_CELLS)


def row(
    name: str,
    mechanism: Mechanism,
    mu: float,
    *,
    neighbours: Neighbours | None = None,
    sd: float | None = SIGMA,
    grid: float | None = GRID,
    truth: float | None = None,
    asked: Asked | None = None,
) -> Case:
    """A row whose certificate is its claim."""
    subject = Release(
        name=name,
        claimed=GaussianDP(mu),
        certified=GaussianDP(mu),
        mechanism=mechanism,
        neighbours=neighbours or add_record(D),
        sd=sd,
        grid=grid,
        asked=asked,
    )
    return Case(subject=subject, truth=mu if truth is None else truth, source="control")


MU = 1 / SIGMA
CLAIM = GaussianDP(MU)
EMPTY = torch.zeros(0, D, dtype=torch.float64)
TONES = fixed(*(Pair(name=f"tone {k}", without=EMPTY, present=tone(k)[None]) for k in range(3)))

CASES = (
    row("DP-SGD", dpsgd, MU, asked=bounded(clipped_sum)),
    row("DP-SGD divided by a constant", constant_mean, MU, sd=SIGMA / 8),
    row(
        "AdaClip",
        whitened,
        MU,
        neighbours=fixed(
            Pair(name="coordinate", without=EMPTY, present=(SCALES * unit(D))[None]),
            Pair(name="uniform", without=EMPTY, present=(SCALES / math.sqrt(D))[None]),
        ),
        sd=None,
    ),
    row("two steps", two_steps, math.sqrt(2) * MU, neighbours=add_record(D, (1.0, 1.0))),
    row(
        "per-layer clip accounted as such",
        per_layer,
        math.sqrt(LAYERS) * MU,
        neighbours=add_record(D // LAYERS, (1.0,) * LAYERS),
    ),
    row("GReDP parts of full sd", partial(complex_noise, a=SIGMA, b=SIGMA), MU),
    row(
        "GReDP accounted for its output",
        partial(complex_noise, a=SIGMA / math.sqrt(2), b=SIGMA / math.sqrt(2)),
        math.sqrt(2) * MU,
        sd=SIGMA / math.sqrt(2),
    ),
    row("orthonormal rfft noise", orthonormal_rfft, MU),
    row("Spectral-DP fixed filter", filtered, MU, neighbours=TONES, sd=None),
    row("Spectral-DP filter before the clip", filtered_first, MU),
    row("one noise key for all ranks", shared_seed_of_ranks, MU),
    row(
        "NaN becomes zero",
        dpsgd,
        MU,
        truth=0.0,
        neighbours=fixed(
            Pair(name="NaN", without=EMPTY, present=torch.full((1, D), math.nan).double()),
            Pair(name="infinity", without=EMPTY, present=torch.full((1, D), math.inf).double()),
        ),
    ),
    row("dpkern float tier", float_kernel, MU, grid=None),
    row("dpkern exact tier", exact_kernel, MU, grid=None, asked=integer_checks),
)
