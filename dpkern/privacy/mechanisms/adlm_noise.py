"""Add AdLM's noise, each once and before training: relevances, inputs, a bias, labels.

Scales come from ``dpkern.privacy.theory.adlm``, published or local. All noise is the lattice law of
``noise.add_noise`` with a certified Laplace scale, all randomized labels those of
``RandomizedResponse``. Record i of ``[n, d]`` values stands at ``position + i d`` in the streams,
so that a data set can be released in pieces of any size. Every release needs streams of its own,
such as ``key.stream(Purpose.LAPLACE, 0, stream=k)``.

Inputs with ``shared_per_feature`` noise are the other printed reading and protect nothing: the
difference of two records is released exactly.

Reference: AdLM, algorithm 1, lines 1-19.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...base.errors import InvalidInput
from ...base.rng import Stream
from ...base.validate import choice, integer, positive, tensor
from ...ops import noise
from ...ops._draws import Draws
from ...ops.coef.label_powers import PowerCoefficients, label_coefficients
from ..theory.adlm import LABEL_SENSITIVITY, NOISE_SHARING, below
from .randomized_response import RandomizedResponse

FLOATS = (torch.float32, torch.float64)

TILE = 512
"""Quadratic coefficients begin at a multiple of this behind the linear ones."""

_ENTRIES_AT_ONCE = 1 << 22
"""Scales of one call: they are as large as the values."""


def private_relevance(
    mean: Tensor,
    *,
    scale: float,
    stream: Stream,
    rounding: Stream,
    position: int = 0,
    draws: Draws | None = None,
) -> Tensor:
    """Return ``R_j + Lap(scale)`` (11)-(12), a new tensor.

    Args:
        mean: ``[d]``, from ``nn.relevance.mean_relevance``.
        scale: sensitivity over eps1. It presumes that the network does not depend on the records.
        stream, rounding, position, draws: see ``noise.add_noise``.

    Raises:
        InvalidInput: another shape or dtype, or a number out of its range.
    """
    tensor(mean=mean, shape=(None,), dtypes=FLOATS)
    return _noised(mean, scale, stream, rounding, position, draws)


def private_inputs(
    x: Tensor,
    scales: Tensor,
    *,
    reach: float,
    stream: Stream,
    rounding: Stream,
    noise_sharing: str = "iid_per_example",
    position: int = 0,
    draws: Draws | None = None,
) -> Tensor:
    """Return ``x_ij + Lap(scale_j)``, line 13, a new tensor.

    Args:
        x: ``[n, d]``, entries in [0, reach].
        scales: ``[d]``; all equal for ILM.
        reach: rho, on which a scale's guarantee rests.
        stream, rounding, position, draws: see ``noise.add_noise``.
        noise_sharing: ``iid_per_example``, or ``shared_per_feature``: one draw for all records.

    Raises:
        InvalidInput: shapes that do not fit, an entry that is NaN or outside, an unknown sharing.
    """
    tensor(x=x, shape=(None, None), dtypes=FLOATS)
    count, features = x.shape
    tensor(scales=scales, shape=(features,), dtypes=FLOATS, device=x.device)
    choice(NOISE_SHARING, noise_sharing=noise_sharing)
    highest = below(positive(reach=reach), x.dtype)
    if not bool(((x >= 0) & (x <= highest)).all()):
        raise InvalidInput(
            "x",
            expected=f"entries in [0, {reach:g}]",
            got="NaN, or an entry outside",
            remedy="Map the inputs with dpkern.privacy.theory.adlm.normalised_inputs.",
        )
    if noise_sharing == "shared_per_feature":
        none = torch.zeros_like(scales)
        return x + _noised(none, scales.contiguous(), stream, rounding, position, draws).to(x)
    out = x.contiguous().clone()
    rows = max(1, _ENTRIES_AT_ONCE // max(1, features))
    for start in range(0, count, rows):
        piece = out[start : start + rows]
        noise.add_noise(
            piece,
            stream=stream,
            position=position + start * features,
            distribution="laplace",
            scale=scales.expand(piece.shape).contiguous(),
            rounding=rounding,
            draws=draws,
        )
    return out


def private_bias(
    bias: Tensor,
    *,
    scale: float,
    stream: Stream,
    rounding: Stream,
    position: int = 0,
    draws: Draws | None = None,
) -> Tensor:
    """Return ``b + Lap(scale)``, line 14; published only: a bias that is no data needs no noise.

    Raises:
        InvalidInput: another shape or dtype, or a number out of its range.
    """
    tensor(bias=bias, shape=(None,), dtypes=FLOATS)
    return _noised(bias, scale, stream, rounding, position, draws)


def private_coefficients(
    targets: Tensor,
    *,
    scale: float,
    stream: Stream,
    rounding: Stream,
    position: int = 0,
    draws: Draws | None = None,
) -> PowerCoefficients:
    """Return ``phi^(R) + Lap(scale)``, the ``label_scalar`` form, lines 18-19; a new pair.

    The constant log 2 has no part in gradients and gets no noise. The n M linear coefficients
    stand at ``position``, the quadratic ones at ``quadratic_position``.

    Args:
        targets: ``[n, M]``, one-hot.
        scale: ``D_F / (|L| eps3)``.
        stream, rounding, position, draws: see ``noise.add_noise``.

    Raises:
        InvalidInput: rows that are not one-hot, or a number out of its range.
    """
    _one_hot(targets)
    clean = label_coefficients(targets)
    behind = quadratic_position(position, targets.numel())
    return PowerCoefficients(
        clean.constant,
        _noised(clean.linear, scale, stream, rounding, position, draws),
        _noised(clean.quadratic, scale, stream, rounding, behind, draws),
    )


def quadratic_position(position: int, count: int) -> int:
    """Return the first multiple of 512 behind ``count`` linear coefficients at ``position``."""
    return -(-(integer(0, position=position) + integer(0, count=count)) // TILE) * TILE


def randomized_targets(
    labels: Tensor, *, classes: int, epsilon: float, stream: Stream, position: int = 0
) -> Tensor:
    """Return labels by randomized response (corrected), as unbiased targets ``[n, classes]``.

    They are float64.

    With p0 the probability of the label and q0 that of each other, ``(onehot - q0) / (p0 - q0)``
    has the true one-hot label as its mean, and the polynomial loss, affine in the label, the true
    loss.

    Args:
        labels: int64 ``[n]``.
        classes: M.
        epsilon: eps3, of one record's label, whatever is computed from it.
        stream: ``key.stream(Purpose.SYMBOLS, step)``.
        position: of record 0 in the stream.

    Raises:
        InvalidInput: labels that are no classes, or a number out of its range.
    """
    tensor(labels=labels, shape=(None,), dtypes=(torch.int64,))
    channel = RandomizedResponse(epsilon=epsilon, categories=classes)
    told = channel.randomize(labels.contiguous(), stream=stream, position=position)
    return (F.one_hot(told, classes).double() - channel.lie) / (channel.truth - channel.lie)


def noisy_targets(
    targets: Tensor,
    *,
    epsilon: float,
    stream: Stream,
    rounding: Stream,
    position: int = 0,
    draws: Draws | None = None,
) -> Tensor:
    """Return ``onehot + Lap(2 / eps3)`` (corrected, the other way): a new tensor, unbiased as well.

    Args:
        targets: ``[n, M]``, one-hot.
        epsilon: eps3, of one record's label.
        stream, rounding, position, draws: see ``noise.add_noise``.

    Raises:
        InvalidInput: rows that are not one-hot, or a number out of its range.
    """
    _one_hot(targets)
    scale = LABEL_SENSITIVITY / positive(epsilon=epsilon)
    return _noised(targets, scale, stream, rounding, position, draws)


def _noised(
    values: Tensor,
    scale: float | Tensor,
    stream: Stream,
    rounding: Stream,
    position: int,
    draws: Draws | None,
) -> Tensor:
    return noise.add_noise(
        values.contiguous().clone(),
        stream=stream,
        position=position,
        distribution="laplace",
        scale=scale,
        rounding=rounding,
        draws=draws,
    )


def _one_hot(targets: Tensor) -> None:
    tensor(targets=targets, shape=(None, None), dtypes=FLOATS)
    binary = (targets == 0) | (targets == 1)
    if not bool(binary.all() & (targets.sum(1) == 1).all()):
        raise InvalidInput(
            "targets",
            expected="one-hot rows",
            got="another row",
            remedy="Make them with torch.nn.functional.one_hot(labels, classes).",
        )
