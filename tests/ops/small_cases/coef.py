"""The cases of noisy coefficients of polynomial losses, and of the losses themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dpkern.base.rng import Key, Purpose
from dpkern.ops import coef, noise

from .values import random_values


@dataclass(frozen=True, kw_only=True)
class CoefCase:
    """A case of noisy coefficients of a polynomial loss.

    Attributes:
        rows, columns: of the targets; each has two coefficients.
        loss: evaluate loss and slope, nothing else is written; else the coefficients.
        ahead: the noise was made before, so that the memory sets the pace.
    """

    rows: int
    columns: int
    form: str = "printed"
    loss: bool = False
    ahead: bool = False
    scaled: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def name(self) -> str:
        """A readable identifier."""
        kind = f"{'loss' if self.loss else 'perturb'}-{self.form}"
        kind += ("-ahead" if self.ahead else "") + ("-scaled" if self.scaled else "")
        dtype = str(self.dtype).removeprefix("torch.")
        return f"coef-{kind}-{dtype}-{self.rows}x{self.columns}"

    def _tensors(self) -> tuple[torch.Tensor, ...]:
        """Return logits (of the loss only) and targets."""
        shape = (self.rows, self.columns)
        x = torch.rand(shape, generator=torch.Generator().manual_seed(1), dtype=self.dtype)
        return (random_values(shape, self.dtype, 2), x) if self.loss else (x,)

    def _arguments(self) -> dict[str, Any]:
        key, first = Key.from_unsafe_seed(0), 100
        stream, rounding = key.stream(Purpose.LAPLACE, 1), key.stream(Purpose.ROUNDING, 1)
        draws = None
        if self.ahead:
            n = self.rows * self.columns
            place = {"position": first, "count": coef.quadratic_position(first, n) + n - first}
            values = noise.lattice_draws(stream, distribution="laplace", **place)
            draws = coef.Draws(first, values, noise.rounding_bits(rounding, **place))
        scale = torch.linspace(0.5, 2, self.rows) if self.scaled else 1.5
        given = {"scale": scale, "stream": stream, "rounding": rounding, "position": first}
        return {"form": self.form, "noise": coef.Noise(draws=draws, **given)}

    def _op(self) -> Any:
        return coef.quadratic if self.loss else coef.perturb

    def expected(self) -> tuple[torch.Tensor, ...]:
        """Return what the reference makes of the case."""
        return self._made("reference")

    def _made(self, backend: str | None) -> tuple[torch.Tensor, ...]:
        return self._op()(*self._tensors(), backend=backend, **self._arguments())

    def verify(self, backend: str | None = None) -> None:
        """Check that the backend gives the reference's bits.

        Raises:
            AssertionError: it does not.
        """
        got, want = self._made(backend), self.expected()
        for mine, theirs in zip(got, want, strict=True):
            if not torch.equal(mine, theirs):
                raise AssertionError(f"{self.name}: {int((mine != theirs).sum())} values differ")


@dataclass(frozen=True, kw_only=True)
class FeatureCase:
    """A case of the loss whose H + H^2 noisy coefficients of each class are never written.

    Attributes:
        records, classes, width: of the targets and the hidden layer.
    """

    records: int
    classes: int
    width: int
    scaled: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def name(self) -> str:
        """A readable identifier."""
        dtype = str(self.dtype).removeprefix("torch.") + ("-scaled" if self.scaled else "")
        return f"coef-expanded-{dtype}-{self.records}x{self.classes}x{self.width}"

    def _tensors(self) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(1)
        shape = (self.records, self.width)
        hidden = torch.rand(shape, generator=generator, dtype=self.dtype)
        labels = torch.randint(self.classes, (self.records,), generator=generator)
        one_hot = torch.nn.functional.one_hot(labels, self.classes).to(self.dtype)
        return hidden, one_hot, random_values((self.classes, self.width), self.dtype, 2)

    def _noise(self) -> coef.Noise:
        key = Key.from_unsafe_seed(0)
        scale = torch.linspace(0.5, 2, self.records) if self.scaled else 1.5
        given = {"stream": key.stream(Purpose.LAPLACE, 1), "position": 100}
        return coef.Noise(scale=scale, rounding=key.stream(Purpose.ROUNDING, 1), **given)

    def expected(self) -> tuple[torch.Tensor, ...]:
        """Return what the reference makes of the case."""
        return self._made("reference")

    def _made(self, backend: str | None) -> tuple[torch.Tensor, ...]:
        return coef.expanded(*self._tensors(), noise=self._noise(), backend=backend)

    def verify(self, backend: str | None = None) -> None:
        """Check that the backend gives the reference's bits.

        Raises:
            AssertionError: it does not.
        """
        got, want = self._made(backend), self.expected()
        for mine, theirs in zip(got, want, strict=True):
            if not torch.equal(mine, theirs):
                raise AssertionError(f"{self.name}: {int((mine != theirs).sum())} values differ")


SMALL = (
    *(
        CoefCase(rows=9, columns=170, form=form, loss=loss, scaled=loss, dtype=dtype)
        for form in coef.FORMS
        for loss in (False, True)
        for dtype in (torch.float32, torch.float64)
    ),
    *(
        FeatureCase(records=18, classes=3, width=19, scaled=scaled, dtype=dtype)
        for scaled, dtype in ((False, torch.float32), (True, torch.float64))
    ),
)
