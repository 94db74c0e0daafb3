"""Closed forms of clipping: norms, factors, and sums in both arithmetics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ...base.counts import FORMULA, WALK, Counts, Item, Itemised
from ...ops import clip
from ._form import Form
from ._layers import WIDE, moved

WIDENED = {torch.float32: 1, torch.float64: 0, torch.bfloat16: 2}
"""Conversions of a gradient's entry to float64, through float32 for bfloat16."""


def sum_of(terms: int) -> int:
    """Return the additions of a sum."""
    return max(terms - 1, 0)


def power_sum(entries: int, p: int) -> Counts:
    """Count ``sum |x|^p`` of float64 numbers."""
    power = Counts(MUL=entries) if p == 2 else Counts(AND=entries)
    return power + Counts(ADD=sum_of(entries))


def round_down(dtype: torch.dtype) -> Counts:
    """Count the conversion of a float64 factor to another dtype, rounded so that it never grows."""
    return Counts() if dtype is torch.float64 else Counts(CVT=2, CMP=1, SUB=1, MUX=1)


def rounded(name: str, counts: Counts, factors: int, dtype: torch.dtype) -> Item:
    """Return a line of floating operations, and so many factors that are rounded down by bits."""
    line = Item(name=name, counts=counts)
    return replace(line, counts=counts + factors * round_down(dtype), flops=line.floating)


def factor(automatic: bool) -> Counts:
    """Count a clip factor, except for the division of a clipped sample."""
    return Counts(MUL=1, ADD=1, DIV=1) if automatic else Counts(MUL=1, CMP=1)


def combined(tensors: int, p: int) -> Counts:
    """Count the norm of a sample from the powers of its tensors."""
    if p == 1:
        return Counts(ADD=sum_of(tensors))
    return Counts(SQRT=tensors + 1, MUL=tensors, ADD=sum_of(tensors))


def sample_norm(
    grads: clip.Gradients,
    *,
    p: int = 2,
    scale: clip.Gradients | None = None,
    center: clip.Gradients | None = None,
    **_: Any,
) -> Itemised:
    """Count ``clip.sample_norm``."""
    tensors = clip.tensors_of(grads)
    batch, columns = len(tensors[0]), _columns(tensors)
    entries = batch * sum(columns)
    widened = Counts(CVT=WIDENED[tensors[0].dtype] * entries)
    powers = sum((power_sum(n, p) for n in columns), Counts())
    items = [
        moved([(entries, tensors[0].dtype)], [(batch, WIDE)]),
        Item(
            name="norms",
            counts=widened + batch * (powers + combined(len(tensors), p)),
            evidence=WALK,
        ),
    ]
    for name, extra, work in (("centred", center, "SUB"), ("scaled", scale, "DIV")):
        if extra is None:
            continue
        given = clip.tensors_of(extra)
        numbers = sum(t.numel() for t in given)
        narrow = sum(t.numel() for t in given if t.dtype is torch.float32)
        counts = Counts({work: entries, "LOAD": numbers, "CVT": narrow})
        size = sum(t.nbytes for t in given)
        items.append(Item(name=name, counts=counts, evidence=WALK, bytes_read=size))
    return Itemised(tuple(items))


def clip_sum(
    grads: clip.Gradients,
    max_grad_norm: float | Sequence[float],
    *,
    p: int = 2,
    style: str = "flat",
    arithmetic: str = "float",
    unit: float | Sequence[float] | None = None,
    out: Sequence[torch.Tensor] | None = None,
    clipped: int | None = None,
    nonfinite: int = 0,
    **_: Any,
) -> Itemised:
    """Count ``clip.clip_sum``.

    Args:
        grads, max_grad_norm, p, style, arithmetic, unit, out: the op's arguments.
        clipped: samples beyond the bound (per layer: samples and tensors). None means all.
            Automatic clipping divides for every one.
        nonfinite: samples with NaN or inf, which are not summed.
    """
    tensors = clip.tensors_of(grads)
    batch, columns = len(tensors[0]), _columns(tensors)
    finite, groups = batch - nonfinite, len(tensors)
    entries, exact = sum(columns), arithmetic == "exact"
    sum_dtype = clip.sum_dtype(tensors[0].dtype)
    widened = Counts(CVT=WIDENED[tensors[0].dtype] * batch * entries)
    powers = sum((power_sum(n, p) for n in columns), Counts())
    whole = Counts(ADD=sum_of(groups), CMP=1)
    divided = (finite if style != "per_layer" else finite * groups) if clipped is None else clipped
    per_sample = 1 if style == "per_layer" else groups
    factors = batch * groups * Counts(SQRT=int(p == 2), MUL=int(exact))
    factors += finite * groups * factor(style == "automatic")
    if style != "automatic":
        factors += Counts(DIV=divided * per_sample)
    touched = entries if finite else 0
    if out is not None:
        kind = out[0].dtype
    elif exact:
        kind = clip.ClipRequest.of(grads, max_grad_norm, p, style, arithmetic, unit).exact_dtype
    else:
        kind = sum_dtype
    read = [(batch * entries, tensors[0].dtype), (touched if out is not None else 0, kind)]
    written = [(batch, WIDE), (touched if out is not None else entries, kind)]
    norms = batch * (powers + whole + combined(groups, p))
    return Itemised(
        (
            moved(read, written),
            Item(
                name="norms",
                counts=widened + norms + batch * Counts(CMP=1, ADD=1),
                note="of each tensor, together, and which are finite",
                evidence=WALK,
                flops=Item(name="", counts=norms).floating,
            ),
            rounded("factors", factors, batch * groups, sum_dtype),
            Item(
                name="sums",
                counts=_exact(tensors[0].dtype, columns, p, style, batch, finite)
                if exact
                else batch * Counts(CMP=groups)
                + finite * entries * (Counts(MUL=1, ADD=1) + _narrowed(tensors[0].dtype)),
                evidence=FORMULA if exact else WALK,
                flops=finite * entries if exact else None,
            ),
        )
    )


def _exact(
    dtype: torch.dtype, columns: Sequence[int], p: int, style: str, batch: int, finite: int
) -> Counts:
    """Count the integers, their sum and the proof; a sample scaled down again counts as chance."""
    entries, tensors = sum(columns), len(columns)
    integer = Counts(MUL=1, CVT=1, ADD=1) + _narrowed(dtype)
    power = Counts(MUL=1) if p == 2 else Counts(AND=1)
    together = [sum(columns)] if style != "per_layer" else list(columns)
    proof = Counts(ADD=sum(sum_of(n) for n in together))
    tests = Counts(CMP=tensors + len(together))
    return batch * tests + finite * (entries * (integer + power) + proof)


def _narrowed(dtype: torch.dtype) -> Counts:
    return Counts(CVT=int(dtype is torch.bfloat16))


def _columns(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [t.shape[1:].numel() for t in tensors]


FORMS: dict[str, Form] = {"clip.sample_norm": sample_norm, "clip.clip_sum": clip_sum}
