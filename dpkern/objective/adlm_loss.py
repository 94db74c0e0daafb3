"""Losses of AdLM's networks, and their derivatives, all runs at once.

    polynomial      sum_l phi1_l s_l + phi2_l s_l^2,  s_l = hbar . W_l      (25), line 27
    cross entropy   (23): what the polynomial stands for; for pre-training and comparison

With targets the polynomial is one fused pass (``ops.coef.quadratic``), and so it is with noise at
every visit (``ops.coef.expanded``); with released coefficients it is ``nn.polynomial``'s.

Source: AdLM, (23)-(25), lines 18-29 of algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..base.rng import Stream
from ..nn import polynomial
from ..nn.polynomial import PowerCoefficients
from ..ops import coef

LOSSES = ("polynomial", "cross_entropy")


def cross_entropy(scores: Tensor, targets: Tensor) -> Tensor:
    """Return ``[R]``, float64: means of (23); gradients are left where scores came from.

    Args:
        scores, targets: ``[R, B, M]``.
    """
    losses = polynomial.cross_entropy(scores.flatten(0, 1), targets.flatten(0, 1))
    return _backward(losses, scores)


def with_targets(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the polynomial with coefficients ``1/2 - y`` and ``1/8``; y true, or released.

    Released targets are unbiased estimates. Shapes are those of ``cross_entropy``.
    """
    runs, batch, classes = scores.shape
    flat = scores.detach().flatten(0, 1).contiguous()
    losses, slope = coef.quadratic(flat, targets.flatten(0, 1).contiguous(), form="taylor")
    scores.backward(slope.view_as(scores) / batch)  # type: ignore[no-untyped-call]
    return losses.view(runs, batch).mean(1) + classes * math.log(2)


def with_coefficients(scores: Tensor, coefficients: PowerCoefficients) -> Tensor:
    """Return the polynomial with released ``label_scalar`` coefficients, ``[R, B, M]`` each."""
    flat = PowerCoefficients(
        coefficients.constant,
        coefficients.linear.flatten(0, 1),
        coefficients.quadratic.flatten(0, 1),
    )
    return _backward(polynomial.label_scalar(scores.flatten(0, 1), flat), scores)


def expanded(
    hidden: Tensor,
    weights: Tensor,
    targets: Tensor,
    *,
    scale: float,
    streams: Sequence[tuple[Stream, Stream]],
) -> Tensor:
    """Return the polynomial with ``feature_expanded`` coefficients and fresh noise on each of them.

    Gradients pass through ``hidden`` in the clean part of the coefficients.

    Args:
        hidden: ``[R, B, H]``.
        weights: ``[R, M, H]``, a leaf.
        targets: ``[R, B, M]``, true labels.
        scale: noise scale; 0 adds no noise.
        streams: noise and rounding of every run at this visit.
    """
    batch, classes = hidden.shape[1], weights.shape[1]
    means, by_weights, by_hidden = [], [], []
    for h, w, y, (noise, rounding) in zip(
        hidden.detach(), weights.detach(), targets, streams, strict=True
    ):
        losses, to_weights, to_hidden = coef.expanded(
            h.contiguous(),
            y.contiguous(),
            w.contiguous(),
            noise=coef.Noise(scale=scale, stream=noise, rounding=rounding) if scale else None,
        )
        means.append(losses.mean() + classes * math.log(2))
        by_weights.append(to_weights)
        by_hidden.append(to_hidden)
    hidden.backward(torch.stack(by_hidden) / batch)  # type: ignore[no-untyped-call]
    weights.grad = torch.stack(by_weights) / batch
    return torch.stack(means)


def _backward(losses: Tensor, scores: Tensor) -> Tensor:
    """Return means ``[R]`` of losses ``[R B]``, after their gradients."""
    runs, batch = scores.shape[:2]
    each = losses.view(runs, batch).sum(1) / batch
    each.sum().backward()  # type: ignore[no-untyped-call]
    return each.detach().double()
