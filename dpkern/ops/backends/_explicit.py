"""Sum weighted gradients whose entries lie in another order than those of their sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...base.kernel import Kernel
from ...base.memory import memory_order
from ...base.schema import BoundCall


def contract(compiled: Kernel) -> Kernel:
    """Run the compiled kernel of ``ghost.contract``, for gradients in any order of their entries.

    It adds in the gradients' order, to zeros where that is not the sum's, which are put right and
    added at last.
    """

    def run(bound: BoundCall) -> None:
        grads, factors, outs = bound.args
        if all(part.is_contiguous() for part in grads):
            compiled.run(bound)
            return
        flat = [
            out if part.is_contiguous() else torch.zeros_like(out).view(-1)
            for part, out in zip(grads, outs, strict=True)
        ]
        compiled.run(bound._replace(args=(grads, factors, flat)))
        _turn(grads, outs, flat)

    return Kernel(run, compiled.refuse, compiled.direct)  # which sees to contiguous ones only


@torch.no_grad()
def _turn(grads: Sequence[Any], outs: Sequence[Any], flat: Sequence[Any]) -> None:
    for part, out, total in zip(grads, outs, flat, strict=True):
        if total is not out:
            order = [i - 1 for i in memory_order(part)]
            out.permute(order).add_(total.view([out.shape[i] for i in order]))


__all__ = ["contract"]
