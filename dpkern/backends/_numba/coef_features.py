"""The loss whose coefficients hold the hidden layer (csrc/cpu/coef_features.cpp)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.autograd.graph import increment_version

from ...ops import coef
from .coef import add_noise, flat, own_room, refuse, release_of, sum_of_lanes
from .compile import Array, Number, inner, kernel
from .draws import TILE
from .parallel import in_parts, team_of

_GRAIN = 16 * TILE  # coefficients worth a thread
_LANES, _RUN = coef.LANES, coef.RUN


@inner
def noised(values: Array, release: Any, position: Number, row: Number, room: Any) -> None:
    """Noise of any number of coefficients from ``position`` on, all of one record."""
    if not release[0]:
        return
    for start in range(0, len(values), TILE):
        count = min(TILE, len(values) - start)
        add_noise(values[start : start + count], release, position + start, row, count, room)


@inner
def row_and_columns(a2: Array, weights: Array, of_row: Number, columns: Array) -> Any:
    """``a2 . W``; and ``a2 W_e`` joins the sums of the columns."""
    lanes = np.zeros(_LANES, np.float64)
    for g in range(len(a2)):
        wide = np.float64(a2[g])
        lanes[g % _LANES] += wide * weights[g]
        columns[g] += wide * of_row
    return sum_of_lanes(lanes)


@kernel
def _expanded(
    hidden: Array, targets: Array, weights: Array, release: Any, out: Any, begin: int, end: int
) -> None:
    loss, of_runs, dhidden = out
    classes, width = weights.shape
    number, places = hidden.dtype.type, release[3]
    linear_room, quadratic_room = own_room(), own_room()
    a1, a2 = np.empty(width, hidden.dtype), np.empty(width, hidden.dtype)
    for record in range(begin * _RUN, min(end * _RUN, len(hidden))):
        h, by_weights = hidden[record], of_runs[record // _RUN]
        by_hidden, total = np.zeros(width, np.float64), 0.0
        for label in range(classes):
            pair, w = record * classes + label, weights[label]
            factor = number(0.5) - targets[record, label]
            for e in range(width):
                a1[e] = factor * h[e]
            noised(a1, release, places[0] + pair * width, record, linear_room)
            terms, scores = np.zeros(_LANES, np.float64), np.zeros(_LANES, np.float64)
            columns, sums = np.zeros(width, np.float64), np.empty(width, np.float64)
            for e in range(width):
                for g in range(width):
                    a2[g] = h[e] * (h[g] * number(0.125))
                at = places[1] + (pair * width + e) * width
                noised(a2, release, at, record, quadratic_room)
                linear = np.float64(a1[e]) + row_and_columns(a2, w, w[e], columns)
                terms[e % _LANES] += w[e] * linear
                scores[e % _LANES] += np.float64(h[e]) * w[e]
                sums[e] = linear
            total += sum_of_lanes(terms)
            slope = np.float64(factor) + 0.25 * sum_of_lanes(scores)
            for e in range(width):
                by_weights[label, e] += sums[e] + columns[e]
                by_hidden[e] += w[e] * slope
        loss[record] = total
        for e in range(width):
            dhidden[record, e] = number(by_hidden[e])


def _run_expanded(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor,
    *,
    noise: coef.Noise | None = None,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    made = out or coef.empty_results(hidden, weights)
    (classes, width), records = weights.shape, len(hidden)
    h, y, w = (t.detach().numpy() for t in (hidden, targets, weights.double()))
    runs = -(-records // _RUN)
    of_runs = np.zeros((runs, classes, width))
    release = release_of(noise, records * classes * width, hidden)
    places = made[0].numpy(), of_runs, made[2].detach().numpy()
    each = max(1, _RUN * classes * width**2)
    in_parts(
        runs,
        team_of(runs, max(1, _GRAIN // each)),
        lambda _, begin, end: _expanded(h, y, w, release, places, begin, end),
    )
    total = np.zeros((classes, width))
    for of_run in of_runs:
        total += of_run
    flat(made[1])[0][:] = total.ravel()
    increment_version(made)
    return made


KERNELS: tuple[tuple[str, Any, Any], ...] = (("coef.expanded", _run_expanded, refuse),)
"""``(op, run, refuse)``."""
