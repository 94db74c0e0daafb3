"""Closed forms of what mechanisms learn from released values, and of the plans that follow."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..errors import InvalidInput
from ..mechanisms import AdaClip, Directional, Mechanism, Pruned
from ..rng import Purpose
from . import _glue as glue
from ._ops import call, stream
from ._step_maps import Items, exact, modelled
from .phases import LEARN
from .primitives import Counts

_MASK, _FEEDBACK = f"{LEARN}: next mask", f"{LEARN}: error feedback"
Shapes = Sequence[tuple[int, ...]]


def learning(mechanism: Mechanism, shapes: Shapes) -> Items:
    """What ``learn`` takes on float64 gradients."""
    sizes = [math.prod(shape) for shape in shapes]
    if isinstance(mechanism, AdaClip):
        moments = sum(map(_moments, sizes), Counts())
        return exact(f"{LEARN}: scales", deviations(sizes)) + exact(f"{LEARN}: moments", moments)
    if isinstance(mechanism, Directional):
        running = not mechanism._releases_importance
        return (
            exact(f"{LEARN}: running mean", sum(map(_running, sizes), Counts())) if running else []
        )
    if isinstance(mechanism, Pruned):
        return _feedback(mechanism, sizes)
    raise _unknown(mechanism)


def replanning(mechanism: Mechanism, shapes: Shapes, number: int, phase: str = LEARN) -> Items:
    """What a plan made anew from the memory takes, after step ``number`` (from 1)."""
    sizes = [math.prod(shape) for shape in shapes]
    if isinstance(mechanism, AdaClip):
        return exact(f"{phase}: scales", deviations(sizes))
    if isinstance(mechanism, Directional):
        return exact(f"{phase}: scales", _importances(mechanism, sizes))
    if isinstance(mechanism, Pruned):
        return _masks(mechanism, sizes, number)
    raise _unknown(mechanism)


def _unknown(mechanism: Mechanism) -> InvalidInput:
    return InvalidInput(
        "mechanism",
        expected="one whose learning has a closed form",
        got=type(mechanism).__name__,
        remedy="Write it in dpkern/cost/_step_learning.py, or use cost.counting.count.",
    )


def deviations(sizes: Sequence[int]) -> Counts:
    """AdaClip: ``s``, its sum over everything, and ``sqrt(s)`` times a number."""
    each = (
        glue.each(n, SQRT=1) + glue.sum_read(n) + glue.each(n, SQRT=1) + glue.each(n, MUL=1)
        for n in sizes
    )
    return sum(each, Counts())


def _moments(n: int) -> Counts:
    """AdaClip: ``clamp((g - m)^2 - (b noise)^2)`` into the scale, g into the mean."""
    away = glue.each(n, reads=2, SUB=1) + glue.each(n, MUL=1)
    noisy = glue.each(n, MUL=1) + glue.each(n, MUL=1)
    variance = glue.each(n, reads=2, SUB=1) + glue.each(n, CMP=2, MUX=2)
    moved = glue.each(n, reads=2, SUB=1, MUL=1, ADD=1)
    return away + noisy + variance + 2 * moved


def _running(n: int) -> Counts:
    """Directional: the magnitudes join their running mean."""
    return glue.each(n, AND=1) + glue.each(n, reads=2, SUB=1, MUL=1, ADD=1)


def _importances(mechanism: Directional, sizes: Sequence[int]) -> Counts:
    """Directional: relative scales of importances that are not all zero."""
    total = Counts()
    for n in sizes:
        scaled = glue.each(n, AND=1) + glue.folded(n, 1, "CMP", "MUX") + glue.read_out()
        scaled = scaled + glue.each(n, DIV=1) + glue.each(n, CMP=1, MUX=1)
        squares = glue.each(n, MUL=1) + glue.sum_read(n)
        total = total + scaled + squares + glue.each(n, MUL=1)
        if mechanism._shaped:
            power = glue.each(n, LOG=1, MUL=1, EXP=1)
            raised = glue.each(n, CMP=1, MUX=1) if mechanism.kappa_max is not None else Counts()
            total = total + 2 * power + glue.sum_read(n) + raised
    return total


def _feedback(mechanism: Pruned, sizes: Sequence[int]) -> Items:
    """Pruned: the next mask and what the update leaves for later."""
    items = exact(f"{LEARN}: number of the step", Counts(ADD=1, LOAD=1, STORE=1))
    if mechanism._leaks:
        return items
    items += exact(f"{LEARN}: number of the step", glue.read_out())
    for n in sizes:
        k = mechanism._count(n)
        magnitudes, chosen = glue.largest(n, k)
        if mechanism.mask == "previous":
            marked = glue.filled(n) + magnitudes + glue.scattered(k, 1)
            items += exact(_MASK, marked) + modelled(_MASK, chosen)
        if mechanism.feedback:
            whole = glue.each(n, reads=2, ADD=1) + glue.filled(n) + magnitudes
            kept = glue.gathered(k) + glue.scattered(k, k)
            rest = glue.each(n, reads=2, SUB=1) + 2 * glue.each(n)
            items += exact(_FEEDBACK, whole + kept + rest) + modelled(_FEEDBACK, chosen)
    return items


def released(mechanism: Pruned, n: int, number: int) -> int:
    """How many of n coordinates step ``number`` (from 1) releases."""
    everything = mechanism.mask == "previous" and (number - 1) % mechanism.refresh == 0
    return n if everything else mechanism._count(n)


def _masks(mechanism: Pruned, sizes: Sequence[int], number: int) -> Items:
    """Pruned: the places of the next step."""
    coins = stream(Purpose.SYMBOLS)
    items: Items = []
    for n in sizes:
        k = mechanism._count(n)
        if mechanism._leaks:
            items += exact(_FEEDBACK, glue.each(n, SUB=1) if mechanism.feedback else Counts())
        elif mechanism.mask == "previous":
            kept = released(mechanism, n, number + 1)
            items += exact(_MASK, Counts(LOAD=n, CMP=n, STORE=kept))
        else:
            items += exact(f"{LEARN}: number of the step", glue.read_out())
            items += call("noise.keystream", LEARN, coins, first_block=0, blocks=-(-n // 16))
            _, chosen = glue.largest(n, k)
            items += modelled(_MASK, chosen)
    return items


__all__ = ["learning", "released", "replanning"]
