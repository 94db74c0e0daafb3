"""The losses that AdLM's networks are trained with, and their derivatives, all runs at once.

    polynomial      sum_l phi1_l s_l + phi2_l s_l^2,  s_l = hbar . W_l      (25), line 27
    cross entropy   (23): what the polynomial stands for; for pre-training and comparison

With targets the polynomial is one fused pass (``ops.coef.quadratic``); with released coefficients
or with noise at every visit it is ``nn.polynomial``'s.

Source: AdLM, (23)-(25), lines 18-29 of algorithm 1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..nn import polynomial
from ..nn.polynomial import Coefficients
from ..ops import coef, noise
from ..rng import Stream

LOSSES = ("polynomial", "cross_entropy")


def cross_entropy(scores: Tensor, targets: Tensor) -> Tensor:
    """``[R]``, float64: means of (23); gradients are left where scores came from.

    Args:
        scores, targets: ``[R, B, M]``.
    """
    losses = polynomial.cross_entropy(scores.flatten(0, 1), targets.flatten(0, 1))
    return _backward(losses, scores)


def with_targets(scores: Tensor, targets: Tensor) -> Tensor:
    """The polynomial with coefficients ``1/2 - y`` and ``1/8``; y true, or released and unbiased.

    Shapes as in ``cross_entropy``.
    """
    runs, batch, classes = scores.shape
    flat = scores.detach().flatten(0, 1).contiguous()
    losses, slope = coef.quadratic(flat, targets.flatten(0, 1).contiguous(), form="taylor")
    scores.backward(slope.view_as(scores) / batch)  # type: ignore[no-untyped-call]
    return losses.view(runs, batch).mean(1) + classes * math.log(2)


def with_coefficients(scores: Tensor, coefficients: Coefficients) -> Tensor:
    """The polynomial with released ``label_scalar`` coefficients, ``[R, B, M]`` each."""
    flat = Coefficients(
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
    streams: list[tuple[Stream, Stream]],
) -> Tensor:
    """The polynomial with ``feature_expanded`` coefficients and fresh noise on each of them.

    Gradients pass through ``hidden`` in the clean part of the coefficients.

    Args:
        hidden: ``[R, B, H]``.
        weights: ``[R, M, H]``.
        targets: ``[R, B, M]``, true labels.
        scale: of the noise; 0 adds none.
        streams: noise and rounding of every run at this visit.
    """
    batch = hidden.shape[1]
    means = []
    for h, w, y, pair in zip(hidden, weights, targets, streams, strict=True):
        clean = polynomial.feature_coefficients(h, y)
        noisy = Coefficients(
            clean.constant,
            _noised(clean.linear, scale, pair, 0),
            _noised(clean.quadratic, scale, pair, coef.quadratic_position(0, clean.linear.numel())),
        )
        losses = polynomial.feature_expanded(w, noisy)
        means.append(losses.sum() / batch)
    loss = torch.stack(means)
    loss.sum().backward()  # type: ignore[no-untyped-call]
    return loss.detach().double()


def _noised(values: Tensor, scale: float, pair: tuple[Stream, Stream], position: int) -> Tensor:
    if not scale:
        return values
    drawn = torch.zeros_like(values, requires_grad=False)
    noise.add_noise(
        drawn,
        stream=pair[0],
        rounding=pair[1],
        position=position,
        distribution="laplace",
        scale=scale,
    )
    return values + drawn


def _backward(losses: Tensor, scores: Tensor) -> Tensor:
    """Means ``[R]`` of losses ``[R B]``, after their gradients."""
    runs, batch = scores.shape[:2]
    each = losses.view(runs, batch).sum(1) / batch
    each.sum().backward()  # type: ignore[no-untyped-call]
    return each.detach().double()
