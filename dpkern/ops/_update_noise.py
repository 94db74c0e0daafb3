"""The noise of one update, drawn from streams or prefetched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from ..base import validate as check
from ..base.errors import InvalidInput, PrivacyError
from ..base.laws import LAWS
from ..base.place import check_recording
from ..base.rng import Stream
from . import _lattice, _step_counter
from ._draws import Draws, check_draws
from ._pair_map import PairMaps, sizes_noised
from ._rules import Powers, Rule
from ._scale import check_scale
from .noise import INTEGERS, check_rounding


@dataclass(frozen=True, kw_only=True)
class UpdateNoise:
    """The noise of one step.

    Attributes:
        distribution: ``gaussian`` or ``laplace``.
        scales: certified standard deviation (or Laplace scale) of each tensor's sum.
        stream: keystream of the noise, this step's own.
        positions: where each tensor starts in the stream; ranges must not overlap.
        rounding: keystream of the stochastic rounding, for float sums.
        draws: prefetched output of the streams at these positions, or a table to read them from.
            None draws inside the call.
        step_counter: the step count in device memory (``update.step_counter``): it joins ``n1`` of
            both streams, which are then those of step 0, and takes the place of the rule's count
            and learning rate. Where it says that no update is due, the call does nothing.
    """

    distribution: str
    scales: tuple[float, ...]
    stream: Stream
    positions: tuple[int, ...]
    rounding: Stream | None = None
    draws: Draws | None = None
    step_counter: torch.Tensor | None = None

    def draw(self, i: int, count: int) -> torch.Tensor:
        """Return X of tensor i, int32 ``[count]``."""
        if self.draws is None:
            return _lattice.draws(self.stream, self.distribution, self.positions[i], count)
        return self.draws.at(self.positions[i], count)

    def rounding_bits(self, i: int, count: int) -> torch.Tensor:
        """Return the 16 rounding bits of tensor i, int32 ``[count]``."""
        if self.draws is None or self.draws.rounding is None:
            assert self.rounding is not None
            return _lattice.rounding_bits(self.rounding, self.positions[i], count)
        return self.draws.bits_at(self.positions[i], count)


def at_step_counter(
    noise: UpdateNoise | None, rule: Rule, steps: int
) -> tuple[UpdateNoise | None, Rule, int, Powers] | None:
    """Return the noise of the update at hand, its rule, its number t and its powers.

    The device step counter overrides t and learning rate where there is one; None if it says that
    no update is due.

    Args:
        noise: as given to ``update.step``.
        rule: the rule.
        steps: updates that the rule's state knows of.
    """
    if noise is None or noise.step_counter is None:
        return noise, rule, steps + 1, rule.powers(steps + 1)
    counted = _step_counter.read(noise.step_counter)
    if not counted.is_due:
        return None
    steps = counted.steps
    stream = replace(noise.stream, n1=noise.stream.n1 + steps)
    rounding = noise.rounding
    if rounding is not None:
        rounding = replace(rounding, n1=rounding.n1 + steps)
    drawn = replace(noise, stream=stream, rounding=rounding, step_counter=None)
    return drawn, replace(rule, lr=counted.lr), steps + 1, counted.powers


def check_noise(
    noise: UpdateNoise,
    params: Sequence[torch.Tensor],
    sums: Sequence[torch.Tensor],
    maps: PairMaps | None = None,
) -> None:
    """Check noise for these parameters, on the coordinates that ``maps`` lead to.

    Raises:
        InvalidInput: anything else.
        PrivacyError: words that would be used twice.
    """
    if not isinstance(noise, UpdateNoise):
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
    for name, numbers in (("noise.scales", noise.scales), ("noise.positions", noise.positions)):
        check.one_each(name, numbers, len(params))
    for scale in noise.scales:
        check_scale("noise.scales", scale)
    for position in noise.positions:
        if type(position) is not int or not 0 <= position <= 2**62:
            check.integer(0, 2**62, **{"noise.positions": position})
    taken = sorted(
        (first, first + size)
        for first, size in zip(noise.positions, sizes_noised(params, maps), strict=True)
    )
    if any(end > following for (_, end), (following, _) in pairwise(taken)):
        raise PrivacyError(
            "noise.positions",
            expected="ranges that do not overlap",
            got=noise.positions,
            remedy="Start each tensor after the end of the one before: no word may be used twice.",
        )
    floats = sums[0].dtype not in INTEGERS
    made = noise.draws is not None and noise.draws.rounding is not None
    if floats and not made:
        check_rounding("noise.rounding", noise.rounding, noise.stream, noise.draws)
    device = params[0].device
    if noise.step_counter is not None:
        _step_counter.check_step_counter("noise.step_counter", noise.step_counter, device)
    if noise.draws is not None:
        _check_draws(noise, noise.draws, taken, device)
    check_recording(device, step_counter=noise.step_counter)


def _check_draws(
    noise: UpdateNoise, draws: Draws, taken: Sequence[tuple[int, int]], device: torch.device
) -> None:
    if noise.step_counter is not None:
        raise InvalidInput(
            "noise",
            expected="prefetched draws, or a step counter",
            got="both",
            remedy="Pass noise without a step_counter: draws belong to one step.",
        )
    needed = [(first, end) for first, end in taken if end > first]
    first, end = (needed[0][0], needed[-1][1]) if needed else (draws.first, draws.first)
    check_draws("noise.draws", draws, first, end, device, noise.distribution)


__all__ = ["Draws", "UpdateNoise", "at_step_counter", "check_noise"]
