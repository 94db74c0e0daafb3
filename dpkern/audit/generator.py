"""Layer 4 on the generator: check that the noise uses the cipher's words, each of them once.

White-box: these checks know how streams are made. The noise distribution itself is out of their
reach; ``certificate`` proves it from its numbers.
"""

from __future__ import annotations

import hashlib
import os
import signal
import warnings
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, get_args

import torch

from ..base import dispatch
from ..base.laws import FINE_BITS, LAWS, Distribution
from ..base.rng import Key, Purpose, Stream
from ..base.threads import torch_threads
from ..ops import noise
from .bits import LAYER, uniform_low_bits
from .findings import Check
from .golden import answers, vectors

THREADS = (1, 2, 4)
FRESH_KEYS = 1000
_SHORT = 5000
"""Draws of the longest vector in a quick audit."""

_DEVICES = ("cuda", "triton", "cupy")
_PLACES = (0, 509, 2**32 // 48 * 512 - 300, 2**62 - 5000)
"""The start, a tile's end, where the counter's low word overflows, the end of all positions."""


def backend_checks(
    backend: str, *, device: str | None = None, quick: bool = False
) -> tuple[Check, ...]:
    """Check vectors and equal bits of one backend.

    Args:
        backend: its name.
        device: device of its tensors. None selects the backend's own.
        quick: without the vectors of two million draws.
    """
    available, reason = dispatch.availability(backend)
    if device is None and not available:
        why = f"{backend} {reason}"
        return tuple(
            Check(layer=LAYER, name=f"{name}, {backend}", passed=None, text=why)
            for name in ("golden vectors", "equal bits")
        )
    where = device or ("cuda" if backend in _DEVICES else "cpu")
    return golden_vectors(backend, where, quick=quick), equal_bits(backend, where)


def golden_vectors(backend: str, device: str = "cpu", *, quick: bool = False) -> Check:
    """Check RFC 8439, vectors of fewer rounds, and committed draws and noisy sums of both laws.

    Args:
        backend: name of the backend.
        device: device of its tensors.
        quick: without the vectors of two million draws.
    """
    asked = [
        vector
        for vector in vectors()
        if not (quick and vector.kind.endswith("sha256") and int(vector.values[0]) > _SHORT)
    ]
    wrong = [str(v) for v in asked if answers(v, backend, device) != v.values]
    text = f"{len(asked)} vectors on {backend}"
    return Check(
        layer=LAYER,
        name=f"golden vectors, {backend}",
        passed=not wrong,
        text=text + (f"; wrong: {', '.join(wrong)}" if wrong else ", bit for bit"),
        numbers={"vectors": len(asked), "wrong": len(wrong)},
    )


def equal_bits(backend: str, device: str = "cpu", *, count: int = 3000) -> Check:
    """Compare draws and noisy sums in pieces, with 1, 2 and 4 threads, with the reference in one.

    Args:
        backend: name of the backend.
        device: device of its tensors.
        count: values at each place, at least 3.
    """
    stream, rounding = (Key.fresh().stream(p, 1) for p in (Purpose.NOISE, Purpose.ROUNDING))
    compared, wrong = 0, 0
    for law, first in product(LAWS, _PLACES):
        wanted = _released(stream, rounding, law, first, [count], "reference", "cpu")
        for threads in THREADS:
            with torch_threads(threads):
                cut = [count // 3 + threads, 1, count - count // 3 - threads - 1]
                got = _released(stream, rounding, law, first, cut, backend, device)
            wrong += sum(int((a != b).sum()) for a, b in zip(got, wanted, strict=True))
            compared += sum(len(values) for values in wanted)
    return Check(
        layer=LAYER,
        name=f"equal bits, {backend}",
        passed=wrong == 0,
        text=f"{wrong} of {compared} values differ on {backend} in pieces with "
        f"{', '.join(map(str, THREADS))} threads",
        numbers={"values": compared, "wrong": wrong},
    )


def _released(
    stream: Stream,
    rounding: Stream,
    law: str,
    first: int,
    pieces: Sequence[int],
    backend: str,
    device: str,
) -> list[torch.Tensor]:
    """Make draws, noisy integers and noisy floats ``[sum(pieces)]`` piece by piece, on the CPU."""
    sums = torch.linspace(-1e5, 1e5, sum(pieces), dtype=torch.float64)
    made: list[list[torch.Tensor]] = [[], [], []]
    at = 0
    for piece in pieces:
        given: dict[str, Any] = {"position": first + at, "distribution": law, "backend": backend}
        draws = noise.lattice_draws(stream, count=piece, device=device, **given)
        whole = sums[at : at + piece].to(torch.int32).to(device)
        real = sums[at : at + piece].to(torch.float32).to(device)
        noise.add_noise(whole, stream=stream, **given)
        noise.add_noise(real, stream=stream, scale=1.1, rounding=rounding, **given)
        for parts, values in zip(made, (draws, whole, real), strict=True):
            parts.append(values.cpu())
        at += piece
    return [torch.cat(parts) for parts in made]


def draw_bits(law: Distribution, *, count: int = 1 << 20) -> Check:
    """Check the low 14 bits of fresh draws ``X``, which both laws make uniform.

    Args:
        law: ``gaussian`` or ``laplace``.
        count: number of draws, at least 2^19.
    """
    stream = Key.fresh().stream(Purpose.NOISE if law == "gaussian" else Purpose.LAPLACE, 0)
    drawn = noise.lattice_draws(stream, position=0, count=count, distribution=law)
    return uniform_low_bits(drawn, bits=FINE_BITS, name=f"low bits of draws, {law}")


def separate_streams() -> Check:
    """Check that purposes, steps, stream numbers and counters never share a keystream block.

    Equal blocks by chance: probability below 2^-480.
    """
    key, seen, asked = Key.fresh(), set(), 0
    numbers = product(Purpose, (0, 1, 2**32 - 1), (0, 1, 2**24 - 1))
    for purpose, step, number in numbers:
        stream = key.stream(purpose, step, number)
        for first in (0, 1, 2**32):
            words = noise.keystream(stream, first_block=first, blocks=1)
            seen.add(tuple(words.tolist()))
            asked += 1
    return Check(
        layer=LAYER,
        name="separate streams",
        passed=len(seen) == asked,
        text=f"{asked} blocks of one key's streams, {len(seen)} of them different",
        numbers={"blocks": asked, "different": len(seen)},
    )


def fresh_keys(make: Callable[[], Key] = Key.fresh) -> Check:
    """Check that keys are all different, each of their 256 bits set about half of the time.

    A sound source fails with probability below 1e-8: 256 counts outside of 7 standard deviations.

    Args:
        make: function that makes a key.
    """
    found = [make().stream(Purpose.NOISE, 0).key for _ in range(FRESH_KEYS)]
    numbers = [int.from_bytes(key, "big") for key in found]
    ones = [sum(number >> bit & 1 for number in numbers) for bit in range(256)]
    furthest = max(abs(count - FRESH_KEYS / 2) for count in ones) / (FRESH_KEYS / 4) ** 0.5
    different = len(set(found))
    return Check(
        layer=LAYER,
        name="fresh keys",
        passed=different == FRESH_KEYS and furthest < 7,
        text=f"{different} of {FRESH_KEYS} keys are different; the worst bit is {furthest:.1f} "
        "standard deviations from half",
        numbers={"keys": FRESH_KEYS, "different": different, "worst_sd": furthest},
    )


def fork(make: Callable[[], Key] = Key.fresh) -> Check:
    """Check that a forked child that goes on with a key has one of its own, as has its sibling.

    Args:
        make: function that makes a key.
    """
    name = "fork"
    if not hasattr(os, "fork"):
        return Check(layer=LAYER, name=name, passed=None, text="this system cannot fork")
    key = make()
    digests = [_digest(key), in_child(lambda: _digest(key)), in_child(lambda: _digest(key))]
    if not all(digests):
        return Check(layer=LAYER, name=name, passed=None, text="a forked child did not answer")
    different = len({*digests, _digest(key)})
    return Check(
        layer=LAYER,
        name=name,
        passed=different == 3,
        text=f"{different} different keys in a process and two forked children",
        numbers={"processes": 3, "keys": different},
    )


def _digest(key: Key) -> bytes:
    """Return a digest of the key; the key itself must not leave its process."""
    return hashlib.sha256(key.stream(Purpose.NOISE, 0).key).digest()


def in_child(work: Callable[[], bytes]) -> bytes:
    """Return what ``work`` returns in a forked child; empty if the child does not answer."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # From Python 3.12 on: the process has other threads. The child only hashes and exits.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:  # pragma: no cover - another process
        # Nothing of the parent's may run on here, whatever happens.
        try:
            signal.alarm(20)
            os.write(writer, work())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        found = pipe.read()
    os.waitpid(child, 0)
    return found


def checks(*, backends: Sequence[str] | None = None, quick: bool = False) -> tuple[Check, ...]:
    """Run all checks of the generator.

    Args:
        backends: names of the backends. None selects all that dpkern knows; a missing one is listed
            with its reason.
        quick: only the shorter vectors.
    """
    names = dispatch.BACKENDS if backends is None else backends
    found = [check for name in names for check in backend_checks(name, quick=quick)]
    found += [draw_bits(law) for law in get_args(Distribution)]
    return (*found, separate_streams(), fresh_keys(), fork())


__all__ = [
    "backend_checks",
    "checks",
    "draw_bits",
    "equal_bits",
    "fork",
    "fresh_keys",
    "golden_vectors",
    "separate_streams",
]
