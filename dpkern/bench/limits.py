"""Bound what a call can reach: plain torch code that moves or computes as much, beside it.

The limit is sampled in the same rounds as the op, on as many threads, and on as many bytes: an op
whose operands stay in a cache is compared with a copy that stays there too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..base.op_cost import Cost

PRODUCT = 16.0
"""Operations per byte from which a call is compared with a product of matrices."""
READ = 4
"""Bytes read per byte written from which a call is compared with a sum instead of a copy."""


@dataclass(frozen=True)
class Limit:
    """Work that bounds a call.

    Attributes:
        kind: ``copy`` of as many bytes, ``read`` (a sum) of them, or ``product`` of two matrices
            with as many operations.
        run: does it once.
        share: of the call's bytes or operations that it does.
    """

    kind: str
    run: Callable[[], Any]
    share: float


def limit_of(cost: Cost, device: torch.device) -> Limit:
    """Return the limit of a call that costs this."""
    moved = max(cost.bytes, 8)
    if cost.flops > PRODUCT * moved:
        side = max(1, round((cost.flops / 2) ** (1 / 3)))
        a, b = (torch.ones(side, side, device=device) for _ in range(2))
        made = torch.empty(side, side, device=device)
        return Limit("product", lambda: torch.mm(a, b, out=made), 2 * side**3 / cost.flops)
    if cost.bytes_read > READ * cost.bytes_written:
        source = torch.ones(max(1, moved // 4), device=device)
        return Limit("read", source.sum, 4 * source.numel() / moved)
    source = torch.ones(max(1, moved // 8), device=device)
    target = torch.empty_like(source)
    return Limit("copy", lambda: target.copy_(source), 8 * source.numel() / moved)
