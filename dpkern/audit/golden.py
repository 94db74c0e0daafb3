"""Compare a backend with the committed vectors of the noise generator.

``golden_noise.txt`` holds keystream blocks of RFC 8439 and of the published vectors for 12 and 8
rounds, and draws and noisy sums of both laws. Every backend must give every value bit for bit.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ..base.rng import Stream
from ..ops import noise

FILE = Path(__file__).with_name("golden_noise.txt")
ROUNDING_NONCE = 0x01000000
_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


@dataclass(frozen=True)
class Vector:
    """One line of the file.

    Attributes:
        number: number of the line.
        kind: ``keystream``, ``LAW``, ``LAW:sha256``, ``LAW:TYPE`` or ``LAW:TYPE:SCALE``.
        stream: the keystream.
        position: position of the first value.
        values: the values in the file's own words.
    """

    number: int
    kind: str
    stream: Stream
    position: int
    values: tuple[str, ...]

    def __str__(self) -> str:
        return f"line{self.number}-{self.kind}-{self.stream.rounds}"

    @property
    def law(self) -> str:
        """The noise law, or ``keystream``."""
        return self.kind.split(":")[0]

    @property
    def rounding(self) -> Stream:
        """The stream that rounds float sums."""
        key, n0, n1, rounds = self.stream.packed()
        return Stream(key, n0 + ROUNDING_NONCE, n1, rounds)


@cache
def vectors() -> tuple[Vector, ...]:
    """Read all lines of the file."""
    found = []
    for number, text in enumerate(FILE.read_text().splitlines(), start=1):
        if not text or text.startswith("#"):
            continue
        kind, rounds, key, n0, n1, position, *values = text.split()
        stream = Stream(bytes.fromhex(key), int(n0, 16), int(n1, 16), int(rounds))
        found.append(Vector(number, kind, stream, int(position), tuple(values)))
    return tuple(found)


def digest(draws: torch.Tensor) -> str:
    """Return the first 12 bytes of the SHA-256 of draws as little-endian int32, in hexadecimal."""
    words = draws.cpu().numpy().astype("<i4")
    return hashlib.sha256(words.tobytes()).hexdigest()[:24]


def answers(vector: Vector, backend: str, device: str = "cpu") -> tuple[str, ...]:
    """Return what a backend gives for a line, in the file's words.

    Args:
        vector: the line.
        backend: name of the backend.
        device: device of its tensors.

    Raises:
        BackendError: a backend that cannot run them there.
    """
    given: dict[str, Any] = {"device": device, "backend": backend}
    match vector.kind.split(":"):
        case ["keystream"]:
            words = noise.keystream(
                vector.stream, first_block=vector.position, blocks=len(vector.values), **given
            )
            blocks = words.cpu().view(-1, 16).numpy().astype("<i4")
            return tuple(block.tobytes().hex() for block in blocks)
        case [_]:
            return tuple(map(str, _draws(vector, len(vector.values), given).tolist()))
        case [_, "sha256"]:
            return (vector.values[0], digest(_draws(vector, int(vector.values[0]), given)))
        case [_, kind]:
            sums = [int(pair.split(":")[0]) for pair in vector.values]
            x = torch.tensor(sums, dtype=getattr(torch, kind))
            released = _noisy(vector, x.to(device), backend).tolist()
            return tuple(f"{v}:{y}" for v, y in zip(sums, released, strict=True))
        case [_, kind, scale]:
            shown = [pair.split(":")[0] for pair in vector.values]
            x = _of_bits(shown, getattr(torch, kind)).to(device)
            released = _to_bits(_noisy(vector, x, backend, float(scale)).cpu())
            return tuple(f"{a}:{b}" for a, b in zip(shown, released, strict=True))
    raise AssertionError(f"{vector}: unknown kind")


def _draws(vector: Vector, count: int, given: dict[str, Any]) -> torch.Tensor:
    return noise.lattice_draws(
        vector.stream, position=vector.position, count=count, distribution=vector.law, **given
    )


def _noisy(
    vector: Vector, x: torch.Tensor, backend: str, scale: float | None = None
) -> torch.Tensor:
    return noise.add_noise(
        x,
        stream=vector.stream,
        position=vector.position,
        distribution=vector.law,
        scale=scale,
        rounding=None if scale is None else vector.rounding,
        backend=backend,
    )


def _of_bits(shown: list[str], kind: torch.dtype) -> torch.Tensor:
    """Convert hexadecimal bits to floats."""
    width = 4 * len(shown[0])
    signed = [(int(bits, 16) ^ 1 << width - 1) - (1 << width - 1) for bits in shown]
    return torch.tensor(signed, dtype=_BITS[kind]).view(kind)


def _to_bits(values: torch.Tensor) -> list[str]:
    """Convert floats to hexadecimal bits."""
    digits = 2 * values.element_size()
    mask = (1 << 4 * digits) - 1
    return [f"{bits & mask:0{digits}x}" for bits in values.view(_BITS[values.dtype]).tolist()]


__all__ = ["FILE", "ROUNDING_NONCE", "Vector", "answers", "digest", "vectors"]
