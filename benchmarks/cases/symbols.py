"""The cases of randomized response on arrays of symbols."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dpkern.base.rng import Key, Purpose
from dpkern.ops import symbols
from dpkern.ops.testing import assert_close
from dpkern.privacy.mechanisms import RandomizedResponse

from .work import Work


@dataclass(frozen=True, kw_only=True)
class SymbolCase:
    """A case of randomized response on ``count`` symbols, beside torch's coins.

    Their odds are rounded.
    """

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

    def work(self, backend: str | None = None) -> Work:
        """Allocate buffers, and return callables for timing."""
        x, given = self._input(), self._arguments()
        u, lie, out = torch.empty(self.count), torch.empty_like(x), torch.empty_like(x)
        truth = given["keep"] / 2**64

        def formulation() -> None:
            lie.random_(1, self.categories)
            torch.where(u.uniform_() < truth, x, (x + lie) % self.categories, out=out)

        return Work(
            ours=lambda: symbols.randomize(x, backend=backend, **given),
            torch=formulation,
            cost=symbols.randomize.cost(x, **given),
        )

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

LARGE = (SymbolCase(count=4_000_000), SymbolCase(count=4_000_000, categories=10))
