"""Draws of one step that do not come from its own stream: prefetched, or read from a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..base import validate as check
from ..base.errors import InvalidInput
from ..base.laws import LAWS
from ..base.rng import Stream
from . import _cdt

_LAST = 2**62


@dataclass(frozen=True)
class Draws:
    """Prefetched draws of one step, which belong to that step alone.

    Attributes:
        first: position of the first of them.
        values: X at positions ``first, first + 1, ...``, int32.
        rounding: the 16 bits of each position's stochastic rounding as int16, for float sums.
    """

    first: int
    values: torch.Tensor
    rounding: torch.Tensor | None = None

    @property
    def in_memory(self) -> bool:
        """Whether ``values`` are the draws themselves, and not a table that they come from."""
        return type(self) is Draws

    def at(self, position: int, count: int) -> torch.Tensor:
        """Return X from ``position`` on, int32 ``[count]``."""
        return self.values[position - self.first :][:count]

    def bits_at(self, position: int, count: int) -> torch.Tensor:
        """Return the rounding bits from ``position`` on, int32 ``[count]``."""
        assert self.rounding is not None
        return self.rounding[position - self.first :][:count].to(torch.int32) & 0xFFFF


@dataclass(frozen=True)
class SampleReads(Draws):
    """Draws of one step that are read from a table of ready-made samples, round and round.

    X at position p is ``values[(cursor + p - first) mod len(values)] 2^shift``.

    Attributes:
        values: the table in reading order, int16 or int32.
        cursor: index of the sample at ``first``.
        shift: takes a sample to units of u.
    """

    cursor: int = 0
    shift: int = 0

    def at(self, position: int, count: int) -> torch.Tensor:
        """Return X from ``position`` on, int32 ``[count]``."""
        start = self.cursor + position - self.first
        at = torch.arange(start, start + count, device=self.values.device) % len(self.values)
        return self.values[at].to(torch.int32) << self.shift


@dataclass(frozen=True)
class CdtDraws(Draws):
    """Draws of one step that are looked up in a cumulative table by fresh words.

    Attributes:
        values: the table, ``_cdt.packed``, int32.
        stream: of the words, two for each position.
        distribution: the law that the table is of.
    """

    stream: Stream | None = None
    distribution: str = "gaussian"

    def at(self, position: int, count: int) -> torch.Tensor:
        """Return X from ``position`` on, int32 ``[count]``."""
        assert self.stream is not None
        return _cdt.draws(self.stream, self.values, self.distribution, position, count)


def check_draws(
    name: str, draws: object, first: int, end: int, device: torch.device, law: str | None = None
) -> None:
    """Check draws for the positions ``first .. end - 1``, on this device.

    Args:
        name: of the argument.
        draws: what was passed.
        first, end: the positions.
        device: where they are needed.
        law: what a cumulative table must be of; None takes any.

    Raises:
        InvalidInput: anything else.
    """
    if not isinstance(draws, Draws):
        raise InvalidInput(
            name,
            expected="an update.Draws",
            got=type(draws).__name__,
            remedy="Take draws from a noise source.",
        )
    kind: dict[str, Any] = {"device": device, "contiguous": True}
    dtypes = (torch.int16, torch.int32) if isinstance(draws, SampleReads) else (torch.int32,)
    check.tensor_at(f"{name}.values", draws.values, shape=(None,), dtypes=dtypes, **kind)
    check.integer(0, _LAST, **{f"{name}.first": draws.first})
    if isinstance(draws, SampleReads | CdtDraws):
        _check_table(name, draws, law)
        return
    if draws.rounding is not None:
        check.tensor_at(
            f"{name}.rounding",
            draws.rounding,
            shape=draws.values.shape,
            dtypes=(torch.int16,),
            **kind,
        )
    end_of_draws = draws.first + len(draws.values)
    if first < end and (first < draws.first or end > end_of_draws):
        raise InvalidInput(
            name,
            expected=f"draws at positions {first} to {end - 1}",
            got=f"{draws.first} to {end_of_draws - 1}",
            remedy="Make draws for every position of the step.",
        )


def _check_table(name: str, draws: SampleReads | CdtDraws, law: str | None) -> None:
    """Check what the table is read by; one that was taken back is empty."""
    size = len(draws.values)
    whole = size > 0
    if isinstance(draws, CdtDraws):
        whole = size > _cdt.GUIDE and (size - _cdt.GUIDE) % _cdt.WORDS_PER_BOUNDARY == 0
    if not whole:
        raise InvalidInput(
            f"{name}.values",
            expected="a table that is in use",
            got=f"{size} entries",
            remedy="Take the draws of each step from their source, and use them before done().",
        )
    if draws.rounding is not None:
        raise InvalidInput(
            f"{name}.rounding",
            expected="None: a table gives no rounding bits",
            got="a tensor",
            remedy="Leave it out; the rounding stream gives them.",
        )
    if isinstance(draws, SampleReads):
        check.integer(0, size - 1, **{f"{name}.cursor": draws.cursor})
        check.integer(0, 31, **{f"{name}.shift": draws.shift})
        return
    if not isinstance(draws.stream, Stream):
        raise InvalidInput(
            f"{name}.stream",
            expected="a dpkern.rng.Stream",
            got=type(draws.stream).__name__,
            remedy="Make one with Key.fresh().stream(Purpose.TABLES, step).",
        )
    check.choice(LAWS if law is None else (law,), **{f"{name}.distribution": draws.distribution})


__all__ = ["CdtDraws", "Draws", "SampleReads", "check_draws"]
