"""Check that a sample's output does not depend on the number of other samples.

Replacing samples keeps their number, and so cannot expose a module that reads the size of its
batch. So samples of the batch also run alone: each must come out as in the whole batch, up to the
rounding of kernels that are blocked by size. This is done for every size of batches that occurs:
then all sizes have the outputs of samples that are alone. At first, too, the module runs on four
samples of which two are NaN. Modules that draw random numbers run with constants in their place
(``steady_draws``), on the whole batch as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..base.errors import UnsupportedModule
from .own_rounding import MovedProducts
from .random_state import RandomState
from .replaced_rows import differing, fresh, mapped, taken_rows, tensors_of
from .steady_draws import SteadyDraws

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Tolerances relative to the largest output; 16-bit outputs have a tolerance of 0.1."""

_ROUNDING = 16
"""Tolerance relative to what rounding does to the outputs of the whole batch."""

_CHAOTIC = 0.03
"""Size of that, relative to the largest output, from which on nothing is told."""

_ALONE = 3
"""Number of samples that run alone where the first of them comes out otherwise. A rounded number
may have taken one of them across a step of the module, and hardly all."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class SizeCheck:
    """Passes of a module on some samples of a batch.

    Args:
        module: the module that errors name.
        call: runs it from the same state each time, and puts that state back.
        arguments: a batch, samples first.
        batch: number of samples.
        draws: the random state that ``call`` begins with.
        whole: the module's output on the batch.

    Attributes:
        told: whether the outputs could be compared.
    """

    module: nn.Module
    call: Callable[[Arguments], Any]
    arguments: Arguments
    batch: int
    draws: RandomState
    whole: Any
    told: bool = True

    def __post_init__(self) -> None:
        self._draws: AbstractContextManager[Any] = nullcontext()
        """The context of passes: constants in the place of random numbers, or none."""

    def error(self, *, full: bool) -> UnsupportedModule | None:
        """Return the error for outputs that depend on the number of samples; None if none do.

        Args:
            full: whether the module also runs beside samples that are not finite, and with both
                sets of constants in the place of random numbers. Otherwise one is chosen by size.
        """
        if self.batch < 2:
            return None
        self._draws = steady = SteadyDraws(high=not full and self.batch % 2 == 1)
        few, alone = self._few()
        drawn = steady.drawn
        if self.draws.elsewhere or steady.unknown or (not drawn and self.draws.changed()):
            self.told = False  # numbers that cannot be replaced
            return None
        if not drawn:
            self._draws = nullcontext()
            return self._compared(*((few, alone) if alone is not None else self._few()), full)
        found = self._with_constants(few, alone, full)
        if found is not None or not full:
            return found
        told, self._draws = self.told, SteadyDraws(high=True)
        found = self._with_constants(*self._few(), full)
        self.told = self.told or told
        return found

    def _with_constants(self, few: list[int], alone: Any, full: bool) -> UnsupportedModule | None:
        self.whole = self._without_graph()
        return self._compared(few, alone, full)

    def _few(self) -> tuple[list[int], Any]:
        """Return one sample and its output, or two: some modules run on several samples only."""
        alone = self._alone([0])
        if self.batch > 2 and not _pairs(self.whole, alone, self.batch, 1):
            return [0, 1], self._alone([0, 1])
        return [0], alone

    def _compared(self, few: list[int], alone: Any, full: bool) -> UnsupportedModule | None:
        self.told = bool(_pairs(self.whole, alone, self.batch, len(few)))
        differs = self.told and self._differs(few, alone) and self._others_differ(len(few))
        if differs and self._is_more_than_rounding(few, alone):
            return self._found("in a batch of another size", _NO_SIZES)
        return self._beside_nan() if full else None

    def _others_differ(self, count: int) -> bool:
        """Whether other samples come out otherwise, too."""
        starts = range(count, min(count * _ALONE, self.batch - count + 1), count)
        others = [[*range(start, start + count)] for start in starts]
        return all(self._differs(few, self._alone(few)) for few in others)

    def _is_more_than_rounding(self, few: Sequence[int], alone: Any) -> bool:
        moved = self._without_graph(MovedProducts())  # type: ignore[no-untyped-call]
        pairs = _pairs(self.whole, moved, self.batch, self.batch)
        noises = [_largest(a.double() - b.double()) for a, b in pairs]
        if any(noise > _CHAOTIC * _largest(a) for noise, (a, _) in zip(noises, pairs, strict=True)):
            self.told = False
            return False
        return self._differs(few, alone, noises=noises)

    def _beside_nan(self) -> UnsupportedModule | None:
        more = min(4, self.batch)
        rows = [*range(more)]
        few = taken_rows(self.arguments, self.batch, rows)
        broken = self._outputs(fresh(_without_numbers(few, more)))
        kept = rows[: more // 2]
        if broken is None:
            return None
        if _pairs(self.whole, broken, self.batch, more) and not self._differs(rows, broken, kept):
            return None
        large = self._alone(rows)
        if large is not None and differing(large, broken, more, kept):
            return self._found("beside samples that are not finite", _NO_NANS)
        return None

    def _alone(self, samples: Sequence[int]) -> Any:
        return self._outputs(fresh(taken_rows(self.arguments, self.batch, samples)))

    def _without_graph(self, beside: AbstractContextManager[Any] | None = None) -> Any:
        """Return the output on the whole batch; the graph of the user's own pass may be held."""
        with torch.no_grad():
            found = self._outputs(fresh(self.arguments), beside)
        return self._outputs(fresh(self.arguments), beside) if found is None else found

    def _outputs(
        self, arguments: Arguments, beside: AbstractContextManager[Any] | None = None
    ) -> Any:
        """Return the output of a pass; None if the module does not run on so few samples."""
        try:
            with self._draws, beside or nullcontext():
                return mapped(self.call(arguments), Tensor.detach)
        except Exception:  # noqa: BLE001 - the real pass has another size
            return None

    def _differs(
        self,
        samples: Sequence[int],
        few: Any,
        kept: Sequence[int] = (),
        *,
        noises: Sequence[float] = (),
    ) -> bool:
        """Whether the outputs of these samples are other ones than in the whole batch.

        Args:
            few: outputs of a pass on these samples alone.
            kept: those of them that are compared; none named: all.
            noises: what rounding does to each output.
        """
        pairs = _pairs(self.whole, few, self.batch, len(samples))
        places = [samples.index(sample) for sample in kept or samples]
        same = [samples[place] for place in places]
        each = noises or [0.0] * len(pairs)
        return any(
            not _agree(_rows_of(a, self.batch, same), _rows_of(b, len(samples), places), noise)
            for (a, b), noise in zip(pairs, each, strict=False)
        )

    def _found(self, where: str, remedy: str) -> UnsupportedModule:
        return UnsupportedModule(
            type(self.module).__name__,
            expected="outputs of one sample that depend on that sample alone",
            got=f"other outputs {where}",
            remedy=remedy,
        )


_NO_SIZES = "Do not scale by the number of samples in the forward pass."
_NO_NANS = "Treat each sample by itself; samples that are not finite are dropped by the clipping."


def first_rows(tree: Any, batch: int, count: int) -> Any:
    """Return the tree with the rows of the first ``count`` samples only."""

    def take(tensor: Tensor) -> Tensor:
        if not tensor.dim() or not tensor.shape[0] or tensor.shape[0] % batch:
            return tensor
        return tensor[: tensor.shape[0] // batch * count]

    return fresh(mapped(tree, take))  # a pass may write into its inputs


def _without_numbers(tree: Any, batch: int) -> Any:
    """Return the tree with NaN in the second half of every floating tensor's samples."""

    def change(tensor: Tensor) -> Tensor:
        if tensor.dim() and tensor.shape[0] % batch == 0 and tensor.is_floating_point():
            tensor = tensor.detach().clone().requires_grad_(tensor.requires_grad)
            tensor.data[tensor.shape[0] // 2 :] = float("nan")
        return tensor

    return mapped(tree, change)


def _pairs(whole: Any, few: Any, batch: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """Return the floating outputs of two passes that have rows of each sample.

    Args:
        whole, few: outputs on ``batch`` and on ``count`` samples.
    """
    one, two = ([*tensors_of(outputs)] for outputs in (whole, few))
    if len(one) != len(two):
        return []
    return [
        (a, b)
        for a, b in zip(one, two, strict=True)
        if a.is_floating_point()
        and a.dtype is b.dtype
        and a.layout is b.layout is torch.strided
        and not (a.is_nested or b.is_nested)
        and a.dim() == b.dim() > 0
        and a.shape[1:] == b.shape[1:]
        and a.numel() > 0
        and a.shape[0] % batch == 0
        and b.shape[0] == a.shape[0] // batch * count
    ]


def _rows_of(tensor: Tensor, batch: int, samples: Sequence[int]) -> Tensor:
    rows: Tensor = taken_rows(tensor, batch, samples)
    return rows


def _agree(one: Tensor, two: Tensor, noise: float) -> bool:
    tolerance = _TOLERANCE.get(one.dtype, 0.1)
    one, two = one.double(), two.double()
    finite = one.isfinite()
    if not torch.equal(finite, two.isfinite()):
        return False
    one, two = one[finite], two[finite]
    return _largest(one - two) <= max(tolerance * _largest(one), _ROUNDING * noise)


def _largest(tensor: Tensor) -> float:
    """Return the largest finite entry."""
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0
