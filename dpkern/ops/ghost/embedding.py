"""Embedding tables: the gradient of sample b has row ``sum of g[b,t,:] over t with ids[b,t] = v``.

B samples of T ids, embeddings of D features, V rows in the table.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...base import validate as check
from ...base.dispatch import op
from ...base.errors import InvalidInput
from ...base.signature import Double, Float, Index, Int32, Int64, Operand, Sum, written
from ._bounds import gamma, integers, sum_error, upper_square


def _check_range(ids: Tensor, rows: int) -> None:
    if not ids.numel():
        return
    least, largest = ids.aminmax()
    # The common case takes no further op of torch.
    if ids.is_cpu and int(least) >= 0 and int(largest) < rows:
        return
    check.hold(
        (least >= 0) & (largest < rows),
        lambda: InvalidInput(
            "ids",
            expected=f"ids from 0 to {rows - 1}",
            got=f"{int(least)} to {int(largest)}",
            remedy="Pass the ids of the layer's forward.",
        ),
    )


@op()
@torch.no_grad()
def embedding_norm(
    ids: Int64[Tensor, "B T"],
    g: Float[Tensor, "B T D"],
    *,
    padding_idx: Index | None = None,
) -> Double[Tensor, "squares: B"]:
    """Return the squared norm of each sample's gradient: its equal ids are summed, then squared.

    Args:
        ids: int64 ``[B, T]``.
        g: output gradients ``[B, T, D]``, float32 or float64.
        padding_idx: positions with this id are ignored, whatever their gradient.

    Returns:
        float64 ``[B]``: never below the true square for these inputs, and above it by at most 1e-4
        of it (float64: 1e-10) except for the rounding floor that ``docs/ghost.md`` states; not
        finite for a sample with NaN or inf; 0 for T = 0.

    Raises:
        InvalidInput: wrong type, shape, dtype, device or layout.
    """
    batch, positions = ids.shape
    kept = torch.ones_like(ids, dtype=torch.bool) if padding_idx is None else ids != padding_idx
    sample = torch.arange(batch, device=ids.device)[:, None].expand_as(ids)[kept]
    pairs, group = torch.unique(torch.stack((sample, ids[kept])), dim=1, return_inverse=True)
    values = g[kept].double()
    rows = values.new_zeros(pairs.shape[1], g.shape[2]).index_add_(0, group, values)
    terms = positions + g.shape[2]
    # A row at a time, then their sum over the sample: a norm of sums as any other.
    absolute = values.new_zeros(pairs.shape[1]).index_add_(0, group, values.norm(dim=1))
    upper = upper_square(rows[:, None, :], terms, absolute)
    total = upper.new_zeros(batch).index_add_(0, pairs[0], upper)
    return total * (1 + gamma(positions))


def _check_sum(
    ids: Tensor, g: Tensor, factors: Tensor, out: Tensor, padding_idx: int | None
) -> None:
    _check_range(ids, out.shape[0])


@op(check=_check_sum)
@torch.no_grad()
def embedding_sum(
    ids: Int64[Tensor, "B T"],
    g: Float[Tensor, "B T D"],
    factors: Float[Tensor, "B"],
    out: Float[Tensor, "V D", written],
    *,
    padding_idx: Index | None = None,
) -> None:
    """Add the weighted sum of the gradients, in place: ``out[ids[b,t]] += factors[b] g[b,t]``.

    Args:
        ids: int64 ``[B, T]``, from 0 to V - 1.
        g: output gradients ``[B, T, D]``, float32 or float64.
        factors: ``[B]``, dtype of ``g``. A sample of factor 0 contributes nothing, NaN or not.
        out: ``[V, D]``, dtype of ``g``, contiguous.
        padding_idx: positions with this id are ignored, whatever their gradient.

    Raises:
        InvalidInput: wrong type, shape, dtype, device or layout; an id outside the table.
    """
    used = (factors != 0)[:, None].expand_as(ids)
    if padding_idx is not None:
        used = used & (ids != padding_idx)
    weight = factors[:, None].expand_as(ids)[used]
    out.index_add_(0, ids[used], g[used] * weight[:, None])


@op(check=_check_sum)
@torch.no_grad()
def embedding_integer_sum(
    ids: Int64[Tensor, "B T"],
    g: Float[Tensor, "B T D"],
    factors: Float[Tensor, "B"],
    out: Int32[Tensor, "V D", written],
    *,
    padding_idx: Index | None = None,
) -> None:
    """Sum of whole numbers, in place: ``out[v] += sum_b trunc(factors[b] grad_b[v])``.

    The rows of equal ids of a sample are added in float64 before they are truncated, as in
    ``embedding_norm``, whose bound therefore holds for what is added here.

    Args:
        ids: int64 ``[B, T]``, from 0 to V - 1.
        g: output gradients ``[B, T, D]``, float32 or float64.
        factors: ``[B]``, dtype of ``g``. A sample of factor 0 contributes nothing, NaN or not.
        out: int32 ``[V, D]``, contiguous. Entries of a term, and their sum, must stay below 2^31.
        padding_idx: positions with this id are ignored, whatever their gradient.

    Raises:
        InvalidInput: wrong type, shape, dtype, device or layout; an id outside the table.
    """
    used = (factors != 0)[:, None].expand_as(ids)
    if padding_idx is not None:
        used = used & (ids != padding_idx)
    sample = torch.arange(len(ids), device=ids.device)[:, None].expand_as(ids)[used]
    pairs, group, counts = torch.unique(
        torch.stack((sample, ids[used])), dim=1, return_inverse=True, return_counts=True
    )
    values, weights = g[used], factors[pairs[0], None]
    wide = values.new_zeros(pairs.shape[1], g.shape[2], dtype=torch.float64)
    wide.index_add_(0, group, values.double())
    # A row that stands alone is multiplied in its own dtype.
    alone = (counts == 1)[:, None]
    terms = torch.where(alone, (weights * wide.to(g.dtype)).double(), weights.double() * wide)
    out.index_add_(0, pairs[1], integers(terms))


def _check_cross(ids: Tensor, e: Tensor, a: Tensor, g: Tensor, padding_idx: int | None) -> None:
    _check_range(ids, g.shape[2])


@op(check=_check_cross)
@torch.no_grad()
def tied_cross(
    ids: Int64[Tensor, "B S"],
    e: Float[Tensor, "B S D"],
    a: Float[Tensor, "B T D"],
    g: Float[Tensor, "B T V"],
    *,
    padding_idx: Index | None = None,
) -> Double[Tensor, "products: B"]:
    """Return each sample's inner product of the two gradients of a weight that embeds and projects.

    ``sum_{s,t} g[b,t,ids[b,s]] <a[b,t], e[b,s]>``: twice this, with the squares of both gradients,
    is the square of their sum.

    Args:
        ids: int64 ``[B, S]`` of the embedding, from 0 to V - 1.
        e: output gradients of the embedding ``[B, S, D]``, float32 or float64.
        a: inputs of the projection ``[B, T, D]``, same dtype.
        g: output gradients of the projection ``[B, T, V]``, same dtype.
        padding_idx: positions of the embedding with this id are ignored.

    Returns:
        float64 ``[B]``: never below the true inner product, and above it by at most 1e-12 of
        ``sum_{s,t} |g[b,t,ids[b,s]]| |a[b,t]| |e[b,s]|``; not finite for a sample with NaN or inf
        among the numbers that it reads; 0 for S = 0 or T = 0.

    Raises:
        InvalidInput: wrong type, shape, dtype, device or layout; an id outside the vocabulary.
    """
    wide_e, wide_a = e.double(), a.double()
    index = ids[:, None, :].expand(-1, a.shape[1], -1)
    chosen = g.gather(2, index).double()
    if padding_idx is not None:
        ignored = ids == padding_idx
        chosen = chosen.masked_fill(ignored[:, None, :], 0)
        wide_e = wide_e.masked_fill(ignored[:, :, None], 0)
    inner = torch.bmm(wide_a, wide_e.transpose(1, 2))
    sizes = wide_a.norm(dim=2)[:, :, None] * wide_e.norm(dim=2)[:, None, :]
    slack = gamma(2 * (ids.shape[1] + a.shape[1] + a.shape[2]) + 16)
    absolute = (chosen.abs() * sizes).sum(2).sum(1)
    upper: Tensor = (chosen * inner).sum(2).sum(1) + slack * absolute
    return upper


def _check_tied_error(
    ids: Tensor, a: Tensor, g: Tensor, e: Tensor, padding_idx: int | None
) -> None:
    _check_range(ids, g.shape[2])


def _check_tied(
    ids: Tensor,
    a: Tensor,
    g: Tensor,
    e: Tensor,
    factors: Tensor,
    out: Tensor,
    padding_idx: int | None,
) -> None:
    _check_range(ids, g.shape[2])


@op(check=_check_tied)
@torch.no_grad()
def tied_integer_sum(
    ids: Int64[Tensor, "B S"],
    a: Operand[Tensor, "B T d"],
    g: Operand[Tensor, "B T p"],
    e: Sum[Tensor, "B S d"],
    factors: Sum[Tensor, "B"],
    out: Int32[Tensor, "p d", written],
    *,
    padding_idx: Index | None = None,
) -> None:
    """Sum of whole numbers, in place, of a weight that embeds and projects.

    ``out += sum_b trunc(factors[b] grad_b)``, where both uses are added before their sum is
    truncated: ``grad_b = sum_t g[b,t,:] outer a[b,t,:]``, and ``e[b,s]`` on row ``ids[b,s]``. What
    is truncated differs from the exact gradient by at most ``tied_sum_error`` in norm.

    Args:
        ids: int64 ``[B, S]`` of the embedding, from 0 to p - 1.
        a: inputs of the projection ``[B, T, d]``, float32, float64, bfloat16 or float16.
        g: output gradients of the projection ``[B, T, p]``, same dtype.
        e: output gradients of the embedding ``[B, S, d]``, same dtype (16-bit: float32).
        factors: ``[B]``, dtype of ``e``. A sample of factor 0 contributes nothing, NaN or not.
        out: int32 ``[p, d]``, contiguous. Entries of a term, and their sum, must stay below 2^31.
        padding_idx: positions of the embedding with this id are ignored.

    Raises:
        InvalidInput: wrong type, shape, dtype, device or layout; an id outside the vocabulary.
    """
    for b in torch.nonzero(factors)[:, 0].tolist():
        kept = slice(None) if padding_idx is None else ids[b] != padding_idx
        rows = torch.zeros(out.shape, dtype=torch.float64, device=out.device)
        rows.index_add_(0, ids[b][kept], e[b][kept].double())
        grad = (g[b].double().t() @ a[b].double()).to(e.dtype) + rows.to(e.dtype)
        out.add_(integers(factors[b] * grad))


@op(check=_check_tied_error)
@torch.no_grad()
def tied_sum_error(
    ids: Int64[Tensor, "B S"],
    a: Operand[Tensor, "B T D"],
    g: Operand[Tensor, "B T V"],
    e: Sum[Tensor, "B S D"],
    *,
    padding_idx: Index | None = None,
) -> Double[Tensor, "errors: B"]:
    """Bound ``|| what tied_integer_sum truncates / factor - grad_b ||``.

    ``gamma (sum_t |a_t| |g_t| + sum_s |e_s|)`` with gamma and underflow as in ``linear_sum_error``.

    Args: as ``tied_integer_sum``.

    Returns:
        float64 ``[B]``; infinite for a sample with NaN or inf, or whose sums could overflow.

    Raises:
        InvalidInput: wrong type, shape, dtype, device or layout; an id outside the vocabulary.
    """
    rows = e.double().norm(dim=2)
    if padding_idx is not None:
        rows = rows.masked_fill(ids == padding_idx, 0)
    absolute = (a.double().norm(dim=2) * g.double().norm(dim=2)).sum(1) + rows.sum(1)
    return sum_error(e.dtype, a.shape[1], a.shape[2] * g.shape[2], absolute)


__all__ = [
    "embedding_integer_sum",
    "embedding_norm",
    "embedding_sum",
    "tied_cross",
    "tied_integer_sum",
    "tied_sum_error",
]
