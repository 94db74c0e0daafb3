"""Layer-wise relevance propagation: how much each input contributed to a network's score.

From the output down, with ``z_pm = value_p W_pm`` and ``z_m = sum_p z_pm + b_m``:

    R_{p <- m} = z_pm / (z_m + mu sgn(z_m)) R_m,   R_p = sum_m R_{p <- m},   sgn(0) = 1    (4)-(8)

beginning with the score F of one class. Relevances of every layer sum to F where there are no
biases and mu is 0 (9); a unit with ``z_m + mu sgn = 0`` passes nothing on.

| layer | rule |
|---|---|
| linear, convolution | (4)-(5), on the sparse affine map that a convolution is |
| average pooling | in proportion: (4)-(5) with mu = 0 |
| maximum pooling | all to the winner |
| activation, normalisation, dropout in evaluation | unchanged |
| flattening | reshaped |

Source: AdLM, (4)-(10); the rules of pooling, ReLU and normalisation are ours, the usual ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..base.choices import RELEVANCE_RANGES
from ..base.errors import InvalidInput, UnsupportedModule
from ..base.validate import choice, integer, non_negative, tensor
from .circulant import BlockCirculantLinear
from .normalise import BatchMinMax, BoundedResponseNorm
from .spectral_conv import SpectralConv2d

MU = 0.01

_GRID = 2.0**24

_AFFINE = (nn.Linear, nn.Conv1d, nn.Conv2d, BlockCirculantLinear, SpectralConv2d)
_AVERAGE = (nn.AvgPool2d, nn.AdaptiveAvgPool2d)
_MAXIMUM = (nn.MaxPool2d, nn.AdaptiveMaxPool2d)
_SAME = (
    nn.Identity,
    nn.ReLU,
    nn.Sigmoid,
    nn.Tanh,
    nn.Dropout,
    nn.LocalResponseNorm,
    BatchMinMax,
    BoundedResponseNorm,
)
_RESHAPED = (nn.Flatten, nn.Unflatten)
_KNOWN = _AFFINE + _AVERAGE + _MAXIMUM + _SAME + _RESHAPED


class Relevance(NamedTuple):
    """The relevances of a batch.

    Attributes:
        score: F, ``[B]``.
        layers: one tensor per layer boundary, from the input's to the output's, each of the
            activation's shape.
    """

    score: Tensor
    layers: tuple[Tensor, ...]


def propagate(
    model: nn.Sequential, x: Tensor, *, labels: Tensor | None = None, mu: float = MU
) -> Relevance:
    """Return the relevance of every layer for the score of each record's class.

    Args:
        model: network in evaluation mode; nested ``nn.Sequential`` of the layers above, giving
            ``[B, classes]``.
        x: ``[B, ...]``, floating.
        labels: int64 ``[B]``, the true classes. None selects the predicted ones.
        mu: stabiliser, at least 0. The paper does not say which.

    Raises:
        InvalidInput: a model in training mode or with other outputs, labels that are no classes,
            a negative mu, or scores that are not finite.
        UnsupportedModule: a layer without a rule.
    """
    non_negative(mu=mu)
    steps = list(_steps(model))
    values = [x.detach()]
    with torch.no_grad():
        for step in steps:
            values.append(step(values[-1]))
    scores = values[-1]
    if scores.dim() != 2 or not scores.shape[1] or not bool(scores.isfinite().all()):
        raise InvalidInput(
            "model",
            expected="finite scores [B, classes]",
            got=f"scores {list(scores.shape)}, or NaN or inf among them",
            remedy="End the model with one score per class, and check its inputs.",
        )
    chosen = scores.argmax(1) if labels is None else _checked(labels, scores)
    score = scores.gather(1, chosen[:, None])
    found = [torch.zeros_like(scores).scatter_(1, chosen[:, None], score)]
    for step, value in zip(reversed(steps), reversed(values[:-1]), strict=True):
        found.append(_below(step, value, found[-1], mu))
    return Relevance(score[:, 0], tuple(reversed(found)))


def normalised(relevance: Tensor, *, relevance_range: str = "as_formula") -> Tensor:
    """Return ``(R - chi) / (phi - chi)`` per record, ``[B, d]``; 0 if all features are equal.

    Args:
        relevance: ``[B, ...]``.
        relevance_range: ``signed`` gives ``2 (.) - 1``.

    Raises:
        InvalidInput: an unknown range, or records without features.
    """
    choice(RELEVANCE_RANGES, relevance_range=relevance_range)
    rows = relevance.flatten(1)
    if not rows.shape[1]:
        raise InvalidInput(
            "relevance",
            expected="at least one feature",
            got=str(list(relevance.shape)),
            remedy="Pass the relevance of a batch of records.",
        )
    low, high = torch.aminmax(rows, dim=1, keepdim=True)
    width = high - low
    constant = width == 0
    unit = (rows - low) / width.masked_fill(constant, 1)
    if relevance_range == "signed":
        unit = 2 * unit - 1
    return unit.masked_fill(constant, 0)


def mean_relevance(
    model: nn.Sequential,
    x: Tensor,
    labels: Tensor | None = None,
    *,
    mu: float = MU,
    relevance_range: str = "as_formula",
    batch: int = 256,
) -> Tensor:
    """Return ``R_j = (1 / |D|) sum_i R_{x_ij}(x_i)`` (10), float64 ``[d]``, normalised.

    Not private: noise is added to it, and is only private as claimed if the model does not depend
    on these records. Every record's relevance is rounded to multiples of 2^-24, so that sums of up
    to 2^28 records are exact and one record moves them by no more than its own.

    Args:
        model, x, labels, mu: arguments of ``propagate``.
        relevance_range: argument of ``normalised``.
        batch: records at a time.

    Raises:
        InvalidInput, UnsupportedModule: see ``propagate``; no records.
    """
    integer(1, batch=batch)
    if not len(x):
        raise InvalidInput(
            "x", expected="at least one record", got="none", remedy="Pass the training records."
        )
    if labels is not None:
        tensor(labels=labels, shape=(len(x),), dtypes=(torch.int64,))
    total = torch.zeros(x[0].numel(), dtype=torch.float64, device=x.device)
    for start in range(0, len(x), batch):
        told = None if labels is None else labels[start : start + batch]
        bottom = propagate(model, x[start : start + batch], labels=told, mu=mu).layers[0]
        rows = normalised(bottom.double(), relevance_range=relevance_range)
        total += (rows * _GRID).round_().sum(0) / _GRID
    return total / len(x)


def _steps(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers in order, each with a rule."""
    if type(model) is nn.Sequential:
        for part in model:
            yield from _steps(part)
    elif type(model) not in _KNOWN:
        raise UnsupportedModule(
            type(model).__name__,
            expected="a layer that relevance has a rule for, in an nn.Sequential",
            got="a layer without one",
            remedy=f"Use {', '.join(sorted(kind.__name__ for kind in _KNOWN))}.",
        )
    elif model.training:
        raise InvalidInput(
            "model",
            expected="evaluation mode",
            got=f"a {type(model).__name__} in training mode",
            remedy="Call model.eval(): relevance is that of a fixed network, record by record.",
        )
    else:
        yield model


def _checked(labels: Tensor, scores: Tensor) -> Tensor:
    tensor(labels=labels, shape=(len(scores),), dtypes=(torch.int64,), device=scores.device)
    if not bool(((labels >= 0) & (labels < scores.shape[1])).all()):
        raise InvalidInput(
            "labels",
            expected=f"classes from 0 to {scores.shape[1] - 1}",
            got="others",
            remedy="Give each record's class, or None for the predicted one.",
        )
    return labels


def _below(step: nn.Module, value: Tensor, above: Tensor, mu: float) -> Tensor:
    """Return the relevance of a layer's input from that of its output."""
    kind = type(step)
    if kind in _SAME:
        return above
    if kind in _RESHAPED:
        return above.reshape(value.shape)
    bottom = value.clone().requires_grad_()
    with torch.enable_grad():
        z = step(bottom)
    if kind in _MAXIMUM:
        (won,) = torch.autograd.grad(z, bottom, above)
        return won
    # An affine map's gradient is its matrix: this is value_p sum_m W_pm R_m / (z_m + mu sgn).
    divisor = z.detach() + torch.where(z >= 0, 1.0, -1.0) * (0.0 if kind in _AVERAGE else mu)
    shares = torch.where(divisor == 0, 0.0, above / divisor.masked_fill(divisor == 0, 1.0))
    (slope,) = torch.autograd.grad(z, bottom, shares)
    return value * slope
