"""Closed forms of making, noising and evaluating coefficients of polynomial losses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...base.counts import Counts, Item, Itemised
from ...ops import coef
from ...ops.coef import LANES
from . import noise as noise_forms
from ._form import Form
from ._layers import SIGMOID, WIDE, dots, moved

_COEFFICIENTS = {"printed": Counts(SUB=2, MUL=1), "taylor": Counts(SUB=1)}
"""The coefficients 1/2 - x and x/2 - 1/4, or a constant."""
_SLOPE = Counts(ADD=2, MUL=1)
_TERM = Counts(ADD=2, MUL=2)
"""The term w (a1 + a2 w) in float64, and its sum."""
_WIDE = Counts(CVT=3)
"""The conversions of a1, a2 and w to float64."""


def perturb(
    targets: torch.Tensor, *, form: str, noise: coef.Noise | None = None, **_: Any
) -> Itemised:
    """Count ``coef.perturb``."""
    n = targets.numel()
    written = replace(moved([], [(2 * n, targets.dtype)]), name="written")
    return _made(targets, form, noise) + Itemised((written,))


def _made(targets: torch.Tensor, form: str, noise: coef.Noise | None) -> Itemised:
    """Count both coefficients of every target, which is read."""
    n = targets.numel()
    read = replace(moved([(n, targets.dtype)], []), name="targets")
    items = Itemised((read, Item(name="coefficients", counts=n * _COEFFICIENTS[form])))
    return items + _noised(noise, len(targets), n, n, targets.dtype)


def _noised(
    noise: coef.Noise | None, records: int, linear: int, quadratic: int, dtype: torch.dtype
) -> Itemised:
    """Count the noise of so many coefficients of so many records."""
    if noise is None or not linear:
        return Itemised()
    behind = coef.quadratic_position(noise.position, linear)
    made = Itemised()
    for position, count in ((noise.position, linear), (behind, quadratic)):
        made += noise_forms.drawn(noise.draws, position, count, "laplace", rounded=True)
    count = linear + quadratic
    release = Item(
        name="release",
        counts=noise_forms.released_finite(count) + Counts(MUL=count),
        note="and times the cell",
        flops=noise_forms.release_flops(count, dtype) + count,
    )
    items = made + Itemised((release,))
    if isinstance(noise.scale, torch.Tensor):
        each = noise_forms.scaled("scale of each record", records, dtype, noise.scale)
        items += Itemised((each,))
    return items


def quadratic(
    z: torch.Tensor,
    targets: torch.Tensor,
    *,
    form: str,
    noise: coef.Noise | None = None,
    shift: torch.Tensor | None = None,
    **_: Any,
) -> Itemised:
    """Count ``coef.quadratic``."""
    n, records = z.numel(), len(z)
    each = _SLOPE + _TERM + (_WIDE if z.dtype is torch.float32 else Counts())
    shifts = [] if shift is None else [(records, shift.dtype)]
    added = 0 if shift is None else n
    return _made(targets, form, noise) + Itemised(
        (
            moved([(n, z.dtype), *shifts], [(n, z.dtype), (records, WIDE)]),
            Item(name="shift", counts=Counts(ADD=added)),
            Item(name="loss and slope", counts=n * each),
            Item(name="sum of lanes", counts=Counts(ADD=(LANES - 1) * records)),
        )
    )


_LANES_MEET = Counts(ADD=LANES - 1)
_PRODUCT = Counts(ADD=1, MUL=1)
"""A product and its sum in float64."""


def expanded(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor,
    *,
    noise: coef.Noise | None = None,
    **_: Any,
) -> Itemised:
    """Count ``coef.expanded``."""
    (records, width), classes = hidden.shape, len(weights)
    pairs, dtype = records * classes, hidden.dtype
    linear, quadratic = pairs * width, pairs * width**2
    features, numbers = records * width, classes * width
    made = Counts(SUB=pairs, MUL=features + linear + quadratic)
    runs = -(-records // coef.RUN)
    # Loss, score and derivative by the hidden layer are products; a1 + row, its sum with the column
    # and that one's in its run.
    each = 3 * _PRODUCT + Counts(ADD=3)
    items = [
        replace(moved([(features + pairs + numbers, dtype)], []), name="read"),
        replace(moved([], [(records, WIDE), (features + numbers, dtype)]), name="written"),
        Item(name="coefficients", counts=made),
        Item(name="rows and columns", counts=2 * quadratic * _PRODUCT + linear * _LANES_MEET),
        Item(name="loss and slopes", counts=linear * each),
        Item(
            name="of each record and class",
            counts=pairs * (2 * _LANES_MEET + _PRODUCT + Counts(ADD=1)),
            note="two sums of lanes, the slope by the score, the loss",
        ),
        Item(name="runs of records", counts=Counts(ADD=runs * numbers)),
    ]
    if dtype is torch.float32:
        wide = numbers + features + pairs + linear + quadratic
        narrow = numbers + features
        items.append(Item(name="to float64 and back", counts=Counts(CVT=wide + narrow)))
    return Itemised(tuple(items)) + _noised(noise, records, linear, quadratic, dtype)


_LOGIT = Counts(ADD=1, AND=1, CMP=1)
"""The shift of a logit, and whether it lies beyond the limit."""
_CODE = Counts(ADD=1, SUB=1, MUL=4)
"""The slope by a unit's sum, (b + moved) (h - h^2), and both rates."""
_UPDATE = Counts(MUL=1, SUB=1)
_GROWN = Counts(ADD=2, MUL=3)
"""The scale of a record, scale + growth c (c / 2 + 2)."""
_GROWN_FLOPS = 7
"""Those of the scale, its 1 / u and its cell."""


def descend(
    encoder: torch.Tensor,
    decoder: torch.Tensor,
    stopped: torch.Tensor,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    order: torch.Tensor,
    *,
    form: str,
    added: torch.Tensor | None = None,
    draws: torch.Tensor | None = None,
    growth: float = 0.0,
    **_: Any,
) -> Itemised:
    """Count ``coef.descend`` of runs that are not stopped."""
    visits, weights, dtype = order.numel(), 2 * encoder.numel(), encoder.dtype
    n, units = encoder.shape[2:]
    entries, codes, products = visits * n, visits * units, visits * n * units
    if not visits * n * units:
        return Itemised()
    noisy = 0 if draws is None else 2 * entries
    seen = entries * (2 if added is None else 3)
    read = [(weights + seen, dtype), (visits, order.dtype), (len(stopped), stopped.dtype)]
    ahead = [(noisy, torch.int32), (noisy, torch.int16)]
    sums = visits * (2 * (units + 1) + n)
    items = [
        moved([*read, *ahead], [(weights, dtype)]),
        Item(name="environment", counts=Counts(ADD=0 if added is None else entries)),
        Item(name="products", counts=dots(3 * products)),
        Item(name="sums of codes and slopes", counts=Counts(ADD=codes + entries)),
        Item(name="sums of lanes", counts=sums * _LANES_MEET),
        Item(name="codes", counts=codes * SIGMOID),
        Item(name="logits", counts=entries * _LOGIT + Counts(MUL=2 * visits)),
        Item(name="coefficients", counts=entries * (_COEFFICIENTS[form] + _SLOPE)),
        Item(name="slopes of the code", counts=codes * _CODE),
        Item(name="update", counts=2 * products * _UPDATE),
    ]
    if noisy:
        counts = noise_forms.released_finite(noisy) + Counts(MUL=noisy)
        flops = noise_forms.release_flops(noisy, dtype) + noisy
        items.append(Item(name="release", counts=counts, flops=flops))
    if noisy and growth:
        each = _GROWN + noise_forms.units_of(dtype, dtype)
        items.append(
            Item(name="scale of each record", counts=visits * each, flops=visits * _GROWN_FLOPS)
        )
    return Itemised(tuple(items))


FORMS: dict[str, Form] = {
    "coef.descend": descend,
    "coef.perturb": perturb,
    "coef.quadratic": quadratic,
    "coef.expanded": expanded,
}
