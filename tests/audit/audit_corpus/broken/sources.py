"""False claims about Gaussian noise that stand in the sources, as releases of gradients.

All clip to norm 1 and claim mu = 1 / SIGMA.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Generator, Tensor

from dpkern.audit.claims import GaussianDP
from dpkern.audit.subject import Pair
from dpkern.papers.directional import optimum as directional

from ..kit import Case, Release, add_record, bounded, clip, fixed, normal, unit

SIGMA = 1.1
CLAIM = GaussianDP(1 / SIGMA)
D = 16


def complex_noise(
    records: Tensor, runs: int, generator: Generator, *, a: float, b: float
) -> Tensor:
    """``sum clip(g) + Re F^-1(tau)``, tau of real sd ``a`` and imaginary sd ``b``, F unitary.

    Covariance ``((a^2 + b^2) I + (a^2 - b^2) P) / 2`` with P: n -> -n mod N.
    """
    real, imaginary = normal(runs, D, generator, a), normal(runs, D, generator, b)
    noise = torch.fft.ifft(torch.complex(real, imaginary), norm="ortho").real
    return clip(records).sum(0) + noise


def rfft_noise(records: Tensor, runs: int, generator: Generator) -> Tensor:
    """sd SIGMA / sqrt 2 on each part of rfft's bins: too little for DC and Nyquist."""
    sd, bins = SIGMA / math.sqrt(2), D // 2 + 1
    spectrum = torch.complex(normal(runs, bins, generator, sd), normal(runs, bins, generator, sd))
    return clip(records).sum(0) + torch.fft.irfft(spectrum, n=D, norm="ortho")


KEPT = 4


def low_pass(y: Tensor) -> Tensor:
    """The ``KEPT`` lowest frequencies, back in time: a projection of rank 2 KEPT - 1."""
    spectrum = torch.fft.rfft(torch.eye(D, dtype=torch.float64), norm="ortho")
    spectrum[:, KEPT:] = 0
    return y @ torch.fft.irfft(spectrum, n=D, norm="ortho")


def spectral_circular(records: Tensor, runs: int, generator: Generator) -> Tensor:
    """Complex noise of total variance SIGMA^2, then all but the low frequencies dropped."""
    part = SIGMA / math.sqrt(2)
    return low_pass(complex_noise(records, runs, generator, a=part, b=part))


def spectral_mask(records: Tensor, runs: int, generator: Generator) -> Tensor:
    """Which frequencies are kept is read off the sum before the noise: the zeros tell."""
    total = clip(records).sum(0)
    size = torch.fft.rfft(total, norm="ortho").abs()
    kept = size >= size.topk(KEPT).values[-1]
    noisy = torch.fft.rfft(total + normal(runs, D, generator, SIGMA), norm="ortho")
    full = torch.fft.fft(torch.fft.irfft(noisy * kept, n=D, norm="ortho"), norm="ortho")
    return torch.cat([full.real, full.imag], dim=-1)


def tone(frequency: int) -> Tensor:
    """A cosine of norm 1."""
    wave = torch.cos(2 * math.pi * frequency * torch.arange(D, dtype=torch.float64) / D)
    return wave / wave.norm()


def silent(y: Tensor, *, frequency: int) -> Tensor:
    """1 where this frequency was dropped (to the grid of the outputs)."""
    return (y[:, frequency].hypot(y[:, D + frequency]) < 1e-4).to(torch.float64)


WEIGHTS = torch.arange(1, D + 1, dtype=torch.float64) ** 3
PRINTED = torch.from_numpy(directional.printed_sigma(WEIGHTS.numpy(), 1.0, 1 / SIGMA**2))


def directional_noise(records: Tensor, runs: int, generator: Generator) -> Tensor:
    """Equations (11) with (13): sd ~ \\|w_i\\|^(1/3), almost none where w is small."""
    return clip(records).sum(0) + normal(runs, D, generator) * PRINTED


def aggregate(records: Tensor) -> Tensor:
    """The aggregate is clipped to 1 and not each record: its diameter is 2."""
    return clip(records.sum(0))


def aggregate_clipped(records: Tensor, runs: int, generator: Generator) -> Tensor:
    return aggregate(records) + normal(runs, D, generator, SIGMA)


def noise_per_sample(records: Tensor, runs: int, generator: Generator) -> Tensor:
    """Noise inside the loop over the samples: its variance tells how many there were."""
    sd = SIGMA * math.sqrt(len(records))
    return clip(records).sum(0) + normal(runs, records.shape[1], generator, sd)


def gredp(name: str, a: float, b: float) -> Release:
    return Release(
        name=name,
        claimed=CLAIM,
        mechanism=partial(complex_noise, a=a * SIGMA, b=b * SIGMA),
        neighbours=add_record(D),
        sd=SIGMA,
    )


BOTH = ("covariance", "canary")
WIDE = 32

CASES = (
    Case(
        subject=gredp("GReDP complex", math.sqrt(0.5), math.sqrt(0.5)),
        truth=math.sqrt(2) / SIGMA,
        layers=BOTH,
        source="GReDP, theorem 1: half the noise at the same privacy",
    ),
    Case(
        subject=gredp("GReDP real", 1.0, 0.0),
        truth=math.inf,
        layers=BOTH,
        source="GReDP, algorithm 1 and corollary 1: real noise",
    ),
    Case(
        subject=gredp("GReDP unequal parts", 0.9, 0.436),
        truth=1 / (0.436 * SIGMA),
        layers=BOTH,
        source="GReDP, theorem 2: a != b",
    ),
    Case(
        subject=Release(
            name="rfft noise",
            claimed=CLAIM,
            mechanism=rfft_noise,
            neighbours=add_record(D),
            sd=SIGMA,
        ),
        truth=math.sqrt(2) / SIGMA,
        layers=BOTH,
        source="sd sigma / sqrt 2 for each part of each bin",
    ),
    Case(
        subject=Release(
            name="Spectral-DP circular noise",
            claimed=CLAIM,
            mechanism=spectral_circular,
            neighbours=fixed(
                *(
                    Pair(
                        name=f"frequency {k}",
                        without=torch.zeros(0, D, dtype=torch.float64),
                        present=tone(k)[None],
                    )
                    for k in range(3)
                )
            ),
        ),
        truth=math.sqrt(2) / SIGMA,
        layers=("canary",),
        source="Spectral-DP, complex noise of variance sigma^2",
    ),
    Case(
        subject=Release(
            name="Spectral-DP mask from the data",
            claimed=CLAIM,
            mechanism=spectral_mask,
            neighbours=fixed(
                Pair(
                    name="another tone",
                    without=(tone(1) + 0.9 * tone(2))[None] / 2,
                    present=torch.stack([(tone(1) + 0.9 * tone(2)) / 2, tone(5)]),
                    score=partial(silent, frequency=4),
                )
            ),
        ),
        truth=math.inf,
        layers=("canary",),
        source="Spectral-DP, a ratio that follows the gradient",
    ),
    Case(
        subject=Release(
            name="directional equation 13",
            claimed=CLAIM,
            mechanism=directional_noise,
            neighbours=add_record(D),
            sd=SIGMA,
        ),
        truth=1 / float(PRINTED.min()),
        layers=BOTH,
        source="directional noise, equations (11)-(13)",
    ),
    Case(
        subject=Release(
            name="clip of the aggregate",
            claimed=CLAIM,
            mechanism=aggregate_clipped,
            neighbours=fixed(
                Pair(
                    name="turned over",
                    without=5 * unit(D)[None],
                    present=torch.stack([5 * unit(D), -100 * unit(D)]),
                )
            ),
            sd=SIGMA,
            asked=bounded(aggregate),
        ),
        truth=2 / SIGMA,
        layers=("canary", "sensitivity"),
        fails=("remove one record",),
        source="directional noise: w is clipped to alpha and noised for alpha",
    ),
    Case(
        subject=Release(
            name="noise for each sample",
            claimed=CLAIM,
            mechanism=noise_per_sample,
            neighbours=fixed(
                Pair(
                    name="batch of two",
                    without=torch.zeros(1, WIDE, dtype=torch.float64),
                    present=torch.zeros(2, WIDE, dtype=torch.float64),
                )
            ),
        ),
        truth=math.inf,
        layers=("canary",),
        source="GReDP, algorithm 2: noise inside the loop, with Poisson batches",
    ),
)
