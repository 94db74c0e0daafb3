"""The update: noise, division by the public batch size and the optimizer rule in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..base import validate as check
from ..base.dispatch import op
from ..base.errors import InvalidInput
from ..base.laws import SCALE_CELLS
from . import _lattice, _project
from ._clock import check_clock, clock
from ._count import Count, count
from ._draws import Draws
from ._project import Ball, Box, Projection, Simplex
from ._rules import SGD, Adam, AdamW, Rule, State
from ._update_noise import Noise, at_clock, check_noise
from .noise import FLOATS, INTEGERS


def _validate_step(
    params: Sequence[torch.Tensor],
    sums: Sequence[torch.Tensor],
    *,
    rule: Rule,
    state: State,
    gradient_scale: float = 1.0,
    noise: Noise | None = None,
    backend: str | None = None,
) -> str:
    for name, group in (("params", params), ("sums", sums)):
        if not isinstance(group, (list, tuple)):
            raise InvalidInput(
                name,
                expected="a list of tensors",
                got=type(group).__name__,
                remedy="Wrap a single tensor in a list.",
            )
    check.one_each("sums", sums, len(params))
    _check_rule(rule)
    check.positive(gradient_scale=gradient_scale)
    names = rule.buffer_names()
    if not isinstance(state, State) or tuple(state.buffers) != names:
        raise InvalidInput(
            "state",
            expected=f"a State with buffers {list(names)}",
            got=list(state.buffers) if isinstance(state, State) else type(state).__name__,
            remedy="Make it with rule.init(params).",
        )
    if not params:
        return "cpu"
    first = check.tensor_at("params[0]", params[0], dtypes=FLOATS)
    sum_dtypes = (*INTEGERS, first.dtype) if noise is not None else (first.dtype,)
    _check_pair(0, params[0], sums[0], first, sum_dtypes)
    kind: dict[str, Any] = {"device": first.device, "contiguous": True}
    like_first: dict[str, Any] = {"dtypes": (first.dtype,), **kind}
    shapes = [getattr(p, "shape", None) for p in params]
    if not (
        check.alike(params, **like_first)
        and check.alike(sums, dtypes=(sums[0].dtype,), shapes=shapes, **kind)
    ):
        for i, (p, s) in enumerate(zip(params, sums, strict=True)):
            _check_pair(i, p, s, first, (sums[0].dtype,))
    for name in names:
        buffers = state.buffers[name]
        check.one_each(f"state.{name}", buffers, len(params))
        if not check.alike(buffers, shapes=shapes, **like_first):
            for i, (p, b) in enumerate(zip(params, buffers, strict=True)):
                check.tensor_at(f"state.{name}[{i}]", b, shape=p.shape, **like_first)
    if noise is not None:
        check_noise(noise, params, sums)
    return first.device.type


def _check_rule(rule: object) -> None:
    if not isinstance(rule, (SGD, Adam)):
        raise InvalidInput(
            "rule",
            expected="an update.SGD, Adam or AdamW",
            got=type(rule).__name__,
            remedy="Use one of dpkern's rules; see dpkern.ops.update.",
        )


def _check_pair(
    i: int,
    param: torch.Tensor,
    total: torch.Tensor,
    first: torch.Tensor,
    sum_dtypes: tuple[torch.dtype, ...],
) -> None:
    names = f"params[{i}]", f"sums[{i}]"
    check.tensor_at(names[0], param, dtypes=(first.dtype,), device=first.device, contiguous=True)
    check.tensor_at(
        names[1], total, shape=param.shape, dtypes=sum_dtypes, device=first.device, contiguous=True
    )


@op(validate=_validate_step)
def step(
    params: Sequence[torch.Tensor],
    sums: Sequence[torch.Tensor],
    *,
    rule: Rule,
    state: State,
    gradient_scale: float = 1.0,
    noise: Noise | None = None,
    backend: str | None = None,
) -> Count:
    """Noise the clipped sums and apply the optimizer, reading and writing everything once.

    ``y = floor((v + X) / 2^14)``; gradient ``= gradient_scale (scale / 64) y``; then the rule
    updates ``params`` and ``state`` in place. Noise is made in registers and never stored.

    Args:
        params: float32 or float64 tensors of one dtype and device, contiguous.
        sums: clipped sums of the same shapes: int32 or int64 counts of ``u = scale / 2^20``, or
            floats of the parameters' dtype, which are rounded stochastically to ``u``.
        rule: ``SGD``, ``Adam`` or ``AdamW``, with the meaning of ``torch.optim``.
        state: from ``rule.init(params)``; its step count advances.
        gradient_scale: 1 / (public expected batch size).
        noise: the step's noise; None applies the rule to the float sums (not private).
        backend: who runs it.

    Returns:
        How many float sums were not finite (each counts as zero): an int, or for parameters on a
        device a 0-d int64 tensor there, so that nothing waits.

    ============== ======================================
    edge case      result
    ============== ======================================
    no parameters  nothing happens
    empty tensor   skipped
    NaN in a sum   counts as zero, counted in the result
    ============== ======================================

    Raises:
        InvalidInput: lists, shapes, dtypes or numbers that do not fit.
    """
    bad: Count = 0
    params = [p.detach() for p in params]
    noise, t, powers = at_clock(noise, rule, state.steps)
    for i, (param, total) in enumerate(zip(params, sums, strict=True)):
        if noise is None:
            finite = torch.isfinite(total)
            bad = bad + count(~finite)
            gradient = torch.where(finite, total, torch.zeros_like(total)) * gradient_scale
        else:
            y, unusable = _noisy_sum(total, noise, i)
            bad = bad + unusable
            factor = noise.scales[i] / SCALE_CELLS * gradient_scale
            gradient = y.to(param.dtype) * torch.tensor(factor, dtype=param.dtype)
        buffers = [state.buffers[name][i] for name in rule.buffer_names()]
        rule.apply(param, gradient, buffers, t, powers)
    state.steps += 1 if params else 0
    return bad


def _noisy_sum(total: torch.Tensor, noise: Noise, i: int) -> tuple[torch.Tensor, Count]:
    draws = noise.draw(i, total.numel()).view(total.shape).to(total.device)
    if total.dtype in INTEGERS:
        return _lattice.release_integers(total, draws), 0
    bits = noise.rounding_bits(i, total.numel()).view(total.shape).to(total.device)
    return _lattice.release_floats(total, noise.scales[i], bits, draws)


def _validate_advance(clock: torch.Tensor, *, rule: Rule, backend: str | None = None) -> str:
    _check_rule(rule)
    return check_clock("clock", clock).device.type


@op(validate=_validate_advance)
def advance(clock: torch.Tensor, *, rule: Rule, backend: str | None = None) -> torch.Tensor:
    """One more step, in place: ``steps += 1`` and each power times its beta.

    Args:
        clock: int64 ``[3]``, from ``clock``.
        rule: the rule that the clock was made for.
        backend: who runs it.

    Returns:
        The clock.

    Raises:
        InvalidInput: no clock, or no rule.
    """
    clock[0] += 1
    powers = clock[1:].view(torch.float64)
    for i, beta in enumerate(rule.betas if isinstance(rule, Adam) else (1.0, 1.0)):
        powers[i] *= beta
    return clock


@op(validate=_project.validate)
def project(
    params: Sequence[torch.Tensor], onto: Projection, *, backend: str | None = None
) -> None:
    """Move the parameters, read as one vector x, to the nearest point of a convex set, in place.

        Ball       x min(1, radius / ||x||_2)
        Box        min(max(x_i, low), high)
        Simplex    max(x_i - t, 0) with the t for which they add to ``total``

    A function of parameters that were released already: it costs no privacy.

    Args:
        params: float32 or float64 tensors on one device.
        onto: the set.
        backend: who runs it.

    Guarantee: norm and threshold are computed in float64; the result is in the set up to the
    rounding of the parameters' dtype.

    =========== ==================================================
    edge case   result
    =========== ==================================================
    empty       unchanged
    inside      unchanged, bit for bit (Ball and Box)
    NaN         stays NaN and, but for Box, spreads to all entries
    =========== ==================================================

    Raises:
        InvalidInput: wrong types, dtypes or devices.

    Source: Duchi et al., Efficient Projections onto the l1-Ball, 2008, for the simplex.
    """
    _project.move(params, onto)


__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Ball",
    "Box",
    "Draws",
    "Noise",
    "Projection",
    "Rule",
    "Simplex",
    "State",
    "advance",
    "at_clock",
    "clock",
    "project",
    "step",
]
