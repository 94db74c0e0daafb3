"""The geometry of a parameter's one use, which a mechanism needs besides its shape.

Everything here is public: it follows from the model and the shape of one example, never from data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ...base.errors import InvalidInput
from ...base.validate import choice, integer

KINDS = ("conv", "circulant", "other")


@dataclass(frozen=True, kw_only=True)
class Site:
    """A trainable parameter as ``dpkern.survey`` saw it.

    Attributes:
        kind: ``conv`` (kernel of one convolution, of a transposed one too), ``circulant`` (blocks
            of a block-circulant layer) or ``other`` (dense, bias, norm, embedding, anything used
            twice or inside an expression).
        shape: the parameter's shape: ``[O, C/groups, *kernel]`` of a convolution, ``[p, q, d]`` of
            a circulant layer.
        input: spatial sizes of the layer's input without padding; ``(T,)`` positions of a
            circulant layer. A transposed convolution is the convolution from its output to its
            input, with the same kernel gradient: this is its output, or where that is longer by a
            stride or more what its input reads of it, with its zeros.
        output: spatial sizes of its output; ``(T,)`` of a circulant layer.
        stride, padding, dilation: one entry per spatial axis; convolutions only.
        groups: of the convolution.

    Raises:
        InvalidInput: an unknown kind, or sizes that do not belong together.
    """

    kind: str
    shape: tuple[int, ...]
    input: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1

    def __post_init__(self) -> None:
        choice(KINDS, **{"site.kind": self.kind})
        for name in ("shape", "input", "output", "stride", "padding", "dilation"):
            given: Any = getattr(self, name)
            if not isinstance(given, (tuple, list)):
                raise _bad(name, "a tuple of ints", given)
            least = 1 if name in ("stride", "dilation") else 0
            sizes = tuple(integer(minimum=least, **{f"site.{name}": n}) for n in given)
            object.__setattr__(self, name, sizes)
        integer(minimum=1, **{"site.groups": self.groups})
        if self.kind == "conv":
            self._check_conv()
        if self.kind == "circulant" and len(self.shape) != 3:
            raise _bad("shape", "[p, q, d] of a block-circulant layer", self.shape)

    def _check_conv(self) -> None:
        axes = len(self.shape) - 2
        if axes not in (1, 2, 3):
            raise _bad("shape", "[O, C/groups, *kernel] with one to three kernel axes", self.shape)
        for name in ("input", "output", "stride", "padding", "dilation"):
            if len(getattr(self, name)) != axes:
                raise _bad(name, f"{axes} sizes, one per spatial axis", getattr(self, name))
        if any(least > padded for least, padded in zip(self.least, self.padded, strict=True)):
            raise _bad("output", f"sizes that an input of {self.padded} can give", self.output)

    @property
    def axes(self) -> int:
        """Number of last dimensions of the parameter that are taps; 0 for ``other``."""
        return {"conv": len(self.shape) - 2, "circulant": 1, "other": 0}[self.kind]

    @property
    def kernel(self) -> tuple[int, ...]:
        """The taps' dimensions: the kernel of a convolution, ``(d,)`` of a circulant layer."""
        return self.shape[len(self.shape) - self.axes :]

    @property
    def taps(self) -> int:
        """Numbers that one pair of channels (or blocks) has."""
        return math.prod(self.kernel)

    @property
    def pairs(self) -> int:
        """Pairs of channels (or blocks)."""
        return math.prod(self.shape[: len(self.shape) - self.axes])

    @property
    def block(self) -> int:
        """Size d of a circulant layer's blocks."""
        return self.shape[-1]

    @property
    def padded(self) -> tuple[int, ...]:
        """Spatial sizes of the input with its padding, H'."""
        return tuple(n + 2 * p for n, p in zip(self.input, self.padding, strict=True))

    @property
    def least(self) -> tuple[int, ...]:
        """Smallest transform that keeps every tap apart: ``s(Ho-1) + t(d-1) + 1``."""
        each = zip(self.stride, self.output, self.dilation, self.kernel, strict=True)
        return tuple(s * (n - 1) + t * (d - 1) + 1 for s, n, t, d in each)

    @property
    def linear(self) -> tuple[int, ...]:
        """Transform size from which no lag wraps around: ``H' + s(Ho-1)``."""
        each = zip(self.padded, self.stride, self.output, strict=True)
        return tuple(n + s * (o - 1) for n, s, o in each)


def _bad(name: str, expected: str, got: object) -> InvalidInput:
    return InvalidInput(
        f"site.{name}",
        expected=expected,
        got=got,
        remedy="Let dpkern.survey(model, example) make the sites.",
    )
