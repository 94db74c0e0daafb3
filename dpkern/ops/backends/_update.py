"""The update by the compiled kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...base.kernel import Kernel
from ...base.schema import BoundCall
from ...base.signature import Float, Position, Positive, Summed, any_number, repeated, written
from .. import update
from .._pair_map import PairMap, PairMaps, check_maps
from .._update_noise import UpdateNoise, check_noise
from ..noise import INTEGERS
from ._native import CPU, compiled

RULES = (update.SGD, update.Adam, update.AdamW)
_NONE = PairMaps()
Rule = tuple[float, ...]
"""An optimizer's numbers, ``update.Rule.packed``."""


@compiled
def update_tensors(  # type: ignore[empty-body]
    params: Sequence[Float[Tensor, "*P", written]],
    sums: Sequence[Summed[Tensor, "*P"]],
    buffers: Sequence[Float[Tensor, "*P", written, any_number, repeated]],
    positions: Sequence[Position],
    scales: Sequence[Positive],
    *,
    rule: Rule,
    noise: UpdateNoise | None,
    maps: Sequence[PairMap],
    gradient_scale: Positive,
) -> int:
    """Noise the sums and apply the rule.

    Args:
        buffers: those of one name for all parameters, then those of the next.
        positions, scales: of each parameter's noise; none without noise.
        maps: one for each parameter, or none. A map without a signal: the sum has the size of the
            coordinates, which a direct call leaves to the op's own check.

    Returns:
        How many sums are not finite; they count as zero.
    """


def arguments(
    params: Sequence[Tensor],
    sums: Sequence[Tensor],
    rule: update.Rule,
    state: update.State,
    gradient_scale: float,
    noise: update.Noise | None,
    maps: PairMaps | None,
) -> tuple[Any, ...]:
    """Return the arguments of ``update_tensors``, from those of ``update.step``.

    Empty where a step counter says that no update is due.
    """
    now = update.at_step_counter(noise, rule, state.steps)
    if now is None:
        return ()
    noise, rule, t, powers = now
    buffers = [buffer for name in rule.buffer_names() for buffer in state.buffers[name]]
    places = ((), ()) if noise is None else (noise.positions, noise.scales)
    numbers = rule.packed(t, powers)
    return params, sums, buffers, *places, numbers, noise, maps or _NONE, gradient_scale


def _step(bound: BoundCall) -> int:
    params, state = bound.args[0], bound.args[3]
    if not params:
        return 0
    given, bad = arguments(*bound.args), 0
    if given:
        bad = update_tensors.run(given, bound.sizes, bound.kind, bound.device)
    state.steps += 1
    return bad


def prepare(
    params: Sequence[Tensor],
    sums: Sequence[Tensor],
    rule: update.Rule,
    state: update.State,
    gradient_scale: float,
    noise: update.Noise | None,
    maps: PairMaps | None,
) -> Any:
    """Return the arguments of ``update_tensors`` that are not those of ``update.step``."""
    names, dtype = rule.buffer_names(), sums[0].dtype
    summed = dtype is params[0].dtype or (noise is not None and dtype in INTEGERS)
    lists = [state.buffers[name] for name in names]
    alike = tuple(state.buffers) == names and all(len(each) == len(params) for each in lists)
    if not (summed and alike and type(rule) in RULES and type(state) is update.State):
        return NotImplemented
    if maps is not None:
        check_maps(maps, params, sums, noised=noise is not None)
        if any(each is not None and each.signal is None for each in maps.each):
            return NotImplemented  # sums of other sizes than the parameters'
    if noise is not None:
        check_noise(noise, params, sums, maps)
        if noise.step_counter is not None:
            return NotImplemented  # what it says is read in ``arguments``
    t = state.steps + 1
    buffers = [buffer for each in lists for buffer in each]
    places = ((), ()) if noise is None else (noise.positions, noise.scales)
    return buffers, *places, rule.packed(t), noise, maps or _NONE, state


def finish(prepared: tuple[Any, ...], bad: int) -> int:
    """Return the result of ``update.step``."""
    prepared[-1].steps += 1
    return bad


def _refuse(bound: BoundCall) -> str | None:
    if bound.device != CPU and bound.device.type != "cpu":
        return f"runs on the CPU, got a tensor on {bound.device}"
    return None


KERNELS = {"update.step": Kernel(_step, _refuse)}
"""Kernels by the names of their ops."""
