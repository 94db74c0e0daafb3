"""Relative noise scales per coordinate, computed over all parameters together in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .work import OpAccount


def printed(weights: Sequence[torch.Tensor], floor: float) -> list[torch.Tensor]:
    """Return ``|w_i|^(1/3) (sum |w|^(4/3))^(1/2) / ||w||_2``, in units of the isotropic scale.

    ``|w|`` is raised to ``floor`` times its largest entry. Every entry is then at least
    ``floor^(1/3)``: after division by the largest, ``|w| <= 1`` and ``|w|^(4/3) >= w^2``. All zero:
    all ones.
    """
    sizes = _scaled(weights, floor)
    if sizes is None:
        return [torch.ones_like(w, dtype=torch.float64) for w in weights]
    squares = math.fsum(v.square().sum().item() for v in sizes)
    powers = math.fsum(v.pow(4 / 3).sum().item() for v in sizes)
    factor = math.sqrt(powers / squares)
    return [v.pow(1 / 3).mul_(factor) for v in sizes]


def elliptic(weights: Sequence[torch.Tensor], floor: float) -> list[torch.Tensor]:
    """Return ``|w_i|`` with mean square 1, raised to ``floor`` times its largest entry.

    Zeros give ones.
    """
    sizes = _scaled(weights, floor)
    if sizes is None:
        return [torch.ones_like(w, dtype=torch.float64) for w in weights]
    squares = math.fsum(v.square().sum().item() for v in sizes)
    factor = math.sqrt(sum(v.numel() for v in sizes) / squares)
    return [v * factor for v in sizes]


def _scaled(weights: Sequence[torch.Tensor], floor: float) -> list[torch.Tensor] | None:
    """Return ``|w| / max |w|``, at least ``floor``; None if all are zero."""
    sizes = [w.detach().double().abs() for w in weights]
    largest = max((v.max().item() for v in sizes if v.numel()), default=0.0)
    return [(v / largest).clamp_(min=floor) for v in sizes] if largest > 0 else None


def count(work: OpAccount, sizes: Sequence[int], *, powers: bool, raised: bool) -> None:
    """Count relative scales of weights that are not all zero.

    Args:
        work: where.
        sizes: of the parameters.
        powers: of ``printed``; else of ``elliptic``.
        raised: whether small scales of ``printed`` are raised afterwards.
    """
    line = "scales"
    for n in sizes:
        work.each(line, n, AND=1)
        work.folded(line, n, 1, "CMP", "MUX")
        work.read_out(line)
        work.each(line, n, DIV=1)
        work.each(line, n, CMP=1, MUX=1)
        work.each(line, n, MUL=1)
        work.summed(line, n)
        work.each(line, n, MUL=1)
        if powers:
            work.each(line, n, LOG=1, MUL=1, EXP=1)
            work.each(line, n, LOG=1, MUL=1, EXP=1)
            work.summed(line, n)
        if powers and raised:
            work.each(line, n, CMP=1, MUX=1)
