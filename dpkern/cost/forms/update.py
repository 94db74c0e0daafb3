"""Closed forms of the update: noise, scaling, rule, device step counter and projections."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ...base.counts import WALK, Counts, Item, Itemised
from ...ops import update
from ...ops._pair_map import sizes_noised
from ...ops.noise import INTEGERS
from . import noise as noise_forms
from ._form import Form
from ._layers import moved

Tensors = Sequence[torch.Tensor]

_PLAIN = Counts(ADD=1, SUB=1, MUL=2)
_MOMENTUM = Counts(ADD=2, SUB=1, MUL=4)
_NESTEROV = Counts(ADD=3, SUB=1, MUL=5)
_ADAM = Counts(ADD=4, SUB=2, MUL=7, DIV=2, SQRT=1)
_CELL = Counts(CVT=1, MUL=1)
_CHECKED = Counts(CMP=1, MUX=1, ADD=1)
"""A number that is not finite is replaced by zero, and counted."""


def rule_counts(rule: update.Rule) -> Counts:
    """Count one entry of an optimizer rule; decay and momentum are applied whatever their value."""
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
    maps: update.PairMaps | None = None,
    **_: Any,
) -> Itemised:
    """Count ``update.step``."""
    if not params:
        return Itemised()
    n = sum(p.numel() for p in params)
    kept = 1 + len(rule.buffer_names())
    made = Itemised()
    kind = sums[0].dtype
    floats = kind not in INTEGERS
    gradient, flops, line = n * (Counts(MUL=1) + _CHECKED), n, "gradient"
    if noise is not None:
        sizes = sizes_noised(params, maps)
        noised = sum(sizes)
        # The unit of counts that are led back is a factor of the gradient.
        led_back = 0 if floats or maps is None else sum(_coordinates(params, maps))
        gradient = noise_forms.released(noised, kind) + (
            noised * Counts(ADD=1, MUL=1)
            if floats
            else (noised - led_back) * _CELL + led_back * Counts(CVT=1)
        )
        flops, line = noise_forms.release_flops(noised, kind) + noised - led_back, "release"
        for size, position in zip(sizes, noise.positions, strict=True):
            made += noise_forms.drawn(
                noise.draws, position, size, noise.distribution, rounded=floats
            )
        if maps is not None:
            made += _mapped(params, maps, kind)
        if noise.step_counter is not None:
            made += Itemised((replace(moved([(6, torch.int64)], []), name="step counter"),))
    held = kept * n, params[0].dtype
    edge = moved(
        [held, (sum(_sum_sizes(params, maps)), kind)],
        [held],
        note="parameters and what the rule remembers; sums are only read",
    )
    return made + Itemised(
        (
            edge,
            Item(name=line, counts=gradient, note="with its scaling", flops=flops),
            Item(name="rule", counts=n * rule_counts(rule)),
        )
    )


def _coordinates(params: Tensors, maps: update.PairMaps) -> list[int]:
    """Return how many coordinates each mapped parameter has; 0 for the others."""
    return [
        0 if each is None else each.coordinates(param.numel())
        for param, each in zip(params, maps.each, strict=True)
    ]


def _sum_sizes(params: Tensors, maps: update.PairMaps | None) -> list[int]:
    """Return how many numbers each parameter's sum has."""
    each = () if maps is None else maps.each
    sizes = [param.numel() for param in params]
    for i, one in enumerate(each):
        if one is not None and one.signal is None:
            sizes[i] = one.coordinates(sizes[i])
    return sizes


def _mapped(params: Tensors, maps: update.PairMaps, kind: torch.dtype) -> Itemised:
    """Count the products with the matrices of maps, in float64, and changes of format."""
    counts, flops = Counts(), 0
    narrow = params[0].dtype is torch.float32
    for param, each in zip(params, maps.each, strict=True):
        if each is None:
            continue
        n = param.numel()
        coordinates = each.coordinates(n)
        products, sums = n * each.rank, n * (each.rank - 1)
        formats = n + coordinates if kind not in INTEGERS else n
        if each.signal is not None:
            products += coordinates * each.taps
            sums += coordinates * (each.taps - 1)
            formats += n + coordinates
        counts += Counts(MUL=products + n, ADD=sums, CVT=formats if narrow else 0)
        flops += products + n + sums
    return Itemised((Item(name="maps", counts=counts, note="with scaling", flops=flops),))


def advance(*args: Any, **_: Any) -> Itemised:
    """Count ``update.advance``."""
    edge = moved([(3, torch.int64)], [(3, torch.int64)])
    line = replace(edge, name="step counter", counts=edge.counts + Counts(ADD=1, MUL=2))
    return Itemised((replace(line, evidence=WALK, flops=2),))


def project(params: Tensors, onto: update.Projection, *, moved: bool = True, **_: Any) -> Itemised:
    """Count ``update.project``; ``moved`` says that the point lay outside the ball."""
    n = sum(p.numel() for p in params)
    size = sum(p.nbytes for p in params)
    narrow = sum(p.numel() for p in params if p.dtype is torch.float32)
    if isinstance(onto, update.Box):
        box = n * Counts(CMP=2, MUX=2, LOAD=1, STORE=1)
        return Itemised((Item(name="box", counts=box, bytes_read=size, bytes_written=size),))
    if n == 0:
        return Itemised()
    if isinstance(onto, update.Ball):
        norm = Counts(MUL=n, ADD=n - 1, CVT=narrow, LOAD=n, SQRT=1, CMP=1)
        inside = Itemised((Item(name="norm", counts=norm, evidence=WALK, bytes_read=size),))
        scaled = Counts(DIV=1, MUL=n, CVT=2 * narrow, STORE=n)
        return inside + Itemised(
            (Item(name="scaling", counts=scaled, evidence=WALK, bytes_written=size),)
            if moved
            else ()
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
                bytes_read=size,
            ),
            Item(
                name="shift",
                counts=Counts(SUB=n, CMP=n, MUX=n, CVT=narrow, STORE=n),
                evidence=WALK,
                bytes_written=size,
            ),
        )
    )


FORMS: dict[str, Form] = {"update.step": step, "update.advance": advance, "update.project": project}
