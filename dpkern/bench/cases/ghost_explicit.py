"""Norms, clip factors and weighted sums of per-sample gradients that are materialized."""

from __future__ import annotations

import math
from dataclasses import replace

from ..case import Facts
from ._shared import WHOLE

KEPT = {
    "tiny": {"B": 8, "*P": [(16,), (3, 4)]},
    "typical": {"B": 64, "*P": [(512,), (64, 32), (128,)]},
    "large": {"B": 256, "*P": [(256, 256), (256,)]},
}
"""A batch of so many gradients, and their shapes."""

FACTS = {
    "ghost.clip_factors": Facts(
        examples=({"max_grad_norm": 1.0}, {"max_grad_norm": math.inf, "automatic": False}),
        positive=frozenset({"*P"}),
        usual={"max_grad_norm": 1.0, "scale": 1.0},
        timed={"tiny": {"B": 8}, "typical": {"B": 256}, "large": {"B": 16_384}},
    ),
    "ghost.contract": Facts(timed=KEPT),
    "ghost.explicit_integer_sum": replace(WHOLE, timed=KEPT),
    "ghost.explicit_norm": Facts(timed=KEPT),
}
