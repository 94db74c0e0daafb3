"""Norms and clipped sums of gradients that are there."""

from __future__ import annotations

from typing import Any

import torch

from ..case import Call, Facts
from ._shared import F32, F64


def _totals(call: Call) -> list[torch.Tensor]:
    dtype = torch.float64 if call.wide else torch.float32
    grads = call.args["grads"]
    each = [grads] if isinstance(grads, torch.Tensor) else grads
    return [torch.zeros(g.shape[1:], dtype=dtype) for g in each]


def _integers(call: Call) -> list[torch.Tensor]:
    return [total.to(torch.int64) for total in _totals(call)]


ROWS: dict[str, dict[str, Any]] = {
    "tiny": {"B": 8, "*P": [(33,), (8,)]},
    "typical": {"B": 256, "*P": [(10_000,)]},
    "large": {"B": 256, "*P": [(100_000,)]},
}
"""A batch of so many gradients, and their shapes."""
BOUND = 1.5
EXACT = {"arithmetic": "exact", "unit": BOUND * 2.0**-20, "out": _integers}

FACTS = {
    "clip.clip_sum": Facts(
        examples=(
            {"max_grad_norm": 1.5, "style": "flat"},
            {"max_grad_norm": 1.5, "style": "automatic"},
            {"max_grad_norm": [1.5], "style": "per_layer", "*P": [(40,)]},
        ),
        options={"arithmetic": ("float",)},
        changes=frozenset({"out"}),
        samples="",
        bounds={F32: 1e-5, F64: 1e-12, torch.bfloat16: 1e-5},
        rounded_alike=lambda given: given.get("arithmetic") == "exact",
        usual={"max_grad_norm": BOUND, "out": _totals},
        timed={
            **ROWS,
            "typical, exact": ROWS["typical"] | EXACT,
            "large, exact": ROWS["large"] | EXACT,
        },
    ),
    "clip.sample_norm": Facts(bounds={F32: 1e-12, F64: 1e-12, torch.bfloat16: 1e-12}, timed=ROWS),
}
