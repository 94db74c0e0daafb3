"""The cases of noise, division and an optimizer step in one call."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dpkern.base.rng import Key, Purpose
from dpkern.ops import noise, update
from dpkern.ops.testing import assert_close

from .values import random_values

RULES: dict[str, update.Rule] = {
    "sgd": update.SGD(lr=0.1),
    "momentum": update.SGD(lr=0.1, momentum=0.9, dampening=0.1, weight_decay=1e-3),
    "nesterov": update.SGD(lr=0.1, momentum=0.9, nesterov=True),
    "adam": update.Adam(lr=1e-3, weight_decay=1e-3),
    "adamw": update.AdamW(lr=1e-3),
}


@dataclass(frozen=True, kw_only=True)
class UpdateCase:
    """A case of noise, division and an optimizer step."""

    sizes: tuple[int, ...]
    rule: str = "sgd"
    sums: torch.dtype = torch.int32
    dtype: torch.dtype = torch.float32
    noise: bool = True
    rounds: int = 20

    @property
    def name(self) -> str:
        """A readable identifier."""
        kind = str(self.sums).removeprefix("torch.") if self.noise else "no-noise"
        where = "" if self.dtype is torch.float32 else "-float64"
        alike = len(set(self.sizes)) == 1 and len(self.sizes) > 1
        shape = f"{len(self.sizes)}x{self.sizes[0]}" if alike else "+".join(map(str, self.sizes))
        return f"update-{self.rule}-{kind}{where}-{shape}"

    def _tensors(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        params = [random_values((s,), self.dtype, s) for s in self.sizes]
        spread = 1e5 if self.sums in noise.INTEGERS else 1.0
        sums = [
            (random_values((s,), torch.float64, s + 1) * spread).to(self.sums) for s in self.sizes
        ]
        return params, sums

    def _noise(self) -> update.Noise | None:
        if not self.noise:
            return None
        positions, following = [], 0
        for size in self.sizes:
            positions.append(following)
            following += -(-size // 512) * 512
        key = Key.from_unsafe_seed(0, self.rounds)
        return update.Noise(
            distribution="gaussian",
            scales=tuple(1.0 + i for i in range(len(self.sizes))),
            stream=key.stream(Purpose.NOISE, 1),
            positions=tuple(positions),
            rounding=key.stream(Purpose.ROUNDING, 1),
        )

    def expected(self) -> list[torch.Tensor]:
        """Return the parameters after the reference's two steps."""
        return self.stepped("reference")

    def stepped(self, backend: str | None) -> list[torch.Tensor]:
        """Return the parameters after two steps."""
        params, sums = self._tensors()
        rule = RULES[self.rule]
        state = rule.init(params)
        for _ in range(2):
            update.step(
                params,
                sums,
                rule=rule,
                state=state,
                gradient_scale=1 / 64,
                noise=self._noise(),
                backend=backend,
            )
        return params

    def verify(self, backend: str | None = None) -> None:
        """Check that two steps agree with the reference.

        Raises:
            AssertionError: they do not.
        """
        tolerance = 1e-6 if self.dtype is torch.float32 else 1e-14
        for i, (a, b) in enumerate(zip(self.stepped(backend), self.expected(), strict=True)):
            assert_close(f"{self.name} params[{i}]", a, b, tolerance)


_F32, _F64, _I32, _I64 = torch.float32, torch.float64, torch.int32, torch.int64

SMALL = (
    # Most of what an interpreted kernel takes is its rounds; those of a whole cipher are in "sgd".
    *(
        UpdateCase(sizes=(1025, 1), rule=rule, sums=sums, rounds=20 if rule == "sgd" else 8)
        for rule in RULES
        for sums in (_I32, _I64, _F32)
    ),
    *(UpdateCase(sizes=(1000, 77), rule=rule, sums=_F64, dtype=_F64, rounds=8) for rule in RULES),
    *(UpdateCase(sizes=(1000, 77), rule=rule, sums=_F32, noise=False) for rule in RULES),
)
