"""The update: closed forms of noise, scaling and rule, of the clock, and of projections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...ops import update
from ...ops.noise import INTEGERS
from ..primitives import WALK, Counts, Item, Itemised
from . import noise as noise_forms
from ._form import Form

Tensors = Sequence[torch.Tensor]

_PLAIN = Counts(ADD=1, SUB=1, MUL=2)
_MOMENTUM = Counts(ADD=2, SUB=1, MUL=4)
_NESTEROV = Counts(ADD=3, SUB=1, MUL=5)
_ADAM = Counts(ADD=4, SUB=2, MUL=7, DIV=2, SQRT=1)
_CHECKED = Counts(CMP=1, MUX=1, ADD=1)
"""A number that is not finite counts as zero, and is counted."""


def rule_counts(rule: update.Rule) -> Counts:
    """One entry of an optimizer rule; decay and momentum are applied whatever their value."""
    if isinstance(rule, update.Adam):
        return _ADAM
    if not rule.momentum:
        return _PLAIN
    return _NESTEROV if rule.nesterov else _MOMENTUM


def step(
    params: Tensors,
    sums: Tensors,
    *,
    rule: update.Rule,
    noise: update.Noise | None = None,
    **_: Any,
) -> Itemised:
    """``update.step``."""
    if not params:
        return Itemised()
    n = sum(p.numel() for p in params)
    kept = 1 + len(rule.buffer_names())
    made = Itemised()
    if noise is None:
        gradient = n * (Counts(MUL=1) + _CHECKED)
    elif sums[0].dtype in INTEGERS:
        gradient = noise_forms.released(n, sums[0].dtype) + Counts(CVT=n, MUL=n)
    else:
        gradient = noise_forms.released(n, sums[0].dtype) + Counts(ADD=n, MUL=n)
    if noise is not None:
        rounded = sums[0].dtype not in INTEGERS
        for p, position in zip(params, noise.positions, strict=True):
            made += _drawn(noise, position, p.numel(), rounded)
        if noise.clock is not None:
            made += Itemised((Item(name="clock", counts=Counts(LOAD=3)),))
    return made + Itemised(
        (
            Item(
                name="read and written",
                counts=Counts(LOAD=(kept + 1) * n, STORE=kept * n),
                note="parameters and what the rule remembers; sums are only read",
            ),
            Item(name="gradient", counts=gradient, note="release and scaling"),
            Item(name="rule", counts=n * rule_counts(rule)),
        )
    )


def _drawn(noise: update.Noise, position: int, count: int, rounded: bool) -> Itemised:
    """Draws and rounding bits of one tensor, from the streams or made ahead."""
    ahead = noise.draws
    read = Itemised((Item(name="made ahead", counts=Counts(LOAD=count)),))
    drawn = noise_forms.draws(position, count, noise.distribution) if ahead is None else read
    if not rounded:
        return drawn
    if ahead is not None and ahead.rounding is not None:
        return drawn + read
    return drawn + noise_forms.roundings(position, count)


def advance(*args: Any, **_: Any) -> Itemised:
    """``update.advance``."""
    clock = Counts(ADD=1, MUL=2, LOAD=3, STORE=3)
    return Itemised((Item(name="clock", counts=clock, evidence=WALK),))


def project(params: Tensors, onto: update.Projection, *, moved: bool = True, **_: Any) -> Itemised:
    """``update.project``; ``moved``: the point lay outside the ball."""
    n = sum(p.numel() for p in params)
    narrow = sum(p.numel() for p in params if p.dtype is torch.float32)
    if isinstance(onto, update.Box):
        return Itemised((Item(name="box", counts=n * Counts(CMP=2, MUX=2, LOAD=1, STORE=1)),))
    if n == 0:
        return Itemised()
    if isinstance(onto, update.Ball):
        norm = Counts(MUL=n, ADD=n - 1, CVT=narrow, LOAD=n, SQRT=1, CMP=1)
        inside = Itemised((Item(name="norm", counts=norm, evidence=WALK),))
        scaled = Counts(DIV=1, MUL=n, CVT=2 * narrow, STORE=n)
        return inside + Itemised(
            (Item(name="scaling", counts=scaled, evidence=WALK),) if moved else ()
        )
    doublings = (n - 1).bit_length()
    return Itemised(
        (
            Item(
                name="sorting",
                counts=Counts(CMP=n * doublings, MUX=n * doublings),
                kind="modelled",
                note="a library's: n ceil(log2 n) comparisons of a merge sort",
            ),
            Item(
                name="threshold",
                counts=Counts(ADD=n - 1, SUB=n, DIV=n, CMP=n, CVT=narrow, LOAD=n),
                evidence=WALK,
            ),
            Item(
                name="shift",
                counts=Counts(SUB=n, CMP=n, MUX=n, CVT=narrow, STORE=n),
                evidence=WALK,
            ),
        )
    )


FORMS: dict[str, Form] = {"update.step": step, "update.advance": advance, "update.project": project}
