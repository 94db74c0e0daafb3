"""Calls of ``coef.descend``, and what they leave."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dpkern.ops import coef

STEPS, RECORDS = 6, 9


def made(
    shape: tuple[int, ...], *, dtype: torch.dtype = torch.float32, noise: str = "growing"
) -> dict[str, Any]:
    """Arguments of a call; ``noise``: growing, constant or none."""
    runs, users, n, code = shape
    generator = torch.Generator().manual_seed(sum(shape))
    kind: dict[str, Any] = {"generator": generator, "dtype": dtype}
    found = {
        "encoder": torch.randn(runs, users, n, code, **kind),
        "decoder": torch.randn(runs, users, code, n, **kind),
        "stopped": torch.zeros(runs, dtype=torch.int32),
        "inputs": torch.rand(1, RECORDS, n, **kind),
        "targets": torch.rand(runs, RECORDS, n, **kind),
        "order": torch.randint(RECORDS, (runs, STEPS, users), generator=generator),
        "form": "printed",
        "lr": 0.05,
        "constant": 0.5,
    }
    if noise != "none":
        size = (runs, STEPS, 2, users, n)
        drawn = torch.randint(-(1 << 16), 1 << 16, size, generator=generator)
        bits = torch.randint(-(1 << 15), 1 << 15, size, generator=generator)
        found |= {"draws": drawn.int(), "rounding": bits.short(), "scale": 0.7}
    return found | ({"growth": 0.3} if noise == "growing" else {})


def run(given: dict[str, Any], backend: str | None = None) -> Tensor:
    """Weights and marks after the call, of each run."""
    own = {k: v.clone() if isinstance(v, Tensor) else v for k, v in given.items()}
    coef.descend(**own, backend=backend)
    parts = (own[name].flatten(1) for name in ("encoder", "decoder"))
    return torch.cat([*parts, own["stopped"][:, None]], 1)
