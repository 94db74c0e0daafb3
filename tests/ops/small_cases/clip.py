"""The cases of norms and clipped sums of gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dpkern.ops import clip
from dpkern.ops.testing import assert_close

from .values import random_values


@dataclass(frozen=True, kw_only=True)
class ClipCase:
    """A case of norms and clipped sum of ``batch`` gradients."""

    batch: int
    columns: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    style: str = "flat"
    arithmetic: str = "float"
    p: int = 2

    @property
    def name(self) -> str:
        """A readable identifier."""
        shape = "+".join(str(c) for c in self.columns)
        kind = f"{self.style}-{self.arithmetic}-l{self.p}"
        return f"clip-{kind}-{str(self.dtype).removeprefix('torch.')}-{self.batch}x{shape}"

    def _gradients(self) -> list[torch.Tensor]:
        return [random_values((self.batch, c), self.dtype, c) for c in self.columns]

    def _arguments(self) -> dict[str, Any]:
        n = len(self.columns)
        bound, unit = 1.5, 1.5 * 2.0**-20
        each = self.style == "per_layer"
        given: dict[str, Any] = {"style": self.style, "arithmetic": self.arithmetic, "p": self.p}
        given["max_grad_norm"] = [bound] * n if each else bound
        if self.arithmetic == "exact":
            given["unit"] = [unit] * n if each else unit
        return given

    def expected(self) -> clip.ClipResult:
        """Return what the reference makes of the case."""
        return self._clipped("reference", wide=self.arithmetic != "exact")

    def _clipped(self, backend: str | None, *, wide: bool = False) -> clip.ClipResult:
        grads = [g.double() if wide else g for g in self._gradients()]
        return clip.clip_sum(grads, backend=backend, **self._arguments())

    def verify(self, backend: str | None = None) -> None:
        """Check that norms and sums agree with the float64 reference; exact sums to the last bit.

        Raises:
            AssertionError: they do not.
        """
        got, want = self._clipped(backend), self.expected()
        assert_close(f"{self.name} norms", got.norms, want.norms, 1e-12)
        tolerance = {torch.float64: 1e-12}.get(self.dtype, 1e-5)
        for i, (a, b) in enumerate(zip(got.sums, want.sums, strict=True)):
            exact = self.arithmetic == "exact"
            assert_close(f"{self.name} sums[{i}]", a, b, 0.0 if exact else tolerance)


SMALL = (
    *(
        ClipCase(batch=7, columns=columns, dtype=dtype, style=style, arithmetic=arithmetic, p=p)
        for columns in ((33,), (5000, 1, 70))
        for dtype in (torch.float32, torch.float64, torch.bfloat16)
        for style in clip.STYLES
        for arithmetic in clip.ARITHMETIC
        for p in (1, 2)
    ),
    ClipCase(batch=0, columns=(10,)),
    ClipCase(batch=1, columns=(1,), arithmetic="exact"),
    ClipCase(batch=37, columns=(9000, 31)),
    ClipCase(batch=37, columns=(9000, 31), arithmetic="exact"),
)
