"""Compute the law of the largest multiplier of environmental noise, and what the paper concludes.

    (49)  X = e^D / (1 + h (e^D - 1)),   D ~ N(0, s^2),   s^2 = sigma^2 ||W||_2^2 (printed: ||W||_2)
    (50)  e^D = x / (1 - h x + h)           correct: x (1 - h) / (1 - h x)
    (51)  slope (1 + h) / (1 - h x + h)^2   correct: (1 - h) / (1 - h x)^2
    (54)  f_bmax(b) = (N / l) f_X(b / l) F_X(b / l)^(N - 1)     b_max = l times the largest of N
    (55)  F_bmax(1), by the trapezoid rule

``X`` is at most 1/h and has median 1 whatever h is. Its distribution function is closed,
``Phi(log(e^D) / s)``, though the paper says none exists and takes Monte Carlo. So
F_bmax(1) = Phi(-log(l) / s)^N at h = 0, below 2^-N for every l > 1: the claimed 1/2 is not there.

Source: SPOF, equations (46)-(56), proposition 4, remark 1, appendix F.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch.nn.functional import logsigmoid

from ...base.validate import choice, half_open_unit, integer, positive
from ...privacy.theory.environment import multipliers

FORMS = ("printed", "correct")
_CHUNK = 4096


class Frequencies(NamedTuple):
    """The number of times that b_j was below 1, and below l, in ``draws`` draws."""

    below_one: float
    below_codes: float
    draws: int


def exponent_scale(sigma: float, norm: float, *, form: str = "correct") -> float:
    """Return s: ``sigma ||W||_2``; printed ``sigma sqrt(||W||_2)``, whose square lacks one.

    Raises:
        InvalidInput: a number out of its range, or an unknown form.
    """
    positive(sigma=sigma)
    positive(norm=norm)
    return sigma * (norm if choice(FORMS, form=form) == "correct" else math.sqrt(norm))


def support(h: float, *, form: str = "correct") -> float:
    """Return the upper end of X: ``1/h``; printed ``(1 + h)/h``; infinite at h = 0.

    Raises:
        InvalidInput: h outside [0, 1), or an unknown form.
    """
    top = 1.0 if choice(FORMS, form=form) == "correct" else 1 + h
    return top / h if half_open_unit(h=h) else math.inf


def inverse(x: torch.Tensor, h: float, *, form: str = "correct") -> torch.Tensor:
    """Return e^D as a function of X (50), for x inside the support.

    Raises:
        InvalidInput: h outside [0, 1), or an unknown form.
    """
    half_open_unit(h=h)
    if choice(FORMS, form=form) == "correct":
        return x * (1 - h) / (1 - h * x)
    return x / (1 - h * x + h)


def slope(x: torch.Tensor, h: float, *, form: str = "correct") -> torch.Tensor:
    """Return the derivative of ``inverse`` (51).

    Raises:
        InvalidInput: h outside [0, 1), or an unknown form.
    """
    half_open_unit(h=h)
    if choice(FORMS, form=form) == "correct":
        return (1 - h) / (1 - h * x) ** 2
    return (1 + h) / (1 - h * x + h) ** 2


def pdf(x: torch.Tensor, h: float, scale: float, *, form: str = "correct") -> torch.Tensor:
    """Return the density of X (52), (53); 0 outside its support.

    Raises:
        InvalidInput: a number out of its range, or an unknown form.
    """
    inside = (x > 0) & (x < support(h, form=form))
    # Outside, any point of the support keeps the logarithm defined; where() discards it.
    at = torch.where(inside, x, torch.ones_like(x))
    y = inverse(at, h, form=form)
    normal = torch.exp(-((y.log() / positive(scale=scale)) ** 2) / 2) / math.sqrt(2 * math.pi)
    return torch.where(inside, normal / scale * slope(at, h, form=form) / y, torch.zeros_like(x))


def log_cdf(x: torch.Tensor, h: float, scale: float, *, form: str = "correct") -> torch.Tensor:
    """Return ``log Phi(log(inverse) / scale)``, the log of the distribution function of ``pdf``.

    Raises:
        InvalidInput: a number out of its range, or an unknown form.
    """
    top = support(h, form=form)
    inside = (x > 0) & (x < top)
    at = torch.where(inside, x, torch.ones_like(x))
    found = torch.special.log_ndtr(inverse(at, h, form=form).log() / positive(scale=scale))
    outside = torch.where(x > 0, torch.zeros_like(x), torch.full_like(x, -math.inf))
    return torch.where(inside, found, outside)


def cdf(x: torch.Tensor, h: float, scale: float, *, form: str = "correct") -> torch.Tensor:
    """Return Pr[X <= x].

    Raises:
        InvalidInput: a number out of its range, or an unknown form.
    """
    return log_cdf(x, h, scale, form=form).exp()


def sample(h: float, scale: float, draws: int, generator: torch.Generator) -> torch.Tensor:
    """Draw X (49), float64 ``[draws]``: the paper estimates F_X from these.

    Raises:
        InvalidInput: a number out of its range.
    """
    half_open_unit(h=h)
    count = integer(1, draws=draws)
    normal = torch.randn(count, generator=generator, dtype=torch.float64)
    return multipliers(torch.tensor(h, dtype=torch.float64), positive(scale=scale) * normal)


def bmax_pdf(
    b: torch.Tensor, codes: int, copies: int, h: float, scale: float, *, form: str = "correct"
) -> torch.Tensor:
    """Return f_bmax (54) at each b.

    Args:
        codes: l, the code length.
        copies: |D|, how many independent copies the maximum is taken over.

    Raises:
        InvalidInput: a number out of its range, or an unknown form.
    """
    x = b / integer(1, codes=codes)
    others = torch.exp((integer(1, copies=copies) - 1) * log_cdf(x, h, scale, form=form))
    # Where F is 0 so is the density; a single copy would make 0 times -inf of it.
    power = torch.where(x > 0, others, torch.zeros_like(x))
    return copies / codes * pdf(x, h, scale, form=form) * power


def bmax_probability(
    codes: int, copies: int, h: float, scale: float, *, at: float = 1.0, form: str = "correct"
) -> float:
    """Return F_bmax(at) = F_X(at / l)^|D| exactly; (55) is ``at = 1``, which proposition 4 needs.

    Raises:
        InvalidInput: a number out of its range, or an unknown form.
    """
    x = torch.tensor(positive(at=at) / integer(1, codes=codes), dtype=torch.float64)
    return math.exp(integer(1, copies=copies) * log_cdf(x, h, scale, form=form).item())


def bmax_trapezoid(
    codes: int,
    copies: int,
    h: float,
    scale: float,
    *,
    at: float = 1.0,
    points: int = 10_001,
    form: str = "correct",
) -> float:
    """Return F_bmax(at) as the paper computes it: (54) by the trapezoid rule over [0, at].

    Raises:
        InvalidInput: a number out of its range, or an unknown form.
    """
    grid = torch.linspace(0, positive(at=at), integer(2, points=points), dtype=torch.float64)
    return torch.trapezoid(bmax_pdf(grid, codes, copies, h, scale, form=form), grid).item()


def sensitivity_gap(b: float) -> float:
    """Return ``3 (b_max - 1) / 2``: the bound on Dbar^[N](i) - Dbar(i) in (46)-(48), (56)."""
    return 3 * (b - 1) / 2


def simulate(
    codes: int, n: int, *, spread: float, sigma: float, draws: int, generator: torch.Generator
) -> Frequencies:
    """Simulate frequencies of b_j < 1 and b_j < l; encoder, record and noise are drawn afresh.

    Encoder entries are uniform on [-spread, spread], records uniform on [0, 1]^n, noise is
    N(0, sigma^2). b_j < 1 needs all l projections of the noise to be negative, since b_r > 1 for a
    positive one: its probability is at most 2^-l, and tends to it with more noise.

    Raises:
        InvalidInput: a number out of its range.
    """
    integer(1, codes=codes)
    integer(1, n=n)
    positive(spread=spread)
    positive(sigma=sigma)
    real = torch.float64
    left = integer(1, draws=draws)
    below_one = below_codes = 0
    while left:
        size = min(left, _CHUNK)
        encoder = spread * (2 * torch.rand(size, n, codes, generator=generator, dtype=real) - 1)
        record = torch.rand(size, 1, n, generator=generator, dtype=real)
        noise = sigma * torch.randn(size, 1, n, generator=generator, dtype=real)
        # (34) from logarithms, since a code close to 1 has lost 1 - h.
        clean, noisy = logsigmoid(record @ encoder), logsigmoid((record + noise) @ encoder)
        total = torch.exp(noisy - clean).sum((1, 2))
        below_one += int((total < 1).sum())
        below_codes += int((total < codes).sum())
        left -= size
    return Frequencies(below_one / draws, below_codes / draws, draws)
