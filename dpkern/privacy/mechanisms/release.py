"""Release coordinates: where a block's noise is isotropic, and the fixed maps there and back.

A block's clipped sum is mapped linearly to coordinates ``y``, the noise is added to *those*, and a
map leads back:

    y = forward(sum)          noisy = y + sd z          gradient = to_gradient(noisy)

``to_gradient`` is post-processing, so a certificate speaks of ``y`` alone: of the norm that one
sample can have there, which is at most ``Block.sensitivity_factor`` times its clip norm. A block
without a release is the identity, and stays inside the fused update.

Maps hold float64 constants; they are compared by value.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from ...base.errors import InvalidInput
from ...base.phase import BACK, NOISE, phase
from ...base.validate import choice
from ...ops.update import PairMap
from .site import Site
from .work import OpAccount

Matrix = NDArray[np.float64]
AddNoise = Callable[[torch.Tensor], torch.Tensor]
"""Adds the block's noise to a contiguous float tensor of ``ReleaseMap.shape``, in place."""

NORMS = ("release", "gradient", "spectrum", "kept")
"""The norms that a clipping bound can be on. ``release``: the release coordinates themselves.
``gradient``: the parameter's gradient (centred, if there is a centre). ``spectrum``: the whole
spectrum of the layer's correlation, lags outside the kernel included. ``kept``: the part of that
spectrum that a mask keeps."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ReleaseMap(ABC):
    """A block's map to release coordinates and back.

    Attributes:
        norm: what the block's clip bound speaks of, one of ``NORMS``.
    """

    norm: str = "release"

    gain: ClassVar[float] = 1.0
    """Factor on norm and signal; some releases have a field of that name."""

    label: ClassVar[str] = "map"
    """Word for this map in reports."""

    @property
    def is_identity(self) -> bool:
        """Whether both maps are the identity, so that the sum is noised as it is."""
        return False

    @property
    def pair_map(self) -> PairMap | None:
        """Both maps as matrices for every channel pair, for noise inside the update; else None."""
        return None

    @property
    def needs_operands(self) -> bool:
        """Whether norm or signal need the layer's input and output gradient.

        A gradient alone is then not enough: the sum comes from the engine, which clips by ``norm``
        and sums what ``forward`` takes, or the samples come as release coordinates.
        """
        return False

    @property
    def covers_all_directions(self) -> bool:
        """Whether every released direction carries noise."""
        return True

    @property
    def centre(self) -> torch.Tensor | None:
        """The centre, subtracted from every sample's gradient before its norm is taken."""
        return None

    @property
    def restore(self) -> bool:
        """Whether the centre is added to the released mean again."""
        return False

    @abstractmethod
    def shape(self, parameter: tuple[int, ...]) -> tuple[int, ...]:
        """Return the coordinates that are noised, for a parameter of this shape."""

    @abstractmethod
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map ``[..., *parameter] -> [..., *release]``, float64, linear (no centre)."""

    @abstractmethod
    def to_gradient(self, noisy: torch.Tensor) -> torch.Tensor:
        """Map ``[*release] -> [*parameter]``, float64, linear."""

    def signal_shape(self, parameter: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of what ``forward`` returns for one gradient."""
        return self.shape(parameter)

    def noised(self, signal: torch.Tensor, add_noise: AddNoise) -> torch.Tensor:
        """Add noise to what ``forward`` returned, and map it back: float64 ``[*parameter]``."""
        return self.to_gradient(add_noise(signal))

    def entry_scales(self, parameter: tuple[int, ...]) -> torch.Tensor | None:
        """Return each entry's noise scale in units of the block's, float64 ``[*parameter]``.

        None means that noise does not stand on every entry by itself.
        """
        del parameter
        return None

    def count_forward(
        self, work: OpAccount, parameter: tuple[int, ...], rows: int, dtype: torch.dtype
    ) -> None:
        """Count ``forward`` of so many gradients or sums, and their dtype restored.

        The base books the two changes of format.
        """
        taken, given = math.prod(parameter), math.prod(self.signal_shape(parameter))
        work.converted("formats", rows * taken, dtype, torch.float64)
        work.converted("formats", rows * given, torch.float64, dtype)

    def count_back(self, work: OpAccount, parameter: tuple[int, ...], dtype: torch.dtype) -> None:
        """Count ``to_gradient`` of noisy coordinates of this dtype.

        Raises:
            InvalidInput: a map that does not say.
        """
        del work, parameter, dtype
        raise InvalidInput(
            "release",
            expected="one whose maps have a closed form",
            got=type(self).__name__,
            remedy="Define its count_forward and count_back, or use cost.counting.count.",
        )

    def count_noised(self, work: OpAccount, parameter: tuple[int, ...], dtype: torch.dtype) -> None:
        """Count what ``noised`` takes besides the noise itself."""
        self.count_back(work.under(BACK), parameter, dtype)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        names = [field.name for field in fields(self)]
        return all(_same(getattr(self, name), getattr(other, name)) for name in names)

    def __hash__(self) -> int:
        return hash((type(self), self.norm))


@dataclass(frozen=True, kw_only=True, eq=False)
class DiagonalMap(ReleaseMap):
    """The coordinates ``(g - centre) / scale``, one for one.

    Attributes:
        scale: positive, of the parameter's shape. None scales nothing.
        centre: of the parameter's shape. None stands for zero.
        restore: add the centre to the released mean again (AdaClip does, error feedback does not).
        norm: ``release`` clips the scaled coordinates, ``gradient`` the centred gradient.
    """

    label: ClassVar[str] = "diagonal"

    scale: torch.Tensor | None = None
    centre: torch.Tensor | None = None
    restore: bool = False

    def __post_init__(self) -> None:
        choice(("release", "gradient"), norm=self.norm)

    @property
    def is_identity(self) -> bool:
        return self.scale is None and self.centre is None

    def shape(self, parameter: tuple[int, ...]) -> tuple[int, ...]:
        return parameter

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.double() if self.scale is None else rows.double() / _on(self.scale, rows)

    def to_gradient(self, noisy: torch.Tensor) -> torch.Tensor:
        return noisy.double() if self.scale is None else noisy.double() * _on(self.scale, noisy)

    def entry_scales(self, parameter: tuple[int, ...]) -> torch.Tensor | None:
        ones = torch.ones(parameter, dtype=torch.float64)
        return ones if self.scale is None else self.scale * ones

    def count_forward(
        self, work: OpAccount, parameter: tuple[int, ...], rows: int, dtype: torch.dtype
    ) -> None:
        super().count_forward(work, parameter, rows, dtype)
        n = math.prod(parameter)
        if self.scale is not None:
            work.each("scales", rows * n, DIV=1, extra=n if rows else 0)

    def count_back(self, work: OpAccount, parameter: tuple[int, ...], dtype: torch.dtype) -> None:
        n = math.prod(parameter)
        work.converted("scales", n, dtype, torch.float64)
        if self.scale is not None:
            work.each("scales", n, reads=2, MUL=1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Taps(ReleaseMap):
    """The base of a spectral layer's releases; the taps of a channel pair are mapped alike.

    Attributes:
        site: the layer's geometry; the engine refuses a use of another one.
        size: transform size that ``spectrum`` and ``kept`` norms refer to. None is ``band``'s.
        band: what the engine filters the correlation with before the kernel's lags are cut out,
            compared by configuration. None does not filter.
        gain: factor on norm and signal (1, or a printed scaling).
    """

    site: Site
    size: tuple[int, ...] | None = None
    band: Hashable | None = None
    gain: float = 1.0  # type: ignore[misc]

    def __post_init__(self) -> None:
        choice(NORMS, norm=self.norm)
        if self.site.kind == "other":
            raise InvalidInput(
                "site",
                expected="a convolution or a circulant layer",
                got=self.site.kind,
                remedy="Release other parameters as they are.",
            )

    @property
    def needs_operands(self) -> bool:
        return self.norm in ("spectrum", "kept") or self.band is not None

    @property
    def signal(self) -> Matrix | None:
        """Map of a channel pair's taps to released coordinates. None is the identity."""
        return None

    def count_forward(
        self, work: OpAccount, parameter: tuple[int, ...], rows: int, dtype: torch.dtype
    ) -> None:
        super().count_forward(work, parameter, rows, dtype)
        n = rows * math.prod(parameter)
        if self.signal is None:
            work.each("gain", n, MUL=1)
            return
        taps, rank = self.site.taps, len(self.signal)
        work.multiplied("matrix", n // taps, taps, rank)
        work.each("gain and constants", taps * rank)  # copied from the mechanism's own
        work.each("gain and constants", n // taps * rank, MUL=1)

    def _taps(self, rows: torch.Tensor) -> torch.Tensor:
        """Reshape ``[..., *lead, *kernel] -> [..., *lead, taps]``, float64."""
        return rows.double().flatten(rows.dim() - self.site.axes)

    def _lead(self, parameter: tuple[int, ...]) -> tuple[int, ...]:
        return parameter[: len(parameter) - self.site.axes]


@dataclass(frozen=True, kw_only=True, eq=False)
class WhitenedCrop(Taps):
    """The map ``y = gain signal F`` per channel pair, and ``post y`` back, ``F`` the taps of a sum.

    ``F`` is the gradient at the kernel's lags, of the correlation filtered by ``band`` if there is
    one. With ``post`` of ``signal`` the identity the two only change the basis.

    Attributes:
        signal: float64 ``[r, taps]``. None means the identity.
        post: float64 ``[taps, r]``. None means the identity.
    """

    label: ClassVar[str] = "crop"

    signal: Matrix | None = None
    post: Matrix | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        taps = self.site.taps
        rank = taps if self.signal is None else len(self.signal)
        for name, given, wanted in (
            ("signal", self.signal, (rank, taps)),
            ("post", self.post, (taps, rank)),
        ):
            if given is not None and given.shape != wanted:
                raise InvalidInput(
                    name,
                    expected=f"a matrix {list(wanted)}",
                    got=f"one of {list(given.shape)}",
                    remedy="Pass signal [r, taps] and post [taps, r], with the layer's taps.",
                )

        if self.signal is not None and self.post is None:
            raise InvalidInput(
                "post",
                expected="the way back from a signal",
                got=None,
                remedy="Give signal and post together; post alone maps noisy gradients.",
            )

    @property
    def rank(self) -> int:
        """Coordinates of a channel pair, r."""
        return self.site.taps if self.signal is None else len(self.signal)

    @property
    def is_identity(self) -> bool:
        return self.signal is None and self.post is None and self.gain == 1

    @property
    def pair_map(self) -> PairMap | None:
        return self._pair_map

    @cached_property
    def _pair_map(self) -> PairMap | None:
        if self.signal is None or self.post is None or not self.rank:
            return None
        # By numpy: a constant of the plan is no work of the step that first needs it.
        signal, back = (np.array(m, order="C") for m in (self.signal * self.gain, self.post))
        return PairMap(signal=torch.from_numpy(signal), back=torch.from_numpy(back))

    def shape(self, parameter: tuple[int, ...]) -> tuple[int, ...]:
        return parameter if self.signal is None else (*self._lead(parameter), self.rank)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.signal is None:
            return rows.double() * self.gain
        return self._taps(rows) @ _on(self.signal, rows).T * self.gain

    def to_gradient(self, noisy: torch.Tensor) -> torch.Tensor:
        if self.post is None:
            return noisy.to(torch.float64, copy=True)
        lead = noisy.shape[:-1] if self.signal is not None else self._lead(tuple(noisy.shape))
        flat = noisy.double().reshape(*lead, self.rank)
        return (flat @ _on(self.post, noisy).T).reshape(*lead, *self.site.kernel)

    def count_back(self, work: OpAccount, parameter: tuple[int, ...], dtype: torch.dtype) -> None:
        noisy, taps = math.prod(self.shape(parameter)), self.site.taps
        work.converted("formats", noisy, dtype, torch.float64)
        if self.post is None:
            if dtype is torch.float64:
                work.each("copy", math.prod(parameter))
            return
        work.each("constants", self.rank * taps)
        work.multiplied("matrix", noisy // self.rank, self.rank, taps)


@dataclass(frozen=True, kw_only=True, eq=False)
class PartialNoiseMap(Taps):
    """The map ``gain F + noise z`` per channel pair, where some direction of ``F`` gets no noise.

    Nothing is protected; the law of the output is still the printed one.

    Attributes:
        noise: float64 ``[taps, m]``, the noise's map; ``z`` has m coordinates of the block's sd.
    """

    label: ClassVar[str] = "open"

    noise: Matrix

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise.ndim != 2 or len(self.noise) != self.site.taps:
            raise InvalidInput(
                "noise",
                expected=f"a matrix [{self.site.taps}, m]",
                got=f"one of {list(self.noise.shape)}",
                remedy="Pass a matrix from m noise coordinates to the taps of a channel pair.",
            )

    @property
    def covers_all_directions(self) -> bool:
        return False

    def shape(self, parameter: tuple[int, ...]) -> tuple[int, ...]:
        return (*self._lead(parameter), self.noise.shape[1])

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the signal itself, in the parameter's shape: the noise is added elsewhere."""
        return rows.double() * self.gain

    def to_gradient(self, noisy: torch.Tensor) -> torch.Tensor:
        """Return the noise's coordinates in the parameter's shape."""
        spread = noisy.double() @ _on(self.noise, noisy).T
        return spread.reshape(*noisy.shape[:-1], *self.site.kernel)

    def signal_shape(self, parameter: tuple[int, ...]) -> tuple[int, ...]:
        return parameter

    def noised(self, signal: torch.Tensor, add_noise: AddNoise) -> torch.Tensor:
        with phase(NOISE):
            zeros = signal.new_zeros(self.shape(tuple(signal.shape)), dtype=torch.float64)
            noisy = add_noise(zeros)
        spread = self.to_gradient(noisy)
        with phase(NOISE):
            return signal.double() + spread

    def count_back(self, work: OpAccount, parameter: tuple[int, ...], dtype: torch.dtype) -> None:
        del dtype  # noise is drawn in float64
        columns, taps = self.noise.shape[1], self.site.taps
        work.each("constants", columns * taps)
        work.multiplied("matrix", math.prod(parameter) // taps, columns, taps)

    def count_noised(self, work: OpAccount, parameter: tuple[int, ...], dtype: torch.dtype) -> None:
        n, beside = math.prod(parameter), work.under(NOISE)
        beside.filled("beside the signal", math.prod(self.shape(parameter)))
        beside.converted("beside the signal", n, dtype, torch.float64)
        beside.each("beside the signal", n, reads=2, ADD=1)
        super().count_noised(work, parameter, dtype)


def _on(constant: Matrix | torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a constant in float64 where the other tensor is."""
    if isinstance(constant, np.ndarray):
        constant = torch.tensor(constant)  # a copy: constants may be read-only
    return constant.to(dtype=torch.float64, device=like.device)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and bool(torch.equal(one, other))
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return bool(np.array_equal(one, other))
    return type(one) is type(other) and bool(one == other)


__all__ = [
    "NORMS",
    "AddNoise",
    "DiagonalMap",
    "Matrix",
    "PartialNoiseMap",
    "ReleaseMap",
    "Taps",
    "WhitenedCrop",
]
