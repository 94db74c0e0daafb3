"""ChaCha (RFC 8439 block function), one block per element, and streams as kernel arguments.

A stream travels as six integers: the key in four, the nonce, the rounds. They are arguments of
their own and never specialised: Triton would make kernels, cached on disk, for some values, and it
specialises the entries of a tuple whatever it is told.
"""

from __future__ import annotations

import struct

import triton
import triton.language as tl

from ...rng import Stream

STREAM = ("key0", "key1", "key2", "key3", "nonce", "rounds")
"""Names of a stream's arguments."""
ROUNDING = tuple(f"r_{name}" for name in STREAM)
"""Those of the stochastic rounding's stream."""


def arguments(stream: Stream | None) -> tuple[int, ...]:
    """A stream in the order of ``STREAM``; zeros for none."""
    if stream is None:
        return (0,) * len(STREAM)
    key, n0, n1, rounds = stream.packed()
    (nonce,) = struct.unpack("<q", struct.pack("<II", n0, n1))
    return (*struct.unpack("<4q", key), nonce, rounds)


@triton.jit
def unpack(key0, key1, key2, key3, nonce, rounds):
    """The stream as the functions below take it: 32-bit key words, n0, n1, rounds."""
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
def _quarter(a, b, c, d):
    a += b
    d ^= a
    d = (d << 16) | (d >> 16)
    c += d
    b ^= c
    b = (b << 12) | (b >> 20)
    a += b
    d ^= a
    d = (d << 8) | (d >> 24)
    c += d
    b ^= c
    b = (b << 7) | (b >> 25)
    return a, b, c, d


@triton.jit
def blocks(stream, counter, TAIL: tl.constexpr = False):
    """The 16 words of the blocks with these 64-bit counters, uint32; TAIL is the nonce bit of the
    tail's own keystream."""
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
        x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
    x0, x1, x2, x3, x4, x5, x6, x7 = (
        x0 + s0, x1 + s1, x2 + s2, x3 + s3, x4 + s4, x5 + s5, x6 + s6, x7 + s7
    )  # fmt: skip
    x8, x9, x10, x11, x12, x13, x14, x15 = (
        x8 + s8, x9 + s9, x10 + s10, x11 + s11, x12 + low, x13 + high, x14 + s14, x15 + s15
    )  # fmt: skip
    return x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15
