"""A subject whose law is known; processes that audit it import this file and nothing besides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dpkern.audit import Claim, GaussianDP, Pair, Subject
from dpkern.audit.canaries import directions

GRID = 2.0**-12
MU_1 = GaussianDP(1.0)


@dataclass(frozen=True)
class Noisy(Subject):
    """``data`` plus noise on a grid: what an audit should find is known."""

    name: str = "noisy"
    claimed: Claim = MU_1
    certified: Claim = MU_1
    sd: tuple[float, ...] = (1.0,) * 6
    law: str = "gaussian"
    stated: float | None = 1.0

    def release(self, data: Any, runs: int, seed: int) -> torch.Tensor:
        generator = np.random.default_rng(seed)
        draw = generator.standard_normal if self.law == "gaussian" else generator.laplace
        shape = (runs, len(self.sd))
        noise = draw(shape) if self.law == "gaussian" else draw(size=shape)
        values = data + torch.from_numpy(noise) * torch.tensor(self.sd, dtype=torch.float64)
        return (values / GRID).round() * GRID

    def pairs(self, weakest: torch.Tensor | None) -> Sequence[Pair]:
        nothing = torch.zeros(len(self.sd), dtype=torch.float64)
        found = directions(len(self.sd), weakest=weakest)
        return [Pair(name=k, without=nothing, present=v) for k, v in found.items()]

    def noise_sd(self) -> float | None:
        return self.stated
