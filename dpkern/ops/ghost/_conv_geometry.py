"""The sizes of a convolution: kernel, stride, padding, dilation and groups, checked once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from ...base import validate as check
from ...base.errors import InvalidInput
from ._bounds import OPERANDS

Size = int | Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """A convolution of ``input`` positions into ``output`` positions, zero-padded.

    Attributes:
        batch, in_channels, out_channels, groups: ``B, ci, co`` and the groups.
        input, output: spatial sizes.
        kernel, stride, padding, dilation: one number per spatial dimension.
    """

    batch: int
    in_channels: int
    out_channels: int
    input: tuple[int, ...]
    output: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @cached_property
    def weight_shape(self) -> tuple[int, ...]:
        """``[co, ci / groups, *kernel]``."""
        return (self.out_channels, self.in_channels // self.groups, *self.kernel)

    @property
    def taps(self) -> int:
        """Positions of the kernel."""
        return math.prod(self.kernel)

    @property
    def positions(self) -> int:
        """Positions of the output."""
        return math.prod(self.output)

    @cached_property
    def multiplications(self) -> int:
        """Multiplications of all the per-sample gradients together."""
        return self.batch * math.prod(self.weight_shape) * self.positions

    @cached_property
    def reached_sizes(self) -> tuple[int, ...]:
        """Number of places of each axis that some output sees; a long stride leaves some out."""
        axes = zip(
            *(self.input, self.output, self.kernel),
            *(self.stride, self.padding, self.dilation),
            strict=True,
        )
        return tuple(len(reached_along(*axis)) for axis in axes)

    @property
    def reached_positions(self) -> int:
        """Positions of the input that some output sees."""
        return math.prod(self.reached_sizes)

    @property
    def reached(self) -> int:
        """Entries of one sample's input that some output sees."""
        return self.in_channels * self.reached_positions

    @staticmethod
    def of(
        x: torch.Tensor,
        g: torch.Tensor,
        kernel_size: Size,
        stride: Size,
        padding: Size,
        dilation: Size,
        groups: int,
    ) -> Geometry:
        """Make the geometry of an op's arguments, which are not checked."""
        spatial = x.dim() - 2
        sizes = (_each(size, spatial) for size in (kernel_size, stride, padding, dilation))
        return _geometry(x.shape, g.shape, *sizes, groups)


def reached_along(
    n: int, outputs: int, kernel: int, stride: int, padding: int, dilation: int
) -> list[int]:
    """Return the places of one axis that some output sees."""
    seen = {stride * o + dilation * k - padding for o in range(outputs) for k in range(kernel)}
    return sorted(place for place in seen if 0 <= place < n)


def _each(size: Size, spatial: int) -> tuple[int, ...]:
    return (size,) * spatial if isinstance(size, int) else tuple(size)


@lru_cache(maxsize=1024)
def _geometry(
    x: torch.Size,
    g: torch.Size,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
) -> Geometry:
    return Geometry(
        batch=x[0],
        in_channels=x[1],
        out_channels=g[1],
        input=tuple(x[2:]),
        output=tuple(g[2:]),
        kernel=kernel,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
    )


def check_size(name: str, size: object, spatial: int, minimum: int) -> tuple[int, ...]:
    """Return one int per spatial dimension; ``InvalidInput`` names the argument that is wrong."""
    numbers = (size,) * spatial if isinstance(size, int) else size
    right = (
        isinstance(numbers, (list, tuple))
        and len(numbers) == spatial
        and all(type(n) is int and n >= minimum for n in numbers)
    )
    if not right:
        raise InvalidInput(
            name,
            expected=f"an int >= {minimum}, or {spatial} of them, one per spatial dimension",
            got=size,
            remedy="Pass the numbers of the layer.",
        )
    assert isinstance(numbers, (list, tuple))
    return tuple(numbers)


def check_geometry(
    x: object,
    g: object,
    kernel_size: object,
    stride: object,
    padding: object,
    dilation: object,
    groups: object,
) -> Geometry:
    """Return the checked sizes; ``InvalidInput`` names the argument that is wrong."""
    x = check.tensor(x=x, dtypes=OPERANDS, contiguous=True)
    if x.dim() not in (3, 4, 5):
        raise InvalidInput(
            "x",
            expected="shape [B, channels, *positions] with 1 to 3 spatial dimensions",
            got=str(list(x.shape)),
            remedy="Give the batch and channel dimensions first.",
        )
    spatial = x.dim() - 2
    kernel = check_size("kernel_size", kernel_size, spatial, 1)
    strides = check_size("stride", stride, spatial, 1)
    paddings = check_size("padding", padding, spatial, 0)
    dilations = check_size("dilation", dilation, spatial, 1)
    groups = check.integer(groups=groups, minimum=1)
    output = []
    for n, k, s, p, d in zip(x.shape[2:], kernel, strides, paddings, dilations, strict=True):
        room = n + 2 * p - d * (k - 1) - 1
        if room < 0:
            raise InvalidInput(
                "kernel_size",
                expected="a kernel that fits into the padded input",
                got=f"{k} (dilation {d}) for {n} + 2 * {p} positions",
                remedy="Pass the numbers of the layer that made the output.",
            )
        output.append(room // s + 1)
    g = check.tensor(
        g=g,
        shape=(x.shape[0], None, *output),
        dtypes=(x.dtype,),
        device=x.device,
        contiguous=True,
    )
    for name, channels in (("x", x.shape[1]), ("g", g.shape[1])):
        if channels < 1 or channels % groups:
            raise InvalidInput(
                name,
                expected=f"channels that {groups} groups divide",
                got=f"{channels} channels",
                remedy="Pass the numbers of the layer.",
            )
    return Geometry.of(x, g, kernel, strides, paddings, dilations, groups)
