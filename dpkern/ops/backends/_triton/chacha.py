"""ChaCha (RFC 8439 block function), one block per element, and streams as kernel arguments.

A stream travels as six integers: the key in four, the nonce, the rounds. They are arguments of
their own and never specialised: Triton would make kernels, cached on disk, for some values, and it
specialises the entries of a tuple whatever it is told.
"""

from __future__ import annotations

import struct

import triton
import triton.language as tl

from ....base.rng import Stream

STREAM = ("key0", "key1", "key2", "key3", "nonce", "rounds")
"""Names of a stream's arguments."""
ROUNDING = tuple(f"r_{name}" for name in STREAM)
"""Those of the stochastic rounding's stream."""


def arguments(stream: Stream | None) -> tuple[int, ...]:
    """Return a stream in the order of ``STREAM``; zeros for none."""
    if stream is None:
        return (0,) * len(STREAM)
    key, n0, n1, rounds = stream.packed()
    (nonce,) = struct.unpack("<q", struct.pack("<II", n0, n1))
    return (*struct.unpack("<4q", key), nonce, rounds)


@triton.jit
def unpack(key0, key1, key2, key3, nonce, rounds):
    """Return the stream as the functions below take it: 32-bit key words, n0, n1, rounds."""
    k0, k1 = _halves(key0)
    k2, k3 = _halves(key1)
    k4, k5 = _halves(key2)
    k6, k7 = _halves(key3)
    n0, n1 = _halves(nonce)
    return k0, k1, k2, k3, k4, k5, k6, k7, n0, n1, rounds


@triton.jit
def _halves(x):
    return x.to(tl.uint32), (x >> 32).to(tl.uint32)


@triton.jit
def _quarter_rounds(a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3):
    """Run four quarter rounds at once.

    These sums wrap around; in Triton's debug mode plain ones must not.
    """
    a0, a1, a2, a3 = (
        tl.add(a0, b0, False),
        tl.add(a1, b1, False),
        tl.add(a2, b2, False),
        tl.add(a3, b3, False),
    )
    d0, d1, d2, d3 = d0 ^ a0, d1 ^ a1, d2 ^ a2, d3 ^ a3
    d0, d1, d2, d3 = (
        (d0 << 16) | (d0 >> 16),
        (d1 << 16) | (d1 >> 16),
        (d2 << 16) | (d2 >> 16),
        (d3 << 16) | (d3 >> 16),
    )
    c0, c1, c2, c3 = (
        tl.add(c0, d0, False),
        tl.add(c1, d1, False),
        tl.add(c2, d2, False),
        tl.add(c3, d3, False),
    )
    b0, b1, b2, b3 = b0 ^ c0, b1 ^ c1, b2 ^ c2, b3 ^ c3
    b0, b1, b2, b3 = (
        (b0 << 12) | (b0 >> 20),
        (b1 << 12) | (b1 >> 20),
        (b2 << 12) | (b2 >> 20),
        (b3 << 12) | (b3 >> 20),
    )
    a0, a1, a2, a3 = (
        tl.add(a0, b0, False),
        tl.add(a1, b1, False),
        tl.add(a2, b2, False),
        tl.add(a3, b3, False),
    )
    d0, d1, d2, d3 = d0 ^ a0, d1 ^ a1, d2 ^ a2, d3 ^ a3
    d0, d1, d2, d3 = (
        (d0 << 8) | (d0 >> 24),
        (d1 << 8) | (d1 >> 24),
        (d2 << 8) | (d2 >> 24),
        (d3 << 8) | (d3 >> 24),
    )
    c0, c1, c2, c3 = (
        tl.add(c0, d0, False),
        tl.add(c1, d1, False),
        tl.add(c2, d2, False),
        tl.add(c3, d3, False),
    )
    b0, b1, b2, b3 = b0 ^ c0, b1 ^ c1, b2 ^ c2, b3 ^ c3
    b0, b1, b2, b3 = (
        (b0 << 7) | (b0 >> 25),
        (b1 << 7) | (b1 >> 25),
        (b2 << 7) | (b2 >> 25),
        (b3 << 7) | (b3 >> 25),
    )
    return a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3


@triton.jit
def blocks(stream, counter, TAIL: tl.constexpr = False):
    """Return the 16 words of the blocks with these 64-bit counters, uint32.

    TAIL is the nonce bit of the tail's own keystream.
    """
    k0, k1, k2, k3, k4, k5, k6, k7, n0, n1, rounds = stream
    if TAIL:
        n0 = n0 ^ 0x80000000
    low = counter.to(tl.uint32)
    high = (counter >> 32).to(tl.uint32)
    s0 = tl.full(low.shape, 0x61707865, tl.uint32)  # "expand 32-byte k"
    s1 = tl.full(low.shape, 0x3320646E, tl.uint32)
    s2 = tl.full(low.shape, 0x79622D32, tl.uint32)
    s3 = tl.full(low.shape, 0x6B206574, tl.uint32)
    none = tl.zeros_like(low)
    s4, s5, s6, s7 = none + k0, none + k1, none + k2, none + k3
    s8, s9, s10, s11 = none + k4, none + k5, none + k6, none + k7
    s14, s15 = none + n0, none + n1
    x0, x1, x2, x3, x4, x5, x6, x7 = s0, s1, s2, s3, s4, s5, s6, s7
    x8, x9, x10, x11, x12, x13, x14, x15 = s8, s9, s10, s11, low, high, s14, s15
    for _round in range(rounds // 2):
        # Columns, then diagonals.
        x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15 = _quarter_rounds(
            x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15
        )  # fmt: skip
        x0, x1, x2, x3, x5, x6, x7, x4, x10, x11, x8, x9, x15, x12, x13, x14 = _quarter_rounds(
            x0, x1, x2, x3, x5, x6, x7, x4, x10, x11, x8, x9, x15, x12, x13, x14
        )  # fmt: skip
    return (
        tl.add(x0, s0, False), tl.add(x1, s1, False),
        tl.add(x2, s2, False), tl.add(x3, s3, False),
        tl.add(x4, s4, False), tl.add(x5, s5, False),
        tl.add(x6, s6, False), tl.add(x7, s7, False),
        tl.add(x8, s8, False), tl.add(x9, s9, False),
        tl.add(x10, s10, False), tl.add(x11, s11, False),
        tl.add(x12, low, False), tl.add(x13, high, False),
        tl.add(x14, s14, False), tl.add(x15, s15, False),
    )  # fmt: skip
