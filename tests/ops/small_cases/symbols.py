"""The cases of randomized response on arrays of symbols."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dpkern.base.rng import Key, Purpose
from dpkern.ops import symbols
from dpkern.ops.testing import assert_close
from dpkern.privacy.mechanisms import RandomizedResponse


@dataclass(frozen=True, kw_only=True)
class SymbolCase:
    """A case of randomized response on ``count`` symbols."""

    count: int
    categories: int = 2
    dtype: torch.dtype = torch.uint8

    @property
    def name(self) -> str:
        """A readable identifier."""
        kind = str(self.dtype).removeprefix("torch.")
        return f"symbols-{self.categories}-{kind}-{self.count}"

    def _input(self) -> torch.Tensor:
        return (torch.arange(self.count) % self.categories).to(self.dtype)

    def _arguments(self) -> dict[str, Any]:
        mechanism = RandomizedResponse(epsilon=1.0, categories=self.categories)
        stream = Key.from_unsafe_seed(0).stream(Purpose.SYMBOLS, 1)
        return {"stream": stream, "keep": mechanism.keep, "categories": self.categories}

    def expected(self) -> torch.Tensor:
        """Return what the reference makes of the case."""
        return self._randomized("reference")

    def _randomized(self, backend: str | None) -> torch.Tensor:
        return symbols.randomize(self._input(), position=13, backend=backend, **self._arguments())

    def verify(self, backend: str | None = None) -> None:
        """Check that the symbols are those of the reference.

        Raises:
            AssertionError: they are not.
        """
        got, wanted = self._randomized(backend), self.expected()
        assert_close(self.name, got.double(), wanted.double(), 0.0)


SMALL = (SymbolCase(count=3000), SymbolCase(count=3000, categories=10, dtype=torch.int64))
