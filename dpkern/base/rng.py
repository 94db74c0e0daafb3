"""Keys and streams of the noise generator: ChaCha in counter mode, one nonce per use.

A stream is ``(key, n0, n1, rounds)``. ``n1`` is the step. ``n0`` holds bit 31 = tail escape (set by
the kernels only), bits 24-30 = purpose, bits 0-23 = stream number. The counter is the position, so
noise does not depend on chunking, thread count, instruction set or backend.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from . import validate as check
from .errors import InvalidInput, PrivacyError

ROUNDS = (20, 12, 8)
KEY_BYTES = 32


class Purpose(IntEnum):
    """The nonce domains: no two uses of a key ever share a keystream word."""

    NOISE = 0
    ROUNDING = 1
    SAMPLING = 2
    SYMBOLS = 3
    LAPLACE = 4
    TABLES = 5


@dataclass(frozen=True, repr=False)
class Stream:
    """A keystream. Its ``repr`` hides the key.

    Attributes:
        key: 32 bytes, eight little-endian words.
        n0: first nonce word, below 2^31.
        n1: second nonce word, below 2^32.
        rounds: 20 (default), 12 or 8.
    """

    key: bytes
    n0: int
    n1: int
    rounds: int = 20

    def __post_init__(self) -> None:
        if not isinstance(self.key, bytes) or len(self.key) != KEY_BYTES:
            raise PrivacyError(
                "key",
                expected=f"{KEY_BYTES} bytes",
                got=f"{len(self.key)} bytes"
                if isinstance(self.key, bytes)
                else type(self.key).__name__,
                remedy="Take streams from Key.fresh().stream(...).",
            )
        usual = type(self.n0) is type(self.n1) is type(self.rounds) is int
        if usual and 0 <= self.n0 < 2**31 and 0 <= self.n1 < 2**32 and self.rounds in ROUNDS:
            return
        check.integer(0, 2**31 - 1, n0=self.n0)
        check.integer(0, 2**32 - 1, n1=self.n1)
        check.choice(ROUNDS, rounds=self.rounds)

    def __repr__(self) -> str:
        return f"Stream(n0=0x{self.n0:08x}, n1={self.n1}, rounds={self.rounds})"

    def packed(self) -> tuple[bytes, int, int, int]:
        """Return the stream in the form that kernels take."""
        return (self.key, self.n0, self.n1, self.rounds)


PackedStream = tuple[bytes, int, int, int]
"""A keystream in the form that kernels take: the fields of ``Stream``."""


class Key:
    """A 256-bit key with its provenance; the source of all streams of one run.

    ``Key.fresh()`` comes from the operating system, and a forked child that uses it gets a key of
    its own. ``Key.from_unsafe_seed(seed)`` is reproducible: an adversary that knows the seed can
    subtract the noise, so nothing it protects can be certified.
    """

    def __init__(self, secret: bytes, *, rounds: int = 20, unsafe_seed: int | None = None) -> None:
        self.rounds = int(check.choice(ROUNDS, rounds=rounds))
        self.unsafe_seed = unsafe_seed
        Stream(secret, 0, 0, rounds)  # checks the secret
        self._secret = bytearray(secret)
        self._process = os.getpid()

    @classmethod
    def fresh(cls, rounds: int = 20) -> Key:
        """Return a key from the system's random source, which is secret."""
        return cls(os.urandom(KEY_BYTES), rounds=rounds)

    @classmethod
    def from_unsafe_seed(cls, seed: int, rounds: int = 20) -> Key:
        """Return a reproducible key, for tests and debugging.

        There is no privacy against an adversary that knows ``seed``.
        """
        seed = check.integer(0, 2**63 - 1, unsafe_seed=seed)
        secret = hashlib.sha256(b"dpkern unsafe seed " + str(seed).encode()).digest()
        return cls(secret, rounds=rounds, unsafe_seed=seed)

    @property
    def seeded(self) -> bool:
        """Whether the key came from a seed."""
        return self.unsafe_seed is not None

    def stream(self, purpose: Purpose, step: int, stream: int = 0) -> Stream:
        """Return the keystream of one purpose at one step (``step < 2^32``, ``stream < 2^24``).

        Raises:
            InvalidInput: a number out of range.
            PrivacyError: the key has been wiped.
        """
        return Stream(*self.packed_stream(purpose, step, stream))

    def packed_stream(self, purpose: Purpose, step: int, stream: int = 0) -> PackedStream:
        """Return the same keystream in the form that kernels take.

        Raises:
            InvalidInput: a number out of range.
            PrivacyError: the key has been wiped.
        """
        if not isinstance(purpose, Purpose):
            raise InvalidInput(
                "purpose",
                expected="a dpkern.rng.Purpose",
                got=purpose,
                remedy="Choose one of Purpose.NOISE, Purpose.ROUNDING, ...",
            )
        if not (type(step) is type(stream) is int and 0 <= step < 2**32 and 0 <= stream < 2**24):
            check.integer(0, 2**32 - 1, step=step)
            check.integer(0, 2**24 - 1, stream=stream)
        if not self._secret:
            raise PrivacyError(
                "key",
                expected="a live key",
                got="a wiped one",
                remedy="Make a new Key; a wiped one cannot come back.",
            )
        if self.unsafe_seed is None and os.getpid() != self._process:
            # Parent and child would otherwise add the same noise to different data.
            self._secret[:] = os.urandom(KEY_BYTES)
            self._process = os.getpid()
        return bytes(self._secret), (int(purpose) << 24) | stream, step, self.rounds

    def __reduce__(self) -> tuple[Any, ...]:
        """Refuse copies and pickles: a copied key would add the same noise to different data."""
        if self.seeded:
            return Key.from_unsafe_seed, (self.unsafe_seed, self.rounds)
        raise PrivacyError(
            "key",
            expected="a key that stays where it was made",
            got="a copy or a pickle",
            remedy="Make another one with Key.fresh(); checkpoints need no key.",
        )

    def wipe(self) -> None:
        """Overwrite and forget the key."""
        self._secret[:] = bytes(len(self._secret))
        self._secret.clear()

    def __repr__(self) -> str:
        origin = f"unsafe_seed={self.unsafe_seed}" if self.seeded else "operating system"
        return f"Key({origin}, rounds={self.rounds})"
