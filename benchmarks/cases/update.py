"""The cases of noise, division and an optimizer step in one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dpkern.base.rng import Key, Purpose
from dpkern.ops import noise, update
from dpkern.ops.testing import assert_close

from .work import Work, random_values

RULES: dict[str, update.Rule] = {
    "sgd": update.SGD(lr=0.1),
    "momentum": update.SGD(lr=0.1, momentum=0.9, dampening=0.1, weight_decay=1e-3),
    "nesterov": update.SGD(lr=0.1, momentum=0.9, nesterov=True),
    "adam": update.Adam(lr=1e-3, weight_decay=1e-3),
    "adamw": update.AdamW(lr=1e-3),
}


@dataclass(frozen=True, kw_only=True)
class UpdateCase:
    """A case of noise, division and an optimizer step.

    Beside it stand ``normal_``, ``add_`` and torch's own rule.
    """

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

    def work(self, backend: str | None = None) -> Work:
        """Allocate buffers, and return callables for timing."""
        params, sums = self._tensors()
        rule, drawn = RULES[self.rule], self._noise()
        state = rule.init(params)
        given: dict[str, Any] = {
            "rule": rule,
            "state": state,
            "noise": drawn,
            "gradient_scale": 1 / 64,
        }
        return Work(
            ours=lambda: update.step(params, sums, backend=backend, **given),
            torch=self._formulation(),
            cost=update.step.cost(params, sums, **given),
        )

    def _formulation(self) -> Callable[[], None]:
        """Return torch's form: one preallocated buffer for the noise, a fused optimizer."""
        params, _ = self._tensors()
        leaves = [torch.nn.Parameter(p) for p in params]
        sums = [random_values((s,), self.dtype, s + 1) for s in self.sizes]
        buffers = [torch.empty_like(p) for p in params]
        rule = RULES[self.rule]

        def noisy() -> None:
            for z, g in zip(buffers, sums, strict=True):
                if self.noise:
                    z.normal_().add_(g)
                else:
                    z.copy_(g)

        if rule == update.SGD(lr=rule.lr):

            def plain() -> None:
                noisy()
                for p, z in zip(params, buffers, strict=True):
                    p.add_(z, alpha=-rule.lr / 64)

            return plain
        optimizer = torch_optimizer(rule, leaves)
        for leaf, z in zip(leaves, buffers, strict=True):
            leaf.grad = z

        def stepped() -> None:
            noisy()
            for z in buffers:
                z.mul_(1 / 64)
            optimizer.step()

        return stepped

    def expected(self) -> list[torch.Tensor]:
        """Return the parameters after the reference's two steps."""
        return self._stepped("reference")

    def _stepped(self, backend: str | None) -> list[torch.Tensor]:
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
        for i, (a, b) in enumerate(zip(self._stepped(backend), self.expected(), strict=True)):
            assert_close(f"{self.name} params[{i}]", a, b, tolerance)


def torch_optimizer(rule: update.Rule, params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return torch's optimizer of the same meaning, in its fused form."""
    if isinstance(rule, update.SGD):
        return torch.optim.SGD(
            params,
            lr=rule.lr,
            momentum=rule.momentum,
            dampening=rule.dampening,
            nesterov=rule.nesterov,
            weight_decay=rule.weight_decay,
            fused=True,
        )
    kind = torch.optim.AdamW if rule.decoupled else torch.optim.Adam
    return kind(
        params,
        lr=rule.lr,
        betas=rule.betas,
        eps=rule.eps,
        weight_decay=rule.weight_decay,
        fused=True,
    )


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

LARGE = (
    *(UpdateCase(sizes=(10_000_000,), rule="sgd", sums=sums) for sums in (_I32, _F32)),
    *(UpdateCase(sizes=(10_000_000,), rule="adam", sums=sums) for sums in (_I32, _F32)),
    UpdateCase(sizes=(10_000_000,), rule="adam", sums=_F32, noise=False),
    UpdateCase(sizes=(1000,) * 1000, rule="momentum", sums=_I32),
)
