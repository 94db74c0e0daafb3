"""Release clipped sums as noisy gradients, through each block's release coordinates.

    signal = forward(sum)     noisy = signal + sd z     gradient = scale back(noisy) (+ centre)

Blocks without a map, and those whose float sums have a matrix for every channel pair, are noised
inside the fused update wherever that is possible; here are the others, and all blocks of a
mechanism that learns from its gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..base.errors import InvalidInput, PrivacyError
from ..base.laws import SCALE_CELLS
from ..base.phase import BACK, IMPORTANCE, MAP, NOISE, phase
from ..base.rng import Purpose
from ..ops import clip, noise, update
from ..privacy.mechanisms.plan import Block, Importance, Plan, first_positions
from . import sums as summing
from .noise import part

if TYPE_CHECKING:
    from .step import DPStep

IMPORTANCE_STREAM = 1
"""The importance has streams of its own, so that no word of the gradients' noise is used again."""


def signals(values: Sequence[torch.Tensor], plan: Plan) -> list[torch.Tensor]:
    """Return gradients or sums ``[..., *parameter]`` in noised coordinates, in the sums' dtype."""
    return [signal(value, block) for value, block in zip(values, plan.blocks, strict=True)]


def signal(value: torch.Tensor, block: Block) -> torch.Tensor:
    """Return one block's gradients or sum in noised coordinates, in the sum's dtype."""
    if block.release is None or block.release.is_identity:
        return value
    with phase(MAP):
        return block.release.forward(value).to(clip.sum_dtype(value.dtype)).contiguous()


def clipped(per_sample: Sequence[torch.Tensor], plan: Plan, backend: str | None) -> clip.ClipResult:
    """Clip gradients ``[B, *parameter]`` by each block's norm and sum them in its coordinates.

    Raises:
        InvalidInput: blocks that are clipped by norms of different kinds.
    """
    with phase(MAP):
        moved = [_centred(g, b) for g, b in zip(per_sample, plan.blocks, strict=True)]
    kinds = {block.release.norm for block in plan.blocks if block.release is not None}
    if len(kinds) > 1:
        raise InvalidInput(
            "per_sample",
            expected="blocks whose bounds speak of one norm",
            got=", ".join(sorted(kinds)),
            remedy="Clip with the engine, which adds up norms of several kinds.",
        )
    if kinds == {"gradient"}:
        gains = [1.0 if b.release is None else b.release.gain for b in plan.blocks]
        normed = [g if gain == 1 else g * gain for g, gain in zip(moved, gains, strict=True)]
        result = summing.clipped(summing.common_dtype(normed), plan, None, backend)
        # A gain is part of the norm, and of the map to come.
        sums = [s if gain == 1 else s / gain for s, gain in zip(result.sums, gains, strict=True)]
        result = replace(result, sums=tuple(sums if plan.maps_late else signals(sums, plan)))
    else:
        coordinates = summing.common_dtype(signals(moved, plan))
        result = summing.clipped(coordinates, plan, None, backend)
    if not plan.needs_raw:
        return result
    finite = torch.isfinite(result.norms)
    return replace(result, raw=tuple(g[finite].sum(0, dtype=torch.float64) for g in per_sample))


def _centred(gradient: torch.Tensor, block: Block) -> torch.Tensor:
    centre = None if block.release is None else block.release.centre
    if centre is None:
        return gradient
    return gradient - centre.to(device=gradient.device, dtype=gradient.dtype)


def joined(
    sums: Sequence[torch.Tensor] | None, more: Sequence[torch.Tensor] | None
) -> list[torch.Tensor] | None:
    """Return the raw sums of several physical batches, float64; nothing is changed in place."""
    if more is None:
        return None if sums is None else list(sums)
    wide = [total.double() for total in more]
    return wide if sums is None else [a + b for a, b in zip(sums, wide, strict=True)]


def gradient(
    signal: torch.Tensor,
    block: Block,
    drawn: update.Noise | None,
    *,
    dtype: torch.dtype,
    exact: bool,
    scale: float,
    backend: str | None,
) -> torch.Tensor:
    """Return the noisy gradient of one block: of ``dtype`` without a map, float64 with one.

    Args:
        signal: the sum in the block's coordinates; changed.
        block: the block of this sum.
        drawn: the step's noise. None adds none.
        dtype: float32 or float64.
        exact: the signal counts lattice units.
        scale: 1 / public batch size.
        backend: name of the backend that adds the noise. None selects the first that can.
    """
    i = block.index
    unit = drawn.scales[i] / SCALE_CELLS if drawn is not None and exact else 1.0

    def add_noise(values: torch.Tensor) -> torch.Tensor:
        if drawn is None or block.noise_scale == 0:
            return values
        with phase(NOISE):
            return noise.add_noise(
                values,
                stream=drawn.stream,
                position=drawn.positions[i],
                distribution=drawn.distribution,
                scale=None if exact else drawn.scales[i],
                rounding=drawn.rounding,
                draws=drawn.draws,
                backend=backend,
            )

    release = block.release
    if release is None or release.is_identity:
        return add_noise(signal).to(dtype) * (unit * scale)
    with phase(BACK):
        released = release.noised(signal, add_noise)
    released = released.mul_(unit * scale)
    if release.restore and release.centre is not None:
        released += release.centre.to(released.device)
    return released


def step_group(
    group: tuple[Sequence[int], update.Rule, update.State],
    held: Sequence[torch.Tensor],
    sums: Sequence[torch.Tensor],
    ready: Mapping[int, torch.Tensor],
    noise_now: update.Noise | None,
    maps: update.PairMaps | None,
    *,
    scale: float,
    backend: str | None,
) -> None:
    """Update a group: ``ready`` gradients as they are, other sums with their maps and noise.

    It is one step of the rule, whichever way the members take.
    """
    indices, rule, state = group
    finished = [k for k, i in enumerate(indices) if i in ready] if ready else []
    if not finished:
        _step(indices, held, sums, rule, state, scale, part(noise_now, indices), maps, backend)
        return
    before = state.steps
    for places in (finished, [k for k, i in enumerate(indices) if i not in ready]):
        chosen = [indices[k] for k in places]
        buffers = {name: [all_[k] for k in places] for name, all_ in state.buffers.items()}
        mine = update.State(before, buffers)
        if places is finished:
            values = {i: ready[i].to(held[i].dtype).contiguous() for i in chosen}
            _step(chosen, held, values, rule, mine, 1.0, None, None, backend)
        else:
            _step(chosen, held, sums, rule, mine, scale, part(noise_now, chosen), maps, backend)
    state.steps = before + 1


def _step(
    indices: Sequence[int],
    held: Sequence[torch.Tensor],
    sums: Sequence[torch.Tensor] | Mapping[int, torch.Tensor],
    rule: update.Rule,
    state: update.State,
    scale: float,
    drawn: update.Noise | None,
    maps: update.PairMaps | None,
    backend: str | None,
) -> None:
    update.step(
        [held[i] for i in indices],
        [sums[i] for i in indices],
        rule=rule,
        state=state,
        gradient_scale=scale,
        noise=drawn,
        maps=None if maps is None else maps.part(indices),
        backend=backend,
    )


def weigh(
    step: DPStep,
    importance: Importance,
    raw: Sequence[torch.Tensor] | None,
    means: Sequence[torch.Tensor] | None,
) -> None:
    """Release how much each parameter matters, and shape the step's noise by it.

    ``w = clip_2(means, bound) + N(0, sd^2)``, all tensors clipped together: two data sets can move
    the clipped mean by twice the bound, whatever their relation.

    Args:
        step: the private step; its release is recorded already.
        importance: bound and noise.
        raw: sums without clipping of the step's own samples, for ``source`` "lot"; else None.
        means: what the caller set, for ``source`` "full".
    """
    with phase(IMPORTANCE):
        if importance.source == "lot":
            sums = list(raw or [torch.zeros_like(p, dtype=torch.float64) for p in step.params])
            if step._reduce is not None:
                step._reduce(sums)
            means = [total / step.expected_batch_size for total in sums]
        assert means is not None
        assert step.memory is not None
        wide = [mean.double() for mean in means]
        norm = math.sqrt(math.fsum(float(mean.square().sum()) for mean in wide))
        if math.isfinite(norm):
            factor = min(1.0, importance.bound * clip.SLACK / norm) if norm > 0 else 1.0
            wide = [mean * factor for mean in wide]
        else:
            wide = [torch.zeros_like(mean) for mean in wide]
        stream = step.key.stream(Purpose.NOISE, step.steps, IMPORTANCE_STREAM)
        rounding = step.key.stream(Purpose.ROUNDING, step.steps, IMPORTANCE_STREAM)
        positions = first_positions([tuple(mean.shape) for mean in wide])
        for mean, position in zip(wide, positions, strict=True):
            noise.add_noise(
                mean,
                stream=stream,
                position=position,
                scale=importance.noise_scale,
                rounding=rounding,
                backend=step.backend,
            )
        _dither(wide, importance.noise_scale / SCALE_CELLS, step.steps)
        step.mechanism.weigh(step.memory, wide)
        step._replan()


def _dither(released: Sequence[torch.Tensor], cell: float, step: int) -> None:
    """Spread released values over their cells, by public draws that the step's number decides.

    Noise has a lattice: some values would be exactly 0, and scales that are made of them 0 or
    infinite, as those of continuous noise never are. Released values may be changed freely.
    """
    generator = np.random.default_rng(step)
    for values in released:
        places = np.asarray(cell * (generator.random(tuple(values.shape)) - 0.5))
        values += torch.from_numpy(places).to(values.device)


def check_same_event(before: Plan, after: Plan) -> None:
    """Check a plan that was made anew: its noise may change, but not its recorded event.

    Raises:
        PrivacyError: another event.
    """
    if (before.spec, before.unsampled) != (after.spec, after.unsampled):
        raise PrivacyError(
            "mechanism.plan",
            expected=f"the event {before.spec}, whatever was learnt",
            got=str(after.spec),
            remedy="Compute the event without the memory: certificates are a priori.",
        )
