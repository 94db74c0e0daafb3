"""Noise of many runs: the one release of every record, and draws for the steps, from any source.

Every run has a key of its own, and its noise is a function of key, step, user and feature: a run
is the same by itself and among a hundred others, and after it was interrupted.

Streams of a run's key: ``LAPLACE`` and ``ROUNDING`` at step 0 for the release of records, at step 1
for what happens at the visits; ``NOISE`` at step 0 for the environment in training, 1 in tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..base.laws import SCALE_CELLS, SCALE_UNITS, Distribution
from ..base.rng import Key, Purpose
from ..ops import noise
from ..ops._draws import Draws
from ..ops.coef import quadratic_position
from ..privacy.mechanisms.functional import Functional

RECORDS, VISITS = 0, 1
TRAINING, TEST = 0, 1

_AT_ONCE = 1 << 19
"""Draws in memory together, of all runs."""


class BlockSource(Protocol):
    """A noise source of one run's draws, such as those of ``dpkern.noise_tables``."""

    @property
    def warning(self) -> str:
        """The reason why nothing that it noises is private; empty if it is."""
        ...

    @property
    def variation(self) -> float:
        """Total variation distance of a coordinate from the certified law."""
        ...

    @property
    def settings(self) -> tuple[object, ...]:
        """The settings that decide the draws."""
        ...

    def bind_blocks(
        self, key: Key, *, law: str, stream: int, count: int, substream: int = 0
    ) -> None:
        """Make blocks of ``count`` draws that follow each other in one stream of this key."""
        ...

    def take(self, step: int) -> Draws:
        """Return block number ``step``, once."""
        ...

    def done(self) -> None:
        """Take the block back."""
        ...

    def close(self) -> None:
        """Yield nothing more."""
        ...


MakeSource = Callable[[], BlockSource]
"""Makes a source for each run."""


def record(
    mechanism: Functional,
    x: Tensor,
    key: Key,
    *,
    clip: bool = True,
    source: BlockSource | None = None,
) -> Tensor:
    """Return ``x + Lap(n / epsilon)`` of every record, clipped to [0, 1], as a new tensor.

    Features become integers from 0 to ``mechanism.record_reach(n)`` first, so that the certificate
    is about the released bits.

    Args:
        mechanism: gives epsilon.
        x: ``[..., n]``, entries in [0, 1].
        key: key of the run; it must not release other records.
        clip: post-processing; without it the values are unbiased.
        source: noise source that is new and gives the draws. None draws them from the key.
    """
    n = x.shape[-1]
    reach = mechanism.record_reach(n)
    units = SCALE_UNITS * mechanism.epsilon / n
    counts = (x.double() * units).round_().clamp_(0, reach).to(torch.int64).contiguous()
    given: dict[str, Any] = {"stream": key.stream(Purpose.LAPLACE, RECORDS)}
    if source is None:
        noise.add_noise(counts, distribution="laplace", **given)
    else:
        source.bind_blocks(key, law="laplace", stream=RECORDS, count=counts.numel())
        noise.add_noise(counts, distribution="laplace", draws=source.take(0), **given)
        source.done()
    cell = n / (mechanism.epsilon * SCALE_CELLS)
    released = (counts.double() * cell).to(x.dtype)
    return released.clamp_(0, 1) if clip else released


class _Ahead:
    """Draws of all runs' steps, several steps prefetched at once.

    One step has ``parts`` groups of ``width`` coordinates of every run.

    With ``sources``, one new source for each key, the draws are theirs; rounding bits that a source
    does not give come from the streams.
    """

    def __init__(
        self,
        keys: Sequence[Key],
        *,
        width: int,
        parts: int = 1,
        distribution: Distribution = "laplace",
        sources: Sequence[BlockSource] = (),
        at_once: int | None = None,
    ) -> None:
        self._width, self._parts, self.distribution = width, parts, distribution
        purpose = Purpose.LAPLACE if distribution == "laplace" else Purpose.NOISE
        self.streams = [key.stream(purpose, VISITS) for key in keys]
        self.roundings = [key.stream(Purpose.ROUNDING, VISITS) for key in keys]
        fitting = (at_once or _AT_ONCE) // max(1, len(keys) * width * parts)
        self._steps = max(1, min(1024, fitting))
        self._first, self._sources = -1, sources
        self._count = self._steps * parts * width
        for key, source in zip(keys, sources, strict=bool(sources)):
            source.bind_blocks(key, law=distribution, stream=VISITS, count=self._count)

    def _draw(self, run: int, values: Tensor, bits: Tensor) -> None:
        """Write a run's draws and rounding bits of the steps from ``_first`` on."""
        position = self._first * self._parts * self._width
        place: dict[str, Any] = {"position": position, "count": self._count}
        rounding = None
        if not self._sources:
            law = self.distribution
            noise.lattice_draws(self.streams[run], distribution=law, out=values, **place)
        else:
            draws = self._sources[run].take(position // self._count)
            noise.source_draws(draws, out=values, **place)
            rounding = draws.rounding
        if rounding is None:
            noise.rounding_bits(self.roundings[run], out=bits, **place)
        else:
            bits.copy_(rounding)
        if self._sources:
            self._sources[run].done()


class PrefetchedDraws(_Ahead):
    """Draws of one step after the other, for all runs together.

    Group p of all runs begins at ``quadratic_position`` behind group p - 1, as the fused kernels of
    ``coef`` read it.
    """

    def __init__(self, keys: Sequence[Key], *, width: int, parts: int = 1, **given: Any) -> None:
        super().__init__(keys, width=width, parts=parts, **given)
        runs = len(keys)
        self._starts = [quadratic_position(0, runs * width) * part for part in range(parts)]
        size = self._starts[-1] + runs * width
        # What stands between two groups is never read.
        self._values = torch.empty(self._steps, size, dtype=torch.int32)
        self._bits = torch.empty(self._steps, size, dtype=torch.int16)

    def take(self, step: int) -> Draws:
        """Return the draws of this step, at positions from 0 on."""
        first = step // self._steps * self._steps
        if first != self._first:
            self._first = first
            self._make()
        row = step - first
        return Draws(0, self._values[row], self._bits[row])

    def _make(self) -> None:
        made = [torch.empty(self._count, dtype=t.dtype) for t in (self._values, self._bits)]
        shape = (self._steps, self._parts, self._width)
        for run in range(len(self.streams)):
            self._draw(run, *made)
            for part, place in enumerate(self._starts):
                here = slice(place + run * self._width, place + (run + 1) * self._width)
                for all_runs, one in zip((self._values, self._bits), made, strict=True):
                    all_runs[:, here] = one.view(shape)[:, part]


class StepDraws(_Ahead):
    """Draws of several steps for each run by itself, as ``coef.descend`` reads them."""

    def __init__(self, keys: Sequence[Key], *, users: int, n: int, **given: Any) -> None:
        super().__init__(keys, width=users * n, parts=2, at_once=4 * _AT_ONCE, **given)
        shape = (len(keys), self._steps, 2, users, n)
        self._values = torch.empty(shape, dtype=torch.int32)
        self._bits = torch.empty(shape, dtype=torch.int16)

    def room(self, step: int) -> int:
        """Return how many steps from this one on can be taken together."""
        return self._steps - step % self._steps

    def take(self, step: int, count: int, stopped: Tensor) -> tuple[Tensor, Tensor]:
        """Return draws and rounding bits of ``count`` steps, ``[R, count, 2, m, n]``.

        Those of runs that are ``stopped`` may hold anything.
        """
        first = step // self._steps * self._steps
        if first != self._first:
            self._first = first
            for run in _zeros(stopped):
                self._draw(run, self._values[run].view(-1), self._bits[run].view(-1))
        here = slice(step - first, step - first + count)
        return self._values[:, here].contiguous(), self._bits[:, here].contiguous()


def _zeros(marks: Tensor) -> list[int]:
    return [place for place, mark in enumerate(marks.tolist()) if not mark]


class Environment:
    """Environmental noise N(0, sigma^2) at the encoder's input, which certifies nothing."""

    def __init__(self, keys: Sequence[Key], sigma: float, *, width: int, use: int = TRAINING):
        self._streams = [key.stream(Purpose.NOISE, use, stream=1) for key in keys]
        self._cell, self._width = sigma / SCALE_CELLS, width
        self._steps = max(1, min(1024, _AT_ONCE // max(1, len(keys) * width)))
        self._first, self._made = -1, torch.empty(0)

    def room(self, step: int) -> int:
        """Return how many steps from this one on can be taken together."""
        return self._steps - step % self._steps

    def take(self, step: int, count: int = 1) -> Tensor:
        """Return the noise of ``count`` steps, float32 ``[count, R, width]``."""
        first = step // self._steps * self._steps
        if first != self._first:
            self._made, self._first = self.block(first, self._steps), first
        return self._made[step - first : step - first + count]

    def block(self, first: int, steps: int) -> Tensor:
        """Return the noise of several steps, float32 ``[steps, R, width]``."""
        made = torch.empty(steps, len(self._streams), self._width)
        for run, stream in enumerate(self._streams):
            counts = torch.zeros(steps, self._width, dtype=torch.int32)
            noise.add_noise(counts, stream=stream, position=first * self._width)
            made[:, run] = counts.float() * self._cell
        return made
