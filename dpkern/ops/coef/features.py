"""The polynomial loss whose coefficients hold the last hidden layer, evaluated with their noise.

Of hidden features h, a target y_l and the weights W_l of each class l:

    a1_le  = (1/2 - y_l) h_e        H numbers,
    a2_leg = h_e h_g / 8            H^2 numbers, one independent noise each.

They depend on the network of the moment, so that nothing can be released ahead: every call is a
release of its own, with words of its own.

Source: AdLM, (23)-(25), the coefficients of lemma 5.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ... import _validate as check
from ..._dispatch import Cost, op
from .._coef_noise import Noise, check_noise, noise_cost, quadratic_position
from ..noise import FLOATS
from .polynomial import LANES, add, check_out, check_targets, copied, lane_sum

RUN = 16
"""Records whose slopes are summed one after the other; then the sums of the runs are."""

_ENTRIES_AT_ONCE = 1 << 22
"""Coefficients that the reference holds."""


def packed_features(
    hidden: torch.Tensor, weights: torch.Tensor, noise: Noise | None
) -> tuple[bool, tuple[Any, ...] | None, int, int, int]:
    """What compiled kernels begin with: wide, noise, records, classes, features."""
    release = None if noise is None else noise.packed(len(hidden) * weights.numel())
    return hidden.dtype is torch.float64, release, len(hidden), *weights.shape


def empty_results(
    hidden: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Room for the loss and both derivatives."""
    loss = torch.empty(len(hidden), dtype=torch.float64, device=hidden.device)
    return loss, torch.empty_like(weights), torch.empty_like(hidden)


def _validate_expanded(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor,
    *,
    noise: Noise | None = None,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    backend: str | None = None,
) -> str:
    check.tensor(hidden=hidden, shape=(None, None), dtypes=FLOATS, contiguous=True)
    kind: dict[str, Any] = {"dtypes": (hidden.dtype,), "device": hidden.device, "contiguous": True}
    records, width = hidden.shape
    check.tensor(weights=weights, shape=(None, width), **kind)
    check.tensor(targets=targets, shape=(records, len(weights)), **kind)
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
    return hidden.device.type


def _cost_expanded(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor,
    *,
    noise: Noise | None = None,
    **_: Any,
) -> Cost:
    (records, width), classes = hidden.shape, len(weights)
    pairs, size = records * classes, hidden.element_size()
    linear = pairs * width
    read, flops, words = noise_cost(noise, linear, linear * width)
    flops += records * width
    # 1/2 - y; of each feature: its coefficient and row of coefficients, both sums of the row and
    # the column, score, loss, slope and its run's sum, derivative.
    flops += pairs * (1 + 3 + 2 * (LANES - 1) + width * (1 + width + 4 * width + LANES - 1 + 9))
    flops += -(-records // RUN) * classes * width
    return Cost(
        bytes_read=read + size * (records * width + pairs + weights.numel()),
        bytes_written=8 * records + size * (weights.numel() + records * width),
        flops=flops,
        random_words=words,
    )


@op(validate=_validate_expanded, cost=_cost_expanded)
def expanded(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor,
    *,
    noise: Noise | None = None,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss of every record, and its derivatives; the noisy coefficients are never written.

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

    Args:
        hidden: h, float32 or float64 ``[B, H]``, contiguous; with noise, entries in [0, 1].
        targets: y ``[B, M]`` of the same dtype; with noise, entries in [0, 1].
        weights: W ``[M, H]`` of the same dtype.
        noise: scale (of all, or of each record), streams and position; None: no noise.
        out: loss, dweights and dhidden, written and returned instead of new tensors.
        backend: who runs it.

    Returns:
        ``loss`` float64 ``[B]``, without the constant M log 2; ``dweights`` ``[M, H]`` of the sum
        of all losses; ``dhidden`` ``[B, H]``.

    Guarantee: that of ``add_noise`` for one coefficient. Replacing a record moves its
    coefficients by at most M (H + H^2/4) in l1. ``dhidden`` is not private.

    ======================= ==========================================
    edge case               result
    ======================= ==========================================
    no records              empty; derivative by the weights 0
    no features, no classes losses 0; derivatives 0 where not empty
    NaN, inf                spreads; with noise from weights only
    hidden, target outside  ``InvalidInput`` if there is noise
    ======================= ==========================================

    Raises:
        InvalidInput: wrong shapes, dtypes, strides, scales, an entry outside.
        PrivacyError: rounding and noise share a stream, or a CUDA graph is recorded.

    Source: AdLM, (23)-(25), lemma 5 and line 27 of algorithm 1.
    """
    hidden, targets, weights = hidden.detach(), targets.detach(), weights.detach()
    records, width = hidden.shape
    wide = weights.double()
    loss = torch.zeros(records, dtype=torch.float64, device=hidden.device)
    dhidden, total = torch.zeros_like(hidden), torch.zeros_like(wide)
    at_once = RUN * max(1, _ENTRIES_AT_ONCE // (RUN * weights.numel() * width or 1))
    for start in range(0, records, at_once):
        part = slice(start, start + at_once)
        factor = 0.5 - targets[part]
        a1, a2 = _noised(hidden[part], factor, noise, start, records)
        linear = a1.double() + lane_sum(a2.double() * wide[:, None, :])
        terms = lane_sum(wide * linear)
        slopes = factor.double() + 0.25 * lane_sum(hidden[part].double()[:, None, :] * wide)
        by_hidden = torch.zeros_like(hidden[part], dtype=torch.float64)
        for label, row in enumerate(wide):
            loss[part] += terms[:, label]
            by_hidden += row * slopes[:, label, None]
        dhidden[part] = by_hidden.to(hidden.dtype)
        columns = torch.zeros_like(linear)
        for e in range(width):
            columns += a2[:, :, e].double() * wide[:, e, None]
        by_weights = linear + columns
        for first in range(0, len(by_weights), RUN):
            of_run = torch.zeros_like(total)
            for of_record in by_weights[first : first + RUN]:
                of_run += of_record
            total += of_run
    made = loss, total.to(hidden.dtype), dhidden
    return made if out is None else copied(made, out)


def _noised(
    hidden: torch.Tensor, factor: torch.Tensor, noise: Noise | None, start: int, records: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Coefficients of some of the records, from ``start`` on."""
    count, width = hidden.shape
    classes = factor.shape[1]
    a1 = factor[:, :, None] * hidden[:, None, :]
    square = hidden[:, :, None] * (hidden[:, None, :] * 0.125)
    a2 = square[:, None].repeat(1, classes, 1, 1)
    if noise is not None:
        scale = noise.scale
        if isinstance(scale, torch.Tensor):
            noise = replace(noise, scale=scale[start : start + count])
        behind = quadratic_position(noise.position, records * classes * width)
        add(a1, noise, noise.position + start * classes * width)
        add(a2, noise, behind + start * classes * width * width)
    return a1, a2
