"""The polynomial loss with the last hidden layer in its coefficients, evaluated with noise.

The coefficients of hidden features h, a target y_l and the weights W_l of each class l are

    a1_le  = (1/2 - y_l) h_e        H numbers,
    a2_leg = h_e h_g / 8            H^2 numbers, one independent noise each.

They depend on the network of the moment, so that nothing can be released ahead: every call is a
release of its own, with words of its own.

Reference: AdLM, (23)-(25), the coefficients of lemma 5.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ...base import validate as check
from ...base.dispatch import op
from ...base.signature import Double, Float
from .._coef_noise import CoefNoise, check_noise, quadratic_position
from .polynomial import add, check_out, check_targets, copied, lane_sum

RUN = 16
"""Records whose slopes are summed one after the other; then the sums of the runs are."""

ENTRIES_AT_ONCE = 1 << 22
"""Coefficients that the reference holds."""


def empty_results(hidden: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the loss and both derivatives."""
    loss = torch.empty(len(hidden), dtype=torch.float64, device=hidden.device)
    return loss, torch.empty_like(weights), torch.empty_like(hidden)


def _check_expanded(
    hidden: Tensor,
    targets: Tensor,
    weights: Tensor,
    noise: CoefNoise | None,
    out: tuple[Tensor, Tensor, Tensor] | None,
) -> None:
    records, width = hidden.shape
    check.tensor_at("targets", targets, shape=(records, len(weights)))
    if out is not None:
        like = (
            ((records,), torch.float64),
            (weights.shape, weights.dtype),
            (hidden.shape, hidden.dtype),
        )
        check_out(out, like, (hidden, targets, weights))
    if noise is not None:
        linear = records * weights.numel()
        check_noise(noise, records, linear, linear * width, hidden)
        check_targets("hidden", hidden)
        check_targets("targets", targets)


@op(check=_check_expanded)
def expanded(
    hidden: Float[Tensor, "B H"],
    targets: Float[Tensor, "B _"],
    weights: Float[Tensor, "M H"],
    *,
    noise: CoefNoise | None = None,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[
    Double[Tensor, "loss: B"], Float[Tensor, "dweights: M H"], Float[Tensor, "dhidden: B H"]
]:
    """Return the loss of every record, and its derivatives; noisy coefficients are never written.

    With ``a1 [B, M, H]`` and ``a2 [B, M, H, H]`` the noisy coefficients in the inputs' dtype, the
    linear ones at ``noise.position``, the quadratic ones at ``quadratic_position`` behind them:

        loss_b       = sum_l W_l . (a1_bl + a2_bl W_l)
        dweights_l   = sum_b (a1_bl + a2_bl W_l) + a2_bl^T W_l
        dhidden_b    = sum_l W_l (1/2 - y_bl + (h_b . W_l) / 4)

    all in float64, the derivatives rounded to the inputs' dtype at the end. Noise does not depend
    on ``hidden``: the derivative by it passes through the coefficients without noise, and is the
    same with and without it.

    Every sum has a fixed order, so that all backends give the same bits: over the features of one
    product in ``LANES``, of ``a2^T W`` and over classes one after the other from 0, over records
    in runs of ``RUN`` one after the other from 0, and then over the runs.

    Guarantee: that of ``add_noise`` for one coefficient. Replacing a record moves its
    coefficients by at most M (H + H^2/4) in l1. ``dhidden`` is not private.

    Args:
        hidden: h, float32 or float64 ``[B, H]``, contiguous; with noise, entries in [0, 1].
        targets: y ``[B, M]`` of the same dtype; with noise, entries in [0, 1].
        weights: W ``[M, H]`` of the same dtype.
        noise: scale (of all, or of each record), streams and position. None adds no noise.
        out: loss, dweights and dhidden, written and returned instead of new tensors.

    Returns:
        ``loss`` float64 ``[B]``, without the constant M log 2; ``dweights`` ``[M, H]`` of the sum
        of all losses; ``dhidden`` ``[B, H]``.

    Raises:
        InvalidInput: wrong shapes, dtypes, strides, scales, an entry outside.
        PrivacyError: rounding and noise share a stream, or a CUDA graph is recorded.

    ======================= ==========================================
    edge case               result
    ======================= ==========================================
    no records              empty; derivative by the weights 0
    no features, no classes losses 0; derivatives 0 where not empty
    NaN, inf                spreads; with noise from weights only
    hidden, target outside  ``InvalidInput`` if there is noise
    ======================= ==========================================

    Reference: AdLM, (23)-(25), lemma 5 and line 27 of algorithm 1.
    """
    hidden, targets, weights = hidden.detach(), targets.detach(), weights.detach()
    wide = weights.double()
    loss, total, dhidden = empty_results(hidden, wide)
    total.zero_()
    for part in parts(hidden, weights, ENTRIES_AT_ONCE):
        factor = 0.5 - targets[part]
        a1, a2 = coefficients(hidden[part], factor)
        if noise is not None:
            each, behind = noise_of(noise, part, len(hidden), weights)
            add(a1, each, each.position)
            add(a2, each, behind)
        linear = a1.double() + lane_sum(a2.double() * wide[:, None, :])
        columns = torch.zeros_like(linear)
        for e in range(weights.shape[1]):
            columns += a2[:, :, e].double() * wide[:, e, None]
        loss[part], dhidden[part] = combined(hidden[part], factor, wide, linear, columns, total)
    made = loss, total.to(hidden.dtype), dhidden
    return made if out is None else copied(made, out)


def parts(hidden: Tensor, weights: Tensor, entries: int) -> Iterator[slice]:
    """Yield records whose coefficients are held at a time: whole runs of them, at least one."""
    of_run = RUN * weights.numel() * weights.shape[1]
    at_once = RUN * max(1, entries // (of_run or 1))
    for start in range(0, len(hidden), at_once):
        yield slice(start, min(start + at_once, len(hidden)))


def coefficients(hidden: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``a1 [B, M, H]`` and ``a2 [B, M, H, H]`` without noise, of ``factor = 1/2 - y``."""
    a1 = factor[:, :, None] * hidden[:, None, :]
    square = hidden[:, :, None] * (hidden[:, None, :] * 0.125)
    return a1, square[:, None].repeat(1, factor.shape[1], 1, 1)


def noise_of(noise: CoefNoise, part: slice, records: int, weights: Tensor) -> tuple[CoefNoise, int]:
    """Return some records' noise at linear coefficients, and where the quadratic ones begin."""
    behind = quadratic_position(noise.position, records * weights.numel())
    first = part.start * weights.numel()
    scale = noise.scale[part] if isinstance(noise.scale, Tensor) else noise.scale
    each = replace(noise, scale=scale, position=noise.position + first)
    return each, behind + first * weights.shape[1]


def combined(
    hidden: Tensor,
    factor: Tensor,
    wide: Tensor,
    linear: Tensor,
    columns: Tensor,
    total: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return losses and derivatives by the features of some records; their runs join ``total``.

    ``linear = a1 + a2 W`` and ``columns = a2^T W``, float64 ``[B, M, H]``; ``wide`` is W.
    """
    terms = lane_sum(wide * linear)
    slopes = factor.double() + 0.25 * lane_sum(hidden.double()[:, None, :] * wide)
    loss = terms.new_zeros(len(hidden))
    by_hidden = torch.zeros_like(hidden, dtype=torch.float64)
    for label, row in enumerate(wide):
        loss += terms[:, label]
        by_hidden += row * slopes[:, label, None]
    by_weights = linear + columns
    of_runs = by_weights.new_zeros(-(-len(hidden) // RUN), *wide.shape)
    for i in range(min(RUN, len(hidden))):
        each = by_weights[i::RUN]  # the i-th of every run that has so many
        of_runs[: len(each)] += each
    for of_run in of_runs:
        total += of_run
    return loss, by_hidden.to(hidden.dtype)
