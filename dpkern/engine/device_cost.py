"""Predict how long the ways to a layer's clipped sum take on a device, from FLOPs and bytes.

A way's time is its products at the speed of a product, plus its traffic at the speed of a copy:

    materialize   F / K + (held + r G) / W        the product; gradients stored and read again
    norm alone    N + F / R + 2 held / W          a norm, then one weighted product for the sum

with ``F = 2 B T P`` FLOPs of a product (B samples, T positions, P entries of a gradient), N seconds
of the norm's products, ``held`` bytes of operands and G bytes of gradients. Gradients of linear
layers are the library's batched product, at speed K, and are stored and read for the norm and for
the sum (r = 3), in 16 bits where operands are bfloat16. Those of convolutions are ours, whose
product takes the norm as well (r = 2), and a copy of the input with its channels innermost is made
and read. Nothing overlaps here, which makes materialized gradients look slower than they are.

Our products on tensor cores are bound by what the second-level cache gives them: a tile of r rows
and c columns multiplies ``2 r c`` times for each ``(r + c)`` numbers that it loads. Sums of linear
layers with few positions have larger ones, which hold one accumulator. What the last programs of a
launch leave idle is left out, and so are parts of sums that are stored and added; but not what
norms leave idle whose programs own a sample of one of several layers
(``ops.backends._gram_shares``), which also store a Gram matrix and read it again.

The speeds are predictions for an NVIDIA H200 from machine code and data sheets. Not yet run on a
GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..ops.backends import _gram_shares as shares
from ..ops.ghost.conv import tf32_convolutions
from .per_sample_gradients import ConvolutionGradients, LinearGradients

LIBRARY = {torch.bfloat16: 500e12, torch.float16: 500e12, torch.float32: 45e12}
"""FLOP/s of the library's batched products; float32 without TF32."""
CACHE = 0.85 * 5.5e12
"""Bytes per second that tiles get out of the second-level cache."""
SIDE = 128
"""Rows and columns of a tile on tensor cores, at most; at least ``LEAST_SIDE``."""
LEAST_SIDE = 16
CHAINED, CHAINED_POSITIONS, CHUNK = (256, 192), 320, 64
"""The tile of a sum that stays in one accumulator, positions of a sample, at most, and of a chunk,
of which two thirds must be full."""
PLAIN_PRODUCTS = 20e12
"""FLOP/s of products without tensor cores, or whose numbers are loaded one by one."""
DOUBLE_PRODUCTS = 10e12
"""FLOP/s of the same in float64, without tensor cores."""
BANDWIDTH = 4.3e12
"""Bytes per second of a copy."""
MULTIPLE = 16
"""Channels of a group, at whose multiples threads load 16 bytes at a time."""
WIDENED = 1024
"""Output features from which on rows are filled up to such a multiple."""
GRAM_POSITIONS = 64
"""The most positions whose Gram matrices a program holds; of more it holds a tile."""
MEMORY_SHARE = 4
"""Materialized gradients may take one part in so many of the device's memory."""


@dataclass(frozen=True)
class Work:
    """One layer's norm and sum.

    Attributes:
        product: FLOPs of the product that makes the gradients, or their weighted sum.
        norm: seconds of the norm's products where the gradients are not materialized.
        held: bytes that a way reads of the operands, and of the copy that it makes of them.
        gradients: bytes of the materialized gradients.
        speed: FLOP/s of our weighted product.
        keeping: FLOP/s of the product that materializes the gradients.
        passes: how often the gradients are stored or read.
    """

    product: float
    norm: float
    held: int
    gradients: int
    speed: float
    keeping: float
    passes: int

    @classmethod
    def of(cls, record: LinearGradients | ConvolutionGradients) -> Work:
        """Return the work of a record, from its sizes alone."""
        if isinstance(record, LinearGradients):
            return cls._linear(record)
        return cls._convolution(record)

    @classmethod
    def _linear(cls, record: LinearGradients) -> Work:
        batch, positions, d = record.a.shape
        p = int(record.g.shape[2])
        product = 2.0 * batch * positions * d * p
        # Operands of two types are widened before their product.
        dtype = record.g.dtype if record.a.dtype is record.g.dtype else record.dtype
        speed = summing = _speed(dtype, p, d)
        filled = positions / (-(-positions // CHUNK) * CHUNK)
        few = positions <= CHAINED_POSITIONS and filled >= 2 / 3
        if dtype.itemsize == 2 and few and _loaded_wide(d, p):
            summing = max(speed, _tiled(dtype, (p, d), CHAINED))
        library = LIBRARY.get(dtype, 2 * DOUBLE_PRODUCTS)
        norm = min(product / speed, batch * _gram(batch, positions, d, p, dtype, speed))
        sizes = record.held_bytes, record.gradient_bytes // (2 if record.rounded else 1)
        return cls(product, norm, *sizes, summing, library, 3)

    @classmethod
    def _convolution(cls, record: ConvolutionGradients) -> Work:
        size, positions = math.prod(record.shape), math.prod(record.g.shape[2:])
        product = 2.0 * record.batch * positions * size
        dtype = record.g.dtype if record.x.dtype is record.g.dtype else record.dtype
        rows = record.shape[0] // int(record.geometry["groups"])
        taps, columns = math.prod(record.kernel_size), size // record.shape[0]
        copied = taps > 1 and record.shape[1] % MULTIPLE == 0
        wide = copied or (taps == 1 and positions % MULTIPLE == 0)
        speed = _speed(dtype, rows, columns, wide=wide)
        keeping = _speed(dtype, rows, columns, wide=wide, tf32=tf32_convolutions())
        held = record.held_bytes + (2 * record.x.nbytes if copied else 0)
        norm = product / speed
        return cls(product, norm, held, record.gradient_bytes, speed, keeping, 2)

    @property
    def materialized(self) -> float:
        """Seconds to make, store and read the gradients."""
        traffic = self.held + self.passes * self.gradients
        return self.product / self.keeping + traffic / BANDWIDTH

    @property
    def norm_alone(self) -> float:
        """Seconds of a norm and a weighted product."""
        return self.norm + self.product / self.speed + 2 * self.held / BANDWIDTH

    @property
    def reread(self) -> float:
        """Seconds to store gradients that a norm has made anyway, and to read them."""
        return 2 * self.gradients / BANDWIDTH

    @property
    def summed(self) -> float:
        """Seconds of the weighted product alone."""
        return self.product / self.speed + self.held / BANDWIDTH


def _gram(batch: int, positions: int, d: int, p: int, dtype: torch.dtype, speed: float) -> float:
    """Return the seconds of one sample's Gram matrices; infinite where they are not used."""
    if positions <= GRAM_POSITIONS:
        return 2.0 * positions**2 * (d + p) / speed
    if dtype.itemsize != 2 or not _loaded_wide(d, p):
        return math.inf
    tiles = -(-positions // SIDE)
    entries, loaded, filled = tiles * (tiles + 1) // 2 * SIDE**2, tiles * positions * (d + p), 1.0
    stored = 0
    if shares.fits(positions, dtype) and d % CHUNK == p % CHUNK == 0:
        entries, loaded = shares.ENTRIES, positions * (d + p)
        stored = 2 * 4 * entries
        filled = shares.filled(batch * shares.together(batch)) if batch else 1.0
    products = 2.0 * entries * (d + p)
    if products >= 2.0 * positions * d * p:
        return math.inf
    traffic = loaded * dtype.itemsize + stored
    return max(products / LIBRARY[dtype], traffic / CACHE) / filled


def _speed(
    dtype: torch.dtype, rows: int, columns: int, *, wide: bool = True, tf32: bool = False
) -> float:
    """Return the FLOP/s of our products for gradients of so many rows and columns."""
    if dtype is torch.float64:
        return DOUBLE_PRODUCTS
    if not wide or (dtype is torch.float32 and not tf32):
        return PLAIN_PRODUCTS
    r, c = (min(SIDE, max(LEAST_SIDE, 1 << (n - 1).bit_length())) for n in (rows, columns))
    return _tiled(dtype, (rows, columns), (r, c))


def _tiled(dtype: torch.dtype, shape: tuple[int, int], tile: tuple[int, int]) -> float:
    """Return the FLOP/s that the cache allows in such tiles, which may be partly empty."""
    filled = math.prod(n / (-(-n // side) * side) for n, side in zip(shape, tile, strict=True))
    return filled * CACHE * 2 * math.prod(tile) / (sum(tile) * dtype.itemsize)


def _loaded_wide(d: int, p: int) -> bool:
    """Whether threads load 16 bytes of both operands of a linear layer at a time."""
    return d % MULTIPLE == 0 and (p % MULTIPLE == 0 or p >= WIDENED)


def memory_for_gradients(device: torch.device) -> int:
    """Return the bytes that materialized gradients may take on a device; 0 if unknown.

    It is a share of all its memory, not of what is free: a run and its repetition must decide
    alike.
    """
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).total_memory) // MEMORY_SHARE
