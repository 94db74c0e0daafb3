"""The cases of noise added to integers and floats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dpkern.base.rng import Key, Purpose
from dpkern.ops import noise

from .values import random_values


@dataclass(frozen=True, kw_only=True)
class NoiseCase:
    """A case of noise on ``count`` coordinates."""

    count: int
    dtype: torch.dtype = torch.int32
    distribution: str = "gaussian"
    rounds: int = 20

    @property
    def name(self) -> str:
        """A readable identifier."""
        law = f"{self.distribution}{self.rounds}"
        return f"noise-{law}-{str(self.dtype).removeprefix('torch.')}-{self.count}"

    def _arguments(self) -> dict[str, Any]:
        key = Key.from_unsafe_seed(0, self.rounds)
        purpose = Purpose.NOISE if self.distribution == "gaussian" else Purpose.LAPLACE
        given: dict[str, Any] = {
            "stream": key.stream(purpose, 1),
            "distribution": self.distribution,
            "position": 512,
        }
        if self.dtype in noise.FLOATS:
            given |= {"scale": 1.5, "rounding": key.stream(Purpose.ROUNDING, 1)}
        return given

    def _input(self) -> torch.Tensor:
        return (random_values((self.count,), torch.float32, 1) * 1000).to(self.dtype)

    def expected(self) -> torch.Tensor:
        """Return what the reference makes of the case."""
        return self._noisy("reference")

    def _noisy(self, backend: str | None) -> torch.Tensor:
        return noise.add_noise(self._input(), backend=backend, **self._arguments())

    def verify(self, backend: str | None = None) -> None:
        """Check that the backend gives the reference's bits.

        Raises:
            AssertionError: it does not.
        """
        got, want = self._noisy(backend), self.expected()
        if not torch.equal(got, want):
            raise AssertionError(f"{self.name}: {int((got != want).sum())} values differ")


SMALL = (
    *(
        NoiseCase(count=count, dtype=dtype, distribution=law)
        for law in ("gaussian", "laplace")
        for dtype in (torch.int32, torch.int64, torch.float32, torch.float64)
        for count in (0, 1, 511, 5000)
    ),
    *(NoiseCase(count=3000, rounds=rounds) for rounds in (12, 8)),
)
