"""Count the update."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd.graph import increment_version

from ...base.counts import Counts
from ...base.dtypes import DTYPES
from ...ops import update
from ...ops.backends._structs import BYTES
from ...ops.backends._update import arguments
from ._native import addresses, kernels, sizes, tallied
from ._tally import CountedRun, Kernel

Tensors = Sequence[torch.Tensor]
STEP_COUNTER = CountedRun(counts=Counts(LOAD=6), bytes_read=48)
"""The cost of reading a device step counter."""


def _step(
    params: Tensors,
    sums: Tensors,
    *,
    rule: update.Rule,
    state: update.State,
    gradient_scale: float = 1.0,
    noise: update.Noise | None = None,
    maps: update.PairMaps | None = None,
) -> tuple[int, CountedRun]:
    if not params:
        return 0, CountedRun()
    counted_step = (
        STEP_COUNTER if noise is not None and noise.step_counter is not None else CountedRun()
    )
    given = arguments(params, sums, rule, state, gradient_scale, noise, maps)
    if not given:
        state.steps += 1
        return 0, counted_step
    params, sums, buffers, positions, scales, numbers, noise, maps, gradient_scale = given
    bad, tally = tallied(
        kernels().update_tensors(
            params[0].dtype is torch.float64,
            addresses(params),
            addresses(sums),
            DTYPES["Summed"].index(sums[0].dtype),
            addresses(buffers),
            positions,
            scales,
            BYTES["Rule"](numbers),
            b"" if noise is None else BYTES["UpdateNoise"](noise),
            BYTES["PairMap"](maps),
            gradient_scale,
            sizes(params),
        )
    )
    increment_version(params)
    state.steps += 1
    return bad, tally + counted_step


KERNELS: dict[str, Kernel] = {"update.step": _step}
