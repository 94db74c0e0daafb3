"""Update parameters: noise, division by the public batch size and the rule in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..base import validate as check
from ..base.dispatch import op
from ..base.errors import InvalidInput
from ..base.laws import SCALE_CELLS
from ..base.renamed import old_names
from ..base.signature import AnyFloat, Float, Int64, Positive, any_number, strided, written
from . import _lattice, _project
from ._count import Count, count
from ._draws import Draws
from ._pair_map import PairMap, PairMaps, check_maps, shape_of_sum
from ._project import Ball, Box, Projection, Simplex
from ._rules import SGD, Adam, AdamW, Rule, State
from ._step_counter import step_counter
from ._update_noise import UpdateNoise as Noise
from ._update_noise import at_step_counter, check_noise
from .noise import INTEGERS


def _check_step(
    params: Sequence[Tensor],
    sums: Sequence[Tensor],
    rule: Rule,
    state: State,
    gradient_scale: float,
    noise: Noise | None,
    maps: PairMaps | None,
) -> None:
    if not isinstance(sums, (list, tuple)):
        raise InvalidInput(
            "sums",
            expected="a list of tensors",
            got=type(sums).__name__,
            remedy="Wrap a single tensor in a list.",
        )
    check.one_each("sums", sums, len(params))
    _check_rule(rule)
    names = rule.buffer_names()
    if not isinstance(state, State) or tuple(state.buffers) != names:
        raise InvalidInput(
            "state",
            expected=f"a State with buffers {list(names)}",
            got=list(state.buffers) if isinstance(state, State) else type(state).__name__,
            remedy="Make it with rule.init(params).",
        )
    if not params:
        return
    first = params[0]
    dtypes = (*INTEGERS, first.dtype) if noise is not None else (first.dtype,)
    if maps is not None:
        check_maps(maps, params, sums, noised=noise is not None)
    check_sums(params, sums, dtypes, maps)
    kind: dict[str, Any] = {"dtypes": (first.dtype,), "device": first.device, "contiguous": True}
    shapes = [p.shape for p in params]
    for name in names:
        buffers = state.buffers[name]
        check.one_each(f"state.{name}", buffers, len(params))
        if not check.alike(buffers, shapes=shapes, **kind):
            for i, (p, b) in enumerate(zip(params, buffers, strict=True)):
                check.tensor_at(f"state.{name}[{i}]", b, shape=p.shape, **kind)
    if noise is not None:
        check_noise(noise, params, sums, maps)


def check_sums(
    params: Sequence[Tensor],
    sums: Sequence[Any],
    dtypes: tuple[torch.dtype, ...],
    maps: PairMaps | None,
) -> None:
    """Check sums of the parameters' shapes, or of their coordinates, all of the first one's dtype.

    Raises:
        InvalidInput: anything else.
    """
    kind: dict[str, Any] = {"device": params[0].device, "contiguous": True}
    check.tensor_at("sums[0]", sums[0], dtypes=dtypes, **kind)
    kind["dtypes"] = (sums[0].dtype,)
    each = (None,) * len(params) if maps is None else maps.each
    for i, total in enumerate(sums):
        if not isinstance(total, Tensor):
            check.tensor_at(f"sums[{i}]", total)
    shapes = [shape_of_sum(*given) for given in zip(params, sums, each, strict=True)]
    if not check.alike(sums, shapes=shapes, **kind):
        for i, (shape, total) in enumerate(zip(shapes, sums, strict=True)):
            check.tensor_at(f"sums[{i}]", total, shape=shape, **kind)


def _check_rule(rule: object) -> None:
    if not isinstance(rule, (SGD, Adam)):
        raise InvalidInput(
            "rule",
            expected="an update.SGD, Adam or AdamW",
            got=type(rule).__name__,
            remedy="Use one of dpkern's rules; see dpkern.ops.update.",
        )


@op(check=_check_step)
def step(
    params: Sequence[Float[Tensor, "*P", written, any_number]],
    sums: Sequence[Tensor],
    *,
    rule: Rule,
    state: State,
    gradient_scale: Positive = 1.0,
    noise: Noise | None = None,
    maps: PairMaps | None = None,
) -> Count:
    """Noise the clipped sums and apply the optimizer, reading and writing everything once.

    ``y = floor((v + X) / 2^14)``; gradient ``= gradient_scale (scale / 64) y``; then the rule
    updates ``params`` and ``state`` in place. Noise is made in registers and never stored. A sum
    with a map is noised in other coordinates, in float64 but for the rounding of ``signal sum`` to
    the sum's dtype: gradient ``= gradient_scale back ((scale / 64) y)``, y from ``signal sum``, or
    from the sum itself where it holds coordinates already (``signal=None``).

    Args:
        params: float32 or float64 tensors of one dtype and device, contiguous.
        sums: clipped sums of the same shapes: int32 or int64 counts of ``u = scale / 2^20``, or
            floats of the parameters' dtype, which are rounded stochastically to ``u``. Those of
            coordinates have shapes ``[..., r]``.
        rule: ``SGD``, ``Adam`` or ``AdamW``, with the meaning of ``torch.optim``.
        state: from ``rule.init(params)``; its step count advances.
        gradient_scale: 1 / (public expected batch size).
        noise: the step's noise; None applies the rule to the float sums (not private).
        maps: the maps of sums whose noise is added in other coordinates, and takes as many
            positions as there are coordinates. Integer sums hold coordinates, and are led back
            after the noise: their certificate speaks of released bits. None maps nothing.

    Returns:
        How many float sums, or coordinates of them, were not finite (each counts as zero): an int,
        or for parameters on a device a 0-d int64 tensor there, so that nothing waits.

    Raises:
        InvalidInput: lists, shapes, dtypes or numbers that do not fit.

    ============== ======================================
    edge case      result
    ============== ======================================
    no parameters  nothing happens
    not due        nothing but the state's count changes
    empty tensor   skipped
    NaN in a sum   counts as zero, counted in the result
    ============== ======================================
    """
    bad: Count = 0
    params = [p.detach() for p in params]
    now = at_step_counter(noise, rule, state.steps)
    if now is None:
        state.steps += 1 if params else 0
        return bad
    noise, rule, t, powers = now
    for i, (param, total) in enumerate(zip(params, sums, strict=True)):
        mapped = None if maps is None else maps.each[i]
        if noise is None:
            finite = torch.isfinite(total)
            bad = bad + count(~finite)
            gradient = torch.where(finite, total, torch.zeros_like(total)) * gradient_scale
        elif mapped is not None:
            gradient, unusable = _mapped_gradient(param, total, mapped, noise, i, gradient_scale)
            bad = bad + unusable
        else:
            y, unusable = _noisy_sum(total, noise, i)
            bad = bad + unusable
            factor = noise.scales[i] / SCALE_CELLS * gradient_scale
            gradient = y.to(param.dtype) * torch.tensor(factor, dtype=param.dtype, device="cpu")
        buffers = [state.buffers[name][i] for name in rule.buffer_names()]
        rule.apply(param, gradient, buffers, t, powers)
    state.steps += 1 if params else 0
    return bad


def _noisy_sum(total: Tensor, noise: Noise, i: int) -> tuple[Tensor, Count]:
    draws = noise.draw(i, total.numel()).view(total.shape).to(total.device)
    if total.dtype in INTEGERS:
        return _lattice.release_integers(total, draws), 0
    bits = noise.rounding_bits(i, total.numel()).view(total.shape).to(total.device)
    return _lattice.release_floats(total, noise.scales[i], bits, draws)


def _mapped_gradient(
    param: Tensor, total: Tensor, mapped: PairMap, noise: Noise, i: int, gradient_scale: float
) -> tuple[Tensor, Count]:
    """Return the gradient of a sum that is noised in other coordinates, and what is not finite."""
    coordinates, factor = total.reshape(-1, total.shape[-1]), gradient_scale
    if mapped.signal is not None:
        taps = total.reshape(-1, mapped.taps).double()
        coordinates = (taps @ mapped.signal.to(total.device).T).to(total.dtype)
    y, unusable = _noisy_sum(coordinates.contiguous(), noise, i)
    if total.dtype in INTEGERS:
        noisy, factor = y.double(), noise.scales[i] / SCALE_CELLS * gradient_scale
    else:
        noisy = (y * _lattice.cell(noise.scales[i], total.dtype)).double()
    gradient = noisy.view(-1, mapped.rank) @ mapped.back.to(total.device).T
    return (gradient * factor).to(param.dtype).view_as(param), unusable


def _check_advance(step_counter: Tensor, rule: Rule) -> None:
    _check_rule(rule)


@op(check=_check_advance)
def advance(step_counter: Int64[Tensor, "6", written], *, rule: Rule) -> Tensor:
    """Take one more step, in place: ``steps += 1``, and multiply each power by its beta.

    The learning rate, and the number of the step that is due, stay.

    Args:
        step_counter: int64 ``[6]``, from ``step_counter``.
        rule: the rule that the step counter was made for.

    Returns:
        The step counter.

    Raises:
        InvalidInput: no step counter, or no rule.
    """
    step_counter[0] += 1
    powers = step_counter[1:3].view(torch.float64)
    for i, beta in enumerate(rule.betas if isinstance(rule, Adam) else (1.0, 1.0)):
        powers[i] *= beta
    return step_counter


@op(check=_project.check)
def project(params: Sequence[AnyFloat[Tensor, "...", written, strided]], onto: Projection) -> None:
    """Move the parameters, read as one vector x, to the nearest point of a convex set, in place.

        Ball       x min(1, radius / ||x||_2)
        Box        min(max(x_i, low), high)
        Simplex    max(x_i - t, 0) with the t for which they add to ``total``

    A function of parameters that were released already: it costs no privacy.

    Guarantee: norm and threshold are computed in float64; the result is in the set up to the
    rounding of the parameters' dtype.

    Args:
        params: float32 or float64 tensors on one device.
        onto: the set.

    Raises:
        InvalidInput: wrong types, dtypes or devices.

    =========== ==================================================
    edge case   result
    =========== ==================================================
    empty       unchanged
    inside      unchanged, bit for bit (Ball and Box)
    NaN         stays NaN and, but for Box, spreads to all entries
    =========== ==================================================

    Reference: Duchi et al., Efficient Projections onto the l1-Ball, 2008, for the simplex.
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
    "PairMap",
    "PairMaps",
    "Projection",
    "Rule",
    "Simplex",
    "State",
    "advance",
    "at_step_counter",
    "project",
    "step",
    "step_counter",
]

__getattr__ = old_names(__name__, {"clock": "step_counter"})
