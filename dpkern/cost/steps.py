"""Closed forms of one private step of every mechanism, itemised; nothing is executed.

A step is ``DPStep.add`` of one physical batch and ``DPStep.finish``: clip norms and factors, the
clipped sum, maps to release coordinates and back, noise, scaling and update, and what the mechanism
learns. ``counting.count`` runs the same step and must find the same numbers, phase by phase.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..base import validate as check
from ..base.counts import Itemised
from ..ops import update
from ..privacy.mechanisms import LabelMechanism, Mechanism, Site
from ..step.noise_tables.named import INLINE, SOURCES
from ._ops import call, shaped
from ._step_flow import SAMPLES, CountSetting, adding, finishing
from ._step_maps import Items
from ._step_work import Lines
from .phases import NOISE, PROJECT, by_line


def form(
    mechanism: Mechanism,
    shapes: Sequence[Sequence[int]],
    batch: int,
    *,
    dtype: torch.dtype = torch.float32,
    rule: update.Rule | None = None,
    clipped: int | Sequence[int] | None = None,
    number: int = 2,
    samples: str = "gradients",
    moved: bool = True,
    source: str = INLINE,
    sites: Sequence[Site] = (),
) -> Itemised:
    """Count one step line by line; ``phases.by_phase`` adds the lines up.

    Args:
        mechanism: the configuration; one that releases labels has ``response`` instead.
        shapes: shapes of the parameters.
        batch: samples of the step, in one physical batch; all finite.
        dtype: dtype of parameters and gradients, float32 or float64.
        rule: optimizer's rule. None means that ``finish`` returns the gradients.
        clipped: number of clipped samples, of every clip group alike or of each. None means all.
        number: number of the step, from 1. The first one fills momentum buffers; a mechanism may
            release more in some steps than in others.
        samples: input of ``add``: ``gradients``, ``released`` coordinates, or a clipped ``sum``,
            which is then made outside the count; ``operands``: such a sum of layers, made of their
            inputs and output gradients.
        moved: whether the mechanism's projection onto a ball moves the parameters.
        source: source of the noise, a name in ``step.noise_tables.named.SOURCES``. What a ring
            makes ahead is counted in the step that takes it.
        sites: geometry of the parameters; for ``operands`` of layers that are clipped by their
            gradient.

    Raises:
        InvalidInput: numbers out of range, or a mechanism that does not fit the shapes.

    ``map`` and ``map back`` by a matrix, selections and sorts are ``modelled``. Sizes are exact for
    tensors that are not empty.
    """
    check.integer(1, batch=batch)
    check.integer(1, number=number)
    check.choice((torch.float32, torch.float64), dtype=dtype)
    check.choice(SAMPLES, samples=samples)
    sizes = tuple(tuple(int(n) for n in shape) for shape in shapes)
    plan = mechanism.plan_at(mechanism.plan(sizes), number)
    shrunk = batch if clipped is None else clipped
    each = (shrunk,) * len(plan.groups) if isinstance(shrunk, int) else tuple(shrunk)
    check.one_each("clipped", each, len(plan.groups))
    setting = CountSetting(
        mechanism=mechanism,
        shapes=sizes,
        batch=batch,
        dtype=dtype,
        rule=rule,
        clipped=tuple(check.integer(0, batch, clipped=count) for count in each),
        number=number,
        samples=samples,
        source=check.choice(SOURCES, source=source),
        sites=tuple(sites),
    )
    items: Items = adding(setting, plan) + finishing(setting, plan)
    if mechanism.projection is not None:
        params = [shaped(shape, dtype) for shape in sizes]
        items += call("update.project", PROJECT, params, mechanism.projection, moved=moved)
    return by_line(Itemised(tuple(items)))


def response(
    mechanism: LabelMechanism, records: int, *, dtype: torch.dtype = torch.int64
) -> Itemised:
    """Count one response of each record, and the estimate of the frequencies from them.

    Args:
        mechanism: the configuration.
        records: number of records.
        dtype: integer dtype of the symbols.

    Raises:
        InvalidInput: no records.
    """
    lines = Lines(NOISE)
    mechanism.count_response(lines, check.integer(1, records=records), dtype)
    return by_line(Itemised(tuple(lines.items)))


__all__ = ["form", "response"]
