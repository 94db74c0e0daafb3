"""Layer 3: use the best test of all where the noise is known, rounded so that bits do not count.

    Laplace   sum_i (|x_i - a_i| - |x_i - b_i|) / scale_i
    k-RR      log P(x | present) - log P(x | without)

with a and b what would be released without noise.

Scores are rounded to 1e-6: the last bits of a float64 sum depend on the data where those of an
exact mechanism do not, and a test that reads them shows the arithmetic, not the mechanism. The
precision test reads them on purpose.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

ROUNDED = 1e-6


def rounded(scores: torch.Tensor) -> torch.Tensor:
    """Round to multiples of 1e-6."""
    return (scores / ROUNDED).round() * ROUNDED


@dataclass(frozen=True, eq=False)
class LaplaceRatio:
    """The log-likelihood ratio of Laplace noise.

    Args:
        without, present: noiseless releases ``[d]``.
        scale: noise scale that is assumed, ``[d]`` or one number.
    """

    without: torch.Tensor
    present: torch.Tensor
    scale: torch.Tensor | float
    name: str = "Laplace likelihood ratio"

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        x = values.detach().cpu().double()
        far = (x - self.without.double()).abs() - (x - self.present.double()).abs()
        return rounded((far / self.scale).sum(dim=1))


@dataclass(frozen=True)
class ResponseRatio:
    """The log-likelihood ratio of randomized responses, ``[runs, d]`` symbols.

    ``keep`` is P(answer = symbol), ``lie`` that of each other answer.
    """

    without: int
    present: int
    keep: float
    lie: float
    name: str = "response likelihood ratio"

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        told = (values == self.present).double() - (values == self.without).double()
        return rounded((told * math.log(self.keep / self.lie)).sum(dim=1))
