"""Maps from a sum's taps to the coordinates that receive noise and back, within an update.

Integer sums, whose released bits are certified, are clipped as coordinates: they are led back only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ..base import validate as check
from ..base.errors import InvalidInput

MOST_COORDINATES = 512
"""Coordinates of a channel pair that kernels of devices take: they lie in two noise tiles."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PairMap:
    """The map of one parameter's release, which is the same for every channel pair.

        coordinates = signal taps        gradient = back (coordinates + noise)

    Attributes:
        signal: float64 ``[r, taps]`` on the CPU. None means that the sum holds coordinates already,
            ``[..., r]``.
        back: float64 ``[taps, r]`` there.
    """

    signal: torch.Tensor | None = None
    back: torch.Tensor

    def __post_init__(self) -> None:
        kind: dict[str, Any] = {"dtypes": (torch.float64,), "device": torch.device("cpu")}
        shape: tuple[int | None, ...] = (None, None)
        if self.signal is not None:
            check.tensor(shape=shape, contiguous=True, signal=self.signal, **kind)
            shape = tuple(self.signal.shape[::-1])
        check.tensor(shape=shape, contiguous=True, back=self.back, **kind)
        if not self.back.numel():
            raise InvalidInput(
                "back",
                expected="a coordinate and a tap at least",
                got=f"shape {list(self.back.shape)}",
                remedy="Leave a parameter that is released as it is without a map.",
            )

    @property
    def rank(self) -> int:
        """Coordinates of a channel pair, r."""
        return int(self.back.shape[1])

    @property
    def taps(self) -> int:
        """Entries of the parameter that make a channel pair."""
        return len(self.back)

    def coordinates(self, size: int) -> int:
        """Return how many coordinates a parameter of ``size`` entries has."""
        return size // self.taps * self.rank

    @cached_property
    def only_back(self) -> PairMap:
        """The map of a sum that holds coordinates already."""
        return self if self.signal is None else PairMap(back=self.back)

    def on(self, device: torch.device) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Return both matrices on a device, transposed: neighbours read neighbouring numbers."""
        if device not in self._held:
            made = [None if m is None else m.T.contiguous() for m in (self.signal, self.back)]
            signal, back = (None if m is None else m.to(device) for m in made)
            assert back is not None
            self._held[device] = signal, back
        return self._held[device]

    @cached_property
    def _held(self) -> dict[torch.device, tuple[torch.Tensor | None, torch.Tensor]]:
        return {}


@dataclass(frozen=True, eq=False)
class PairMaps:
    """The maps of an update's parameters.

    Attributes:
        each: one for each parameter; None leaves its sum as it is.
    """

    each: tuple[PairMap | None, ...] = ()

    def part(self, indices: Iterable[int]) -> PairMaps:
        """Return the maps of these parameters."""
        return PairMaps(tuple(self.each[i] for i in indices))

    @cached_property
    def only_back(self) -> PairMaps:
        """The maps of sums that hold coordinates already."""
        return PairMaps(tuple(None if each is None else each.only_back for each in self.each))


def shape_of_sum(param: torch.Tensor, total: torch.Tensor, each: PairMap | None) -> tuple[int, ...]:
    """Return the shape that a parameter's sum must have: its own, or one of its coordinates."""
    if each is None or each.signal is not None:
        return param.shape
    pairs = param.numel() // each.taps
    fits = total.dim() > 0 and total.shape[-1] == each.rank
    if fits and total.numel() == pairs * each.rank:
        return total.shape
    return pairs, each.rank


def sizes_noised(params: Sequence[torch.Tensor], maps: PairMaps | None) -> list[int]:
    """Return how many coordinates of each parameter receive noise."""
    if maps is None:
        return [param.numel() for param in params]
    return [
        param.numel() if each is None else each.coordinates(param.numel())
        for param, each in zip(params, maps.each, strict=True)
    ]


def check_maps(
    maps: PairMaps, params: Sequence[torch.Tensor], sums: Sequence[torch.Tensor], *, noised: bool
) -> None:
    """Check the maps of an update.

    Raises:
        InvalidInput: other objects, sizes that do not fit, or sums that cannot be mapped.
    """
    if not isinstance(maps, PairMaps):
        raise InvalidInput(
            "maps",
            expected="an update.PairMaps, or None",
            got=type(maps).__name__,
            remedy="Make one with update.PairMaps((update.PairMap(signal=..., back=...), None)).",
        )
    check.one_each("maps", maps.each, len(params))
    for i, (each, param) in enumerate(zip(maps.each, params, strict=True)):
        if each is None:
            continue
        if param.numel() % each.taps:
            raise InvalidInput(
                f"maps[{i}]",
                expected=f"taps that divide a parameter of {param.numel()} entries",
                got=each.taps,
                remedy="Pass matrices for the taps of one channel pair.",
            )
    used = [each for each in maps.each if each is not None]
    if used and not noised:
        raise InvalidInput(
            "maps",
            expected="noise",
            got="no noise",
            remedy="Map sums without noise before the update.",
        )
    if not sums[0].is_floating_point() and any(each.signal is not None for each in used):
        raise InvalidInput(
            "maps",
            expected="integer sums of coordinates, whose maps have signal=None",
            got=f"a signal for sums of {sums[0].dtype}",
            remedy="Clip the coordinates in integers and pass PairMap(back=...).",
        )


__all__ = ["MOST_COORDINATES", "PairMap", "PairMaps", "check_maps", "shape_of_sum", "sizes_noised"]
