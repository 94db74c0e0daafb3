"""Predict how long the ways to a layer's clipped sum take on a device, from FLOPs and bytes.

A way's time is its products at the speed of a product, plus its traffic at the speed of a copy:

    materialize   F / L + (held + r G) / W       the product; gradients stored and read again
    norm alone    N / R + F / R + 2 held / W     a norm, then one weighted product for the sum

with ``F = 2 B T P`` FLOPs of a product (B samples, T positions, P entries of a gradient), N those
of the norm, ``held`` bytes of operands and G bytes of gradients. Gradients of linear layers are the
library's batched product, at speed L, and are stored and read for the norm and for the sum (r = 3);
those of convolutions are ours, L = R, whose product takes the norm as well (r = 2). Nothing
overlaps here, which makes materialized gradients look slower than they are.

The speeds are predictions for an NVIDIA H200 from machine code and data sheets. Not yet run on a
GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .per_sample_gradients import ConvolutionGradients, LinearGradients

LIBRARY = {torch.bfloat16: 500e12, torch.float16: 500e12, torch.float32: 45e12}
"""FLOP/s of the library's batched products; float32 without TF32."""
PRODUCTS = {torch.bfloat16: 200e12, torch.float16: 200e12, torch.float32: 20e12}
"""FLOP/s of the products of ``ghost`` by the operands' dtype."""
DOUBLE_PRODUCTS = 10e12
"""FLOP/s of the same in float64, without tensor cores."""
BANDWIDTH = 4.3e12
"""Bytes per second of a copy."""
GRAM_POSITIONS = 64
"""The most positions whose Gram matrices a device kernel holds."""
MEMORY_SHARE = 4
"""Materialized gradients may take one part in so many of the device's memory."""


@dataclass(frozen=True)
class Work:
    """One layer's norm and sum.

    Attributes:
        product: FLOPs of the product that makes the gradients, or their weighted sum.
        norm: FLOPs of the norm where the gradients are not materialized.
        held: bytes of the operands.
        gradients: bytes of the materialized gradients.
        speed: FLOP/s of our products.
        library: FLOP/s of the product that materializes the gradients.
        passes: how often the gradients are stored or read.
    """

    product: float
    norm: float
    held: int
    gradients: int
    speed: float
    library: float
    passes: int

    @classmethod
    def of(cls, record: LinearGradients | ConvolutionGradients) -> Work:
        """Return the work of a record, from its sizes alone."""
        size, batch = math.prod(record.shape), record.batch
        positions = math.prod(record.g.shape[2:])
        features = math.inf
        if isinstance(record, LinearGradients):
            positions = int(record.a.shape[1])
            features = record.a.shape[2] + record.g.shape[2]
        product = 2.0 * batch * positions * size
        norm = product
        if positions <= GRAM_POSITIONS:  # no device kernel makes those of a convolution
            norm = min(product, 2.0 * batch * positions**2 * features)
        a = record.a if isinstance(record, LinearGradients) else record.x
        # Operands of two types are widened before their product.
        dtype = record.g.dtype if a.dtype is record.g.dtype else record.dtype
        speed = PRODUCTS.get(dtype, DOUBLE_PRODUCTS)
        dense = isinstance(record, LinearGradients)
        library = LIBRARY.get(dtype, 2 * DOUBLE_PRODUCTS) if dense else speed
        sizes = record.held_bytes, record.gradient_bytes
        return cls(product, norm, *sizes, speed, library, 3 if dense else 2)

    @property
    def materialized(self) -> float:
        """Seconds to make, store and read the gradients."""
        traffic = self.held + self.passes * self.gradients
        return self.product / self.library + traffic / BANDWIDTH

    @property
    def norm_alone(self) -> float:
        """Seconds of a norm and a weighted product."""
        return (self.norm + self.product) / self.speed + 2 * self.held / BANDWIDTH

    @property
    def reread(self) -> float:
        """Seconds to store gradients that a norm has made anyway, and to read them."""
        return 2 * self.gradients / BANDWIDTH

    @property
    def summed(self) -> float:
        """Seconds of the weighted product alone."""
        return self.product / self.speed + self.held / BANDWIDTH


def memory_for_gradients(device: torch.device) -> int:
    """Return the bytes that materialized gradients may take on a device; 0 if unknown.

    It is a share of all its memory, not of what is free: a run and its repetition must decide
    alike.
    """
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).total_memory) // MEMORY_SHARE
