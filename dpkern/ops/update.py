"""The update: noise, division by the public batch size and the optimizer rule in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from .. import _validate as check
from .._dispatch import Cost, op
from ..errors import InvalidInput, PrivacyError
from ..laws import LAWS, SCALE_CELLS
from ..rng import Stream
from . import _lattice
from ._rules import SGD, Adam, AdamW, Rule, State
from .noise import (
    FLOATS,
    INTEGERS,
    check_rounding,
    check_scale,
    noise_words,
    rounding_words,
)


@dataclass(frozen=True, kw_only=True)
class Noise:
    """The noise of one step.

    Attributes:
        distribution: ``gaussian`` or ``laplace``.
        scales: certified standard deviation (or Laplace scale) of each tensor's sum.
        stream: keystream of the noise, this step's own.
        positions: where each tensor starts in the stream; ranges must not overlap.
        rounding: keystream of the stochastic rounding, for float sums.
    """

    distribution: str
    scales: tuple[float, ...]
    stream: Stream
    positions: tuple[int, ...]
    rounding: Stream | None = None


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
    _same_length(len(params), sums=sums)
    if not isinstance(rule, (SGD, Adam)):
        raise InvalidInput(
            "rule",
            expected="an update.SGD, Adam or AdamW",
            got=type(rule).__name__,
            remedy="Use one of dpkern's rules; see dpkern.ops.update.",
        )
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
        _same_length(len(params), **{f"state.{name}": buffers})
        if not check.alike(buffers, shapes=shapes, **like_first):
            for i, (p, b) in enumerate(zip(params, buffers, strict=True)):
                check.tensor_at(f"state.{name}[{i}]", b, shape=p.shape, **like_first)
    if noise is not None:
        _check_noise(noise, params, sums)
    return first.device.type


def _same_length(count: int, **group: Sequence[object]) -> None:
    ((name, got),) = group.items()
    if len(got) != count:
        raise InvalidInput(
            name,
            expected=f"{count} entries, one per parameter",
            got=str(len(got)),
            remedy="Give exactly one for each parameter.",
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


def _check_noise(
    noise: Noise, params: Sequence[torch.Tensor], sums: Sequence[torch.Tensor]
) -> None:
    if not isinstance(noise, Noise):
        raise InvalidInput(
            "noise",
            expected="an update.Noise",
            got=type(noise).__name__,
            remedy="Make one with update.Noise(distribution=..., scales=..., ...).",
        )
    check.choice(LAWS, distribution=noise.distribution)
    if not isinstance(noise.stream, Stream):
        raise InvalidInput(
            "noise.stream",
            expected="a dpkern.rng.Stream",
            got=type(noise.stream).__name__,
            remedy="Make one with Key.fresh().stream(Purpose.NOISE, step).",
        )
    _same_length(len(params), **{"noise.scales": noise.scales})
    _same_length(len(params), **{"noise.positions": noise.positions})
    for scale in noise.scales:
        check_scale("noise.scales", scale)
    for position in noise.positions:
        if type(position) is not int or not 0 <= position <= 2**62:
            check.integer(0, 2**62, **{"noise.positions": position})
    taken = sorted(
        (first, first + p.numel()) for first, p in zip(noise.positions, params, strict=True)
    )
    if any(end > following for (_, end), (following, _) in pairwise(taken)):
        raise PrivacyError(
            "noise.positions",
            expected="ranges that do not overlap",
            got=noise.positions,
            remedy="Start each tensor after the end of the one before: no word may be used twice.",
        )
    if sums[0].dtype not in INTEGERS:
        check_rounding("noise.rounding", noise.rounding, noise.stream)


def _cost_step(
    params: Sequence[torch.Tensor],
    sums: Sequence[torch.Tensor],
    *,
    rule: Rule,
    noise: Noise | None = None,
    **_: Any,
) -> Cost:
    n = sum(p.numel() for p in params)
    moved = sum(p.numel() * p.element_size() for p in params) * (1 + len(rule.buffer_names()))
    read = moved + sum(s.numel() * s.element_size() for s in sums)
    rounded = noise is not None and bool(sums) and sums[0].dtype not in INTEGERS
    words = (noise_words(n) if noise else 0) + (rounding_words(n) if rounded else 0)
    per_entry = (4 if isinstance(rule, SGD) else 14) + (9 if rounded else 1)
    return Cost(bytes_read=read, bytes_written=moved, flops=per_entry * n, random_words=words)


@op(validate=_validate_step, cost=_cost_step)
def step(
    params: Sequence[torch.Tensor],
    sums: Sequence[torch.Tensor],
    *,
    rule: Rule,
    state: State,
    gradient_scale: float = 1.0,
    noise: Noise | None = None,
    backend: str | None = None,
) -> int:
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
        How many float sums were not finite (each counts as zero).

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
    bad = 0
    params = [p.detach() for p in params]
    for i, (param, total) in enumerate(zip(params, sums, strict=True)):
        if noise is None:
            finite = torch.isfinite(total)
            bad += int((~finite).sum())
            gradient = torch.where(finite, total, torch.zeros_like(total)) * gradient_scale
        else:
            y, unusable = _noisy_sum(total, noise, i)
            bad += unusable
            factor = noise.scales[i] / SCALE_CELLS * gradient_scale
            gradient = y.to(param.dtype) * torch.tensor(factor, dtype=param.dtype)
        buffers = [state.buffers[name][i] for name in rule.buffer_names()]
        rule.apply(param, gradient, buffers, state.steps + 1)
    state.steps += 1 if params else 0
    return bad


def _noisy_sum(total: torch.Tensor, noise: Noise, i: int) -> tuple[torch.Tensor, int]:
    position, count = noise.positions[i], total.numel()
    draws = _lattice.draws(noise.stream, noise.distribution, position, count)
    draws = draws.view(total.shape).to(total.device)
    if total.dtype in INTEGERS:
        return _lattice.release_integers(total, draws), 0
    assert noise.rounding is not None
    bits = _lattice.rounding_bits(noise.rounding, position, count)
    bits = bits.view(total.shape).to(total.device)
    return _lattice.release_floats(total, noise.scales[i], bits, draws)


__all__ = ["SGD", "Adam", "AdamW", "Noise", "Rule", "State", "step"]
