"""Maps from a sum's taps to the coordinates that receive noise and back, within an update."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..base import validate as check
from ..base.errors import InvalidInput


@dataclass(frozen=True, kw_only=True, eq=False)
class PairMap:
    """The map of one parameter's release, which is the same for every channel pair.

        coordinates = signal taps        gradient = back (coordinates + noise)

    Attributes:
        signal: float64 ``[r, taps]`` on the CPU.
        back: float64 ``[taps, r]`` there.
    """

    signal: torch.Tensor
    back: torch.Tensor

    def __post_init__(self) -> None:
        kind: dict[str, Any] = {"dtypes": (torch.float64,), "device": torch.device("cpu")}
        check.tensor(shape=(None, None), contiguous=True, signal=self.signal, **kind)
        turned = self.signal.shape[::-1]
        check.tensor(shape=tuple(turned), contiguous=True, back=self.back, **kind)
        if not self.signal.numel():
            raise InvalidInput(
                "signal",
                expected="a coordinate and a tap at least",
                got=f"shape {list(self.signal.shape)}",
                remedy="Leave a parameter that is released as it is without a map.",
            )

    @property
    def rank(self) -> int:
        """Coordinates of a channel pair, r."""
        return len(self.signal)

    @property
    def taps(self) -> int:
        """Entries of the parameter that make a channel pair."""
        return len(self.back)

    def coordinates(self, size: int) -> int:
        """Return how many coordinates a parameter of ``size`` entries has."""
        return size // self.taps * self.rank


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
    if any(each is not None for each in maps.each) and not (noised and sums[0].is_floating_point()):
        raise InvalidInput(
            "maps",
            expected="float sums and noise",
            got=f"sums of {sums[0].dtype}" if noised else "no noise",
            remedy="Map other sums before the update.",
        )


__all__ = ["PairMap", "PairMaps", "check_maps", "sizes_noised"]
