"""Hold the operands of a parameter's use, and compute norms and sums of per-sample gradients.

An object belongs to B samples and one gradient shape. ``squared_norms()`` gives upper bounds of the
squared norms, float64 ``[B]``; ``add_sum(factors, out)`` adds ``sum_b factors_b grad_b``;
``per_sample()`` materializes the gradients ``[B, *shape]``; ``l1_norms()`` gives upper bounds of
the L1 norms, and ``inner(t)`` is ``<grad_b, t>``. Several uses of one parameter are merged before
any norm is taken (``engine.merge``), so that cross terms are exact.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..ops import clip, direct, ghost, spectral
from ..ops.backends import _gram_shares as shares

_WIDE = (torch.float32, torch.float64)
_PIECE = 1 << 21
"""Number of gradient entries to materialize at a time where no cheaper way leads to a norm."""


def to_sum_dtype(tensor: Tensor) -> Tensor:
    """Return the tensor contiguous and in the dtype of norms and sums: float64 stays float64, all
    else becomes float32."""
    if tensor.dtype in _WIDE and tensor.is_contiguous():
        return tensor
    return direct.contiguous(tensor.detach().to(clip.sum_dtype(tensor.dtype)))


SIXTEEN_BITS = {torch.bfloat16, torch.float16}
KEPT_IN_16_BITS = {"cuda"}
"""Types of devices whose products read 16-bit operands; elsewhere an op converts them first."""


def operands(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Return a layer's input and output gradient, contiguous and in the dtype of products."""
    kept = x.device.type in KEPT_IN_16_BITS and x.dtype is g.dtype and x.dtype in SIXTEEN_BITS
    return (
        (x.detach().contiguous(), g.detach().contiguous())
        if kept
        else (to_sum_dtype(x), to_sum_dtype(g))
    )


def to_sum_dtype_dense(grads: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the tensor as ``to_sum_dtype`` does, but keep any dense order behind the batch."""
    grads = grads.detach().to(dtype or clip.sum_dtype(grads.dtype))
    return grads if grads.is_contiguous() or _is_dense(grads) else grads.contiguous()


def _is_dense(grads: Tensor) -> bool:
    """Whether samples follow each other without gaps, each in any order of its dimensions."""
    expected = 1
    for stride, size in sorted(
        (s, n) for s, n in zip(grads.stride()[1:], grads.shape[1:], strict=True) if n != 1
    ):
        if stride != expected:
            return False
        expected *= size
    return len(grads) > 0 and grads.stride(0) == expected


def _gamma(terms: int) -> float:
    """Return the relative rounding error of a float64 sum of so many terms."""
    return (terms + 4) * 2.0**-52


def rows_l1(tensor: Tensor) -> Tensor:
    """Return L1 norms over the last dimension, float64."""
    return tensor.double().abs().sum(-1)


class PerSampleGradients(ABC):
    """The per-sample gradients of one use, or of several merged ones, of a parameter."""

    shape: tuple[int, ...]

    @abstractmethod
    def squared_norms(self) -> Tensor:
        """Return upper bounds of the squared norms, float64 ``[B]``."""

    @abstractmethod
    def add_sum(self, factors: Tensor, out: Tensor) -> None:
        """Add ``sum_b factors_b grad_b`` to ``out``; a factor of zero drops the sample."""

    @abstractmethod
    def per_sample(self) -> Tensor:
        """Return the gradients, ``[B, *shape]``."""

    @property
    @abstractmethod
    def batch(self) -> int:
        """The number of samples, B."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of the operands."""

    @abstractmethod
    def part(self, samples: slice) -> PerSampleGradients:
        """Return the gradients of these samples alone."""

    @abstractmethod
    def rounding_terms(self) -> tuple[int, Tensor]:
        """Return the number of products in each entry, and the sum of their absolute values.

        The sum is over all entries of a sample, float64 ``[B]``; rounding errors are a small
        multiple of it.
        """

    def pieces(self, size: int | None = None) -> Iterator[tuple[slice, PerSampleGradients]]:
        """Yield slices of samples with their gradients, of about ``_PIECE`` / ``size`` samples."""
        size = math.prod(self.shape) if size is None else size
        each = max(1, _PIECE // max(1, size))
        for first in range(0, self.batch, each):
            samples = slice(first, first + each)
            yield samples, self.part(samples)

    def by_pieces(
        self, of: Callable[[PerSampleGradients], Tensor], size: int | None = None
    ) -> Tensor:
        """Return ``of`` the gradients, float64 ``[B]``, computed for some samples at a time."""
        found = [of(piece) for _, piece in self.pieces(size)]
        return torch.cat(found) if found else self.rounding_terms()[1]

    def l1_norms(self) -> Tensor:
        """Return upper bounds of the L1 norms ``sum |grad_b|``, float64 ``[B]``."""
        computed = self.by_pieces(lambda r: r.per_sample().double().abs().flatten(1).sum(1))
        terms, products = self.rounding_terms()
        # What is written out is rounded like any sum of products in its dtype.
        unit = torch.finfo(self.dtype).eps if terms > 1 else 0.0
        return (computed + (terms + 2) * unit * products) * (1 + _gamma(math.prod(self.shape)))

    def inner(self, t: Tensor) -> Tensor:
        """Return ``<grad_b, t>`` for a tensor of the gradient's shape, float64 ``[B]``."""
        t = t.double().flatten()
        return self.by_pieces(lambda r: r.per_sample().double().flatten(1) @ t)

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype of materialized gradients."""


def squared_norms(record: PerSampleGradients) -> Tensor:
    """Return upper bounds of the record's squared norms."""
    return record.squared_norms()


R = TypeVar("R", bound="PerSampleGradients")


def copied(record: R) -> R:
    """Return the same gradients in tensors of their own."""
    found: dict[str, Any] = {}
    for each in fields(record):  # type: ignore[arg-type]
        value = getattr(record, each.name)
        if isinstance(value, PerSampleGradients):
            found[each.name] = copied(value)
        elif isinstance(value, Tensor) and each.init:
            found[each.name] = value.clone()
    return replace(record, **found)  # type: ignore[type-var]


@dataclass
class _MaterializedGradients(PerSampleGradients):
    """Per-sample gradients ``[B, *shape]`` that are stored."""

    grads: Tensor

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(self.grads.shape[1:])

    @property
    def batch(self) -> int:
        return int(self.grads.shape[0])

    @property
    def device(self) -> torch.device:
        return self.grads.device

    def rounding_terms(self) -> tuple[int, Tensor]:
        return 1, rows_l1(self.grads.flatten(1))


@dataclass
class ExplicitGradients(_MaterializedGradients):
    """Materialized per-sample gradients, ``[B, *shape]``, with their squared norms if known."""

    squares: Tensor | None = None

    def squared_norms(self) -> Tensor:
        if self.squares is not None:
            return self.squares
        return ghost.explicit_norm([to_sum_dtype_dense(self.grads)])

    def add_sum(self, factors: Tensor, out: Tensor) -> None:
        ghost.contract([to_sum_dtype_dense(self.grads)], factors, [out])

    def per_sample(self) -> Tensor:
        return self.grads

    def part(self, samples: slice) -> ExplicitGradients:
        return ExplicitGradients(self.grads[samples])

    @property
    def dtype(self) -> torch.dtype:
        return self.grads.dtype


@dataclass
class RoundedGradients(_MaterializedGradients):
    """Materialized gradients ``[B, p, d]`` in the 16 bits of their operands, with their squares."""

    squares: Tensor

    def squared_norms(self) -> Tensor:
        return self.squares

    def add_sum(self, factors: Tensor, out: Tensor) -> None:
        ghost.rounded_sum([self.grads], factors, [out])

    def per_sample(self) -> Tensor:
        return to_sum_dtype(self.grads)

    def part(self, samples: slice) -> RoundedGradients:
        return RoundedGradients(self.grads[samples], self.squares[samples])

    @property
    def dtype(self) -> torch.dtype:
        return clip.sum_dtype(self.grads.dtype)


@dataclass
class LinearGradients(PerSampleGradients):
    """Gradients of a linear layer: ``grad_b = sum_t g[b, t] (x) a[b, t]``.

    ``a [B, T, d]`` is the layer's input, ``g [B, T, p]`` its output gradient.
    """

    a: Tensor
    g: Tensor
    integer_operands: bool = False
    """Whether exact sums, and their norms, are those of operands rounded to integers."""

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return int(self.g.shape[2]), int(self.a.shape[2])

    @property
    def batch(self) -> int:
        return int(self.a.shape[0])

    @property
    def held_bytes(self) -> int:
        """The memory of the operands, which materialized gradients would free."""
        return self.a.nbytes + self.g.nbytes

    @property
    def gradient_bytes(self) -> int:
        """The memory that materialized gradients would take."""
        return self.batch * math.prod(self.shape) * clip.sum_dtype(self.g.dtype).itemsize

    @property
    def device(self) -> torch.device:
        return self.a.device

    def squared_norms(self) -> Tensor:
        return ghost.linear_norm(*operands(self.a, self.g))

    def add_sum(self, factors: Tensor, out: Tensor) -> None:
        ghost.linear_sum(*operands(self.a, self.g), factors, out)

    def per_sample(self) -> Tensor:
        return self.materialize().grads

    def materialize(self) -> ExplicitGradients:
        """Return the materialized gradients, with their squared norms."""
        return ExplicitGradients(*ghost.linear_gradient(*operands(self.a, self.g)))

    @property
    def rounded(self) -> bool:
        """Whether gradients that are kept for a float sum are rounded to their operands' 16 bits.

        It is so for bfloat16 on devices, whose range is that of float32; a CPU multiplies wider
        copies.
        """
        kept = self.a.device.type in KEPT_IN_16_BITS or self.a.is_meta
        return kept and self.a.dtype is self.g.dtype is torch.bfloat16

    def materialize_rounded(self) -> RoundedGradients:
        """Return the gradients in 16 bits, with the squared norms of what is stored."""
        return RoundedGradients(*ghost.rounded_gradient(*operands(self.a, self.g)))

    @property
    def shares_launch(self) -> bool:
        """Whether a device takes the norms of several such layers in one launch.

        They then wait for each other until the clip factors are computed.
        """
        same = self.a.dtype is self.g.dtype
        on = self.a.device.type in KEPT_IN_16_BITS
        return on and same and shares.fits(int(self.a.shape[1]), self.a.dtype)

    def part(self, samples: slice) -> LinearGradients:
        return replace(self, a=self.a[samples], g=self.g[samples])

    @property
    def dtype(self) -> torch.dtype:
        return clip.sum_dtype(self.g.dtype)

    def rounding_terms(self) -> tuple[int, Tensor]:
        return int(self.a.shape[1]), (rows_l1(self.a) * rows_l1(self.g)).sum(1)

    def l1_norms(self) -> Tensor:
        if self.a.shape[1] != 1:
            return super().l1_norms()
        _, products = self.rounding_terms()  # ||g a^T||_1 = ||g||_1 ||a||_1
        return products * (1 + _gamma(sum(self.shape)))

    def inner(self, t: Tensor) -> Tensor:
        t = t.double()
        size = self.a[:1].numel() + self.g[:1].numel()

        def one(piece: PerSampleGradients) -> Tensor:
            assert isinstance(piece, LinearGradients)
            return (piece.g.double() @ t * piece.a.double()).flatten(1).sum(1)

        return self.by_pieces(one, size)


@dataclass
class ConvolutionGradients(PerSampleGradients):
    """Gradients of a convolution's kernel, from ``x [B, ci, *S]`` and ``g [B, co, *O]``.

    ``x`` is the input and ``g`` the output gradient.
    """

    x: Tensor
    g: Tensor
    kernel_size: tuple[int, ...]
    geometry: dict[str, Any] = field(default_factory=dict)
    """``stride``, ``padding``, ``dilation`` (tuples) and ``groups``."""

    def __post_init__(self) -> None:
        # Norms, bounds and sums would each copy them anew.
        self.x, self.g = direct.contiguous(self.x), direct.contiguous(self.g)

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        groups = int(self.geometry["groups"])
        return int(self.g.shape[1]), int(self.x.shape[1]) // groups, *self.kernel_size

    @property
    def batch(self) -> int:
        return int(self.x.shape[0])

    @property
    def held_bytes(self) -> int:
        """The memory of the operands, which materialized gradients would free."""
        return self.x.nbytes + self.g.nbytes

    @property
    def gradient_bytes(self) -> int:
        """The memory that materialized gradients would take."""
        return self.batch * math.prod(self.shape) * clip.sum_dtype(self.g.dtype).itemsize

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of ops besides the operands."""
        return {"kernel_size": self.kernel_size, **self.geometry}

    @property
    def sizes(self) -> ghost.conv.Geometry:
        """Sizes of the convolution, as its ops know them."""
        return ghost.conv.Geometry.of(self.x, self.g, **self.options)

    @property
    def device(self) -> torch.device:
        return self.x.device

    def squared_norms(self) -> Tensor:
        return ghost.conv_norm(*operands(self.x, self.g), **self.options)

    def add_sum(self, factors: Tensor, out: Tensor) -> None:
        ghost.conv_sum(*operands(self.x, self.g), factors, out, **self.options)

    def per_sample(self) -> Tensor:
        return self.materialize().grads

    def materialize(self) -> ExplicitGradients:
        """Return the materialized gradients, with their squared norms."""
        return ExplicitGradients(*ghost.conv_gradient(*operands(self.x, self.g), **self.options))

    def part(self, samples: slice) -> ConvolutionGradients:
        return ConvolutionGradients(
            self.x[samples], self.g[samples], self.kernel_size, self.geometry
        )

    @property
    def dtype(self) -> torch.dtype:
        return clip.sum_dtype(self.g.dtype)

    def rounding_terms(self) -> tuple[int, Tensor]:
        positions, groups = math.prod(self.g.shape[2:]), int(self.geometry["groups"])
        x, g = (_by_group(t.double().abs(), groups).sum(2) for t in (self.x, self.g))
        windows = self._convolved(x, x.new_ones(groups, 1, *self.kernel_size))
        return positions, (windows * g).flatten(1).sum(1)

    def _convolved(self, x: Tensor, weight: Tensor) -> Tensor:
        geometry = (self.geometry[n] for n in ("stride", "padding", "dilation", "groups"))
        convolve = (torch.conv1d, torch.conv2d, torch.conv3d)[x.dim() - 3]
        return convolve(x, weight, None, *geometry)

    def inner(self, t: Tensor) -> Tensor:
        t = t.double()
        size = self.x[:1].numel() + self.g[:1].numel()

        def one(piece: PerSampleGradients) -> Tensor:
            assert isinstance(piece, ConvolutionGradients)
            return (self._convolved(piece.x.double(), t) * piece.g.double()).flatten(1).sum(1)

        return self.by_pieces(one, size)


@dataclass
class CirculantGradients(PerSampleGradients):
    """Gradients of circulant blocks, which are given by their first rows.

    ``grad_b[i, j, u] = sum_{t, r} g[b, t, i, r] x[b, t, j, r + u mod d]`` with input
    ``x [B, T, q, d]`` and output gradient ``g [B, T, p, d]``.
    """

    x: Tensor
    g: Tensor

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return int(self.g.shape[2]), int(self.x.shape[2]), int(self.g.shape[3])

    @property
    def batch(self) -> int:
        return int(self.x.shape[0])

    @property
    def device(self) -> torch.device:
        return self.x.device

    def squared_norms(self) -> Tensor:
        return spectral.circulant_norm(*operands(self.x, self.g))

    def add_sum(self, factors: Tensor, out: Tensor) -> None:
        spectral.circulant_sum(*operands(self.x, self.g), factors, out)

    def per_sample(self) -> Tensor:
        return self.materialize().grads

    def materialize(self) -> ExplicitGradients:
        """Return the materialized gradients, with their squared norms."""
        return ExplicitGradients(*spectral.circulant_gradient(*operands(self.x, self.g)))

    def part(self, samples: slice) -> CirculantGradients:
        return CirculantGradients(self.x[samples], self.g[samples])

    @property
    def dtype(self) -> torch.dtype:
        return clip.sum_dtype(self.g.dtype)

    def rounding_terms(self) -> tuple[int, Tensor]:
        positions, d = int(self.x.shape[1]), int(self.x.shape[3])
        return positions * d, (rows_l1(self.x.flatten(2)) * rows_l1(self.g.flatten(2))).sum(1)


def _by_group(channels: Tensor, groups: int) -> Tensor:
    """Reshape ``[B, C, *S] -> [B, groups, C / groups, *S]``."""
    return channels.reshape(len(channels), groups, channels.shape[1] // groups, *channels.shape[2:])
