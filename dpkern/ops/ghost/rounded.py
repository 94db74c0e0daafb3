"""Per-sample gradients of linear layers that are kept in their operands' own dtype.

Half the memory and half the traffic of float32 where operands have 16 bits. The norm is that of the
rounded numbers, which are what is clipped and summed: rounding can lift no sample above its bound.
Training in 16 bits rounds the gradient of a whole batch as often.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...base.dispatch import op
from ...base.signature import Double, Operand, Sum, written
from ._bounds import of_sums, squares


@op()
@torch.no_grad()
def rounded_gradient(
    a: Operand[Tensor, "B T d"], g: Operand[Tensor, "B T p"]
) -> tuple[Operand[Tensor, "grads: B p d"], Double[Tensor, "squares: B"]]:
    """Materialize ``sum_t g[b,t,:] outer a[b,t,:]``, rounded to the operands' dtype at last.

    Args:
        a: layer inputs ``[B, T, d]``, float32, float64, bfloat16 or float16.
        g: output gradients ``[B, T, p]``, same dtype.

    Returns:
        ``grads`` ``[B, p, d]`` of the inputs' dtype, contiguous, and float64 squared norms ``[B]``
        of these rounded numbers: never below their true squares, above them by at most 1e-4 of it;
        not finite for a sample with NaN or inf, or with an entry that the dtype does not hold (in
        float16 from 65520 on). T = 0 gives zeros.

    Raises:
        InvalidInput: wrong type, shape, dtype, device or layout.
    """
    kind = of_sums(a.dtype)
    grads = torch.bmm(g.to(kind).transpose(1, 2), a.to(kind)).to(a.dtype)
    return grads, squares(grads)


@op()
@torch.no_grad()
def rounded_sum(
    grads: Sequence[Operand[Tensor, "B *P"]],
    factors: Sum[Tensor, "B"],
    outs: Sequence[Sum[Tensor, "*P", written]],
) -> None:
    """Add weighted sums of such gradients in place: ``outs[i] += sum_b factors[b] grads[i][b]``.

    Args:
        grads: tensors ``[B, *shape_i]``, float32, float64, bfloat16 or float16.
        factors: ``[B]``, same dtype (16-bit gradients: float32). A sample of factor 0 contributes
            nothing, NaN or not.
        outs: ``[*shape_i]``, dtype of the factors, contiguous, no two sharing memory, added to.
            Sums are made in that dtype.

    Raises:
        InvalidInput: no list, or wrong type, shape, dtype, device or layout.
    """
    used = factors != 0
    for part, out in zip(grads, outs, strict=True):
        out.add_(torch.tensordot(factors[used], part[used].to(out.dtype), dims=1))


__all__ = ["rounded_gradient", "rounded_sum"]
