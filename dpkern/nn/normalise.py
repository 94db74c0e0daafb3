"""Normalisations that bound a ReLU's output by 1, as the polynomial loss of AdLM needs it.

``BoundedResponseNorm`` treats every sample by itself. ``BatchMinMax`` does not: in training its
output for one sample depends on all others of the batch, like batch normalisation's. Per-sample
gradients do not exist behind it, and the engine refuses it; it is for losses whose privacy comes
from noise in front of the network.

Source: AdLM, section on normalisation layers, (22).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base.errors import InvalidInput
from ..base.validate import integer, non_negative, positive, probability


def bounded_response_norm(
    h: Tensor, *, q: float = 2.0, size: int = 5, alpha: float = 1e-4, beta: float = 0.75
) -> Tensor:
    """Return ``h / max(h, (q + alpha sum (h^m)^2)^beta)``, m over ``size // 2`` maps either side.

    Args:
        h: ``[B, maps, ...]``, floating. Where it is at least 0, the result is in [0, 1]; negative
            entries stay unbounded.
        q: positive; the print has 2.
        size: l, maps in the sum; an even one sums ``size + 1``, as the print does.
        alpha: a number of at least 0.
        beta: a number of at least 0.

    Returns:
        The shape of ``h``.

    Raises:
        InvalidInput: a number out of its range, or an input without maps.

    Source: AdLM (22); AlexNet, Krizhevsky et al. 2012, for the sum.
    """
    positive(q=q)
    integer(1, size=size)
    non_negative(alpha=alpha)
    non_negative(beta=beta)
    if h.dim() < 2 or not h.is_floating_point():
        raise InvalidInput(
            "h",
            expected="a floating tensor [B, maps, ...]",
            got=f"{h.dtype} {list(h.shape)}",
            remedy="Normalise the output of a convolution.",
        )
    half = size // 2
    sides = (0, 0) * (h.dim() - 2) + (half, half)
    around = F.pad(h.square(), sides).unfold(1, 2 * half + 1, 1).sum(-1)
    return h / torch.maximum(h, (q + alpha * around) ** beta)


class BoundedResponseNorm(nn.Module):
    """A layer of ``bounded_response_norm``: local response normalisation with results in [0, 1]."""

    def __init__(
        self, q: float = 2.0, size: int = 5, alpha: float = 1e-4, beta: float = 0.75
    ) -> None:
        super().__init__()
        self.q, self.size, self.alpha, self.beta = q, size, alpha, beta

    def forward(self, h: Tensor) -> Tensor:
        return bounded_response_norm(h, q=self.q, size=self.size, alpha=self.alpha, beta=self.beta)

    def extra_repr(self) -> str:
        return f"q={self.q}, size={self.size}, alpha={self.alpha}, beta={self.beta}"


class BatchMinMax(nn.Module):
    """A layer ``(h - chi) / (phi - chi)`` with each unit's minimum chi, maximum phi over the batch.

    In training **samples mix**, and gradients pass through chi and phi. A unit that is the same
    for the whole batch becomes 0. In evaluation chi and phi are running ones, results are clamped
    to [0, 1], and samples do not mix; before the first batch that is an error.

    The running range is data: like all else here it is private only if the layer's inputs are,
    which in AdLM come from noisy records.

    Args:
        units: extent of dimension 1.
        momentum: weight of a new batch in the running chi and phi, in (0, 1]. [not in source]

    Shape: ``[B, units]``, floating.

    Raises:
        InvalidInput: another shape, an empty batch in training, evaluation before training.

    Source: AdLM, section on normalisation layers.
    """

    low: Tensor
    high: Tensor
    batches: Tensor

    def __init__(self, units: int, momentum: float = 0.1) -> None:
        super().__init__()
        self.units = integer(1, units=units)
        self.momentum = probability(momentum=momentum)
        self.register_buffer("low", torch.zeros(units))
        self.register_buffer("high", torch.zeros(units))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def forward(self, h: Tensor) -> Tensor:
        if h.dim() != 2 or h.shape[1] != self.units or (self.training and not len(h)):
            raise InvalidInput(
                "h",
                expected=f"shape [B, {self.units}] with at least one sample in training",
                got=str(list(h.shape)),
                remedy="Normalise a fully connected layer's output, batch by batch.",
            )
        if not self.training:
            return self._evaluated(h)
        low, high = h.amin(0), h.amax(0)
        self._remember(low.detach(), high.detach())
        return _scaled(h, low, high)

    def _remember(self, low: Tensor, high: Tensor) -> None:
        weight = self.momentum if self.batches else 1.0
        self.low.lerp_(low.to(self.low), weight)
        self.high.lerp_(high.to(self.high), weight)
        self.batches += 1

    def _evaluated(self, h: Tensor) -> Tensor:
        if not self.batches:
            raise InvalidInput(
                "h",
                expected="at least one batch in training before",
                got="evaluation without any range",
                remedy="Call the layer in training mode first, or load a trained state.",
            )
        return _scaled(h, self.low.to(h), self.high.to(h)).clamp(0, 1)

    def extra_repr(self) -> str:
        return f"{self.units}, momentum={self.momentum}"


def _scaled(h: Tensor, low: Tensor, high: Tensor) -> Tensor:
    width = high - low
    # No quotient of zeros, whose gradient would be NaN.
    constant = width == 0
    return ((h - low) / width.masked_fill(constant, 1)).masked_fill(constant, 0)
