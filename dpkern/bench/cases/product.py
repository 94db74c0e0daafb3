"""Products of matrices."""

from __future__ import annotations

from ..case import Facts

FACTS = {
    "product.matmul": Facts(
        samples="N",
        timed={
            "tiny": {"N": 8, "K": 16, "M": 16},
            "typical": {"N": 256, "K": 256, "M": 256},
            "large": {"N": 1024, "K": 768, "M": 768},
        },
    ),
}
