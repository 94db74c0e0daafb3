"""The update by the compiled kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...base.dispatch import Kernel
from ...base.schema import BoundCall
from ...base.signature import Float, Position, Positive, Summed, any_number, written
from .. import update
from .._update_noise import UpdateNoise
from ._native import CPU, compiled

Rule = tuple[float, ...]
"""An optimizer's numbers, ``update.Rule.packed``."""


@compiled
def update_tensors(  # type: ignore[empty-body]
    params: Sequence[Float[Tensor, "*P", written]],
    sums: Sequence[Summed[Tensor, "*P"]],
    buffers: Sequence[Float[Tensor, "...", written, any_number]],
    positions: Sequence[Position],
    scales: Sequence[Positive],
    *,
    rule: Rule,
    noise: UpdateNoise | None,
    gradient_scale: Positive,
) -> int:
    """Noise the sums and apply the rule.

    Args:
        buffers: those of one name for all parameters, then those of the next.
        positions, scales: of each parameter's noise; none without noise.

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
) -> tuple[Any, ...]:
    """Return the arguments of ``update_tensors``, from those of ``update.step``."""
    noise, t, powers = update.at_clock(noise, rule, state.steps)
    buffers = [buffer for name in rule.buffer_names() for buffer in state.buffers[name]]
    places = ((), ()) if noise is None else (noise.positions, noise.scales)
    return params, sums, buffers, *places, rule.packed(t, powers), noise, gradient_scale


def _step(bound: BoundCall) -> int:
    params, state = bound.args[0], bound.args[3]
    if not params:
        return 0
    bad = update_tensors.run(arguments(*bound.args), bound.sizes, bound.kind, bound.device)
    state.steps += 1
    return bad


def _refuse(bound: BoundCall) -> str | None:
    if bound.device != CPU and bound.device.type != "cpu":
        return f"runs on the CPU, got a tensor on {bound.device}"
    return None


KERNELS = {"update.step": Kernel(_step, _refuse)}
"""Kernels by the names of their ops."""
