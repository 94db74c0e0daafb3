"""Recurrent layers: closed forms of their passes through all time steps.

Per time step and sample a product of ``[x, h]`` with all rows of both weights, and backwards one of
their gradients. ``sigmoid(x)`` is ``1 / (1 + e^-|x|)``, times ``e^-|x|`` where x is negative;
``tanh(|x|)`` is ``-m / (2 + m)`` with ``m = e^(-2 |x|) - 1``, and takes the sign of x.
"""

from __future__ import annotations

from typing import Any

import torch

from ...base.counts import Counts, Itemised
from ._form import Form
from ._layers import SIGMOID, dots, itemised

_TANH = Counts(AND=1, MUL=1, EXP=1, SUB=2, ADD=1, DIV=1, CMP=1, MUX=1)
_RELU = Counts(CMP=1, MUX=1)


def _forward(
    x: torch.Tensor,
    states: tuple[torch.Tensor, ...],
    weights: tuple[torch.Tensor | None, ...],
    results: int,
    each: Counts,
) -> Itemised:
    """Count a forward pass. ``results``: numbers per hidden unit and step;
    ``each``: what a unit takes in one step."""
    (batch, steps, _), hidden = x.shape, states[0].shape[1]
    used = [w for w in weights if w is not None]
    rows, biases = used[0].shape[0], len(used) - 2
    units = batch * steps * hidden
    read = x.numel() + sum(h.numel() for h in states) + sum(w.numel() for w in used)
    return itemised(
        [(read if units else 0, x.dtype)],
        [(units * results, x.dtype)],
        products=dots(batch * steps * sum(w.numel() for w in used[:2])),
        sums=Counts(ADD=batch * steps * rows * (1 + biases)),
        cells=units * each,
    )


def lstm(
    x: torch.Tensor,
    h: torch.Tensor,
    c: torch.Tensor,
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    b_ih: torch.Tensor | None,
    b_hh: torch.Tensor | None,
    **_: Any,
) -> Itemised:
    """Count ``recurrent.lstm``."""
    each = 3 * SIGMOID + 2 * _TANH + Counts(MUL=3, ADD=1)
    return _forward(x, (h, c), (w_ih, w_hh, b_ih, b_hh), 7, each)


def gru(
    x: torch.Tensor,
    h: torch.Tensor,
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    b_ih: torch.Tensor | None,
    b_hh: torch.Tensor | None,
    **_: Any,
) -> Itemised:
    """Count ``recurrent.gru``."""
    each = 2 * SIGMOID + _TANH + Counts(MUL=3, ADD=1, SUB=1)
    return _forward(x, (h,), (w_ih, w_hh, b_ih, b_hh), 6, each)


def rnn(
    x: torch.Tensor,
    h: torch.Tensor,
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    b_ih: torch.Tensor | None,
    b_hh: torch.Tensor | None,
    *,
    nonlinearity: str = "tanh",
    **_: Any,
) -> Itemised:
    """Count ``recurrent.rnn``."""
    each = _TANH if nonlinearity == "tanh" else _RELU
    return _forward(x, (h,), (w_ih, w_hh, b_ih, b_hh), 2, each)


def _backward(
    read: tuple[torch.Tensor | None, ...],
    weights: tuple[torch.Tensor, torch.Tensor],
    results: int,
    each: Counts,
) -> Itemised:
    """Count a backward pass. ``read``: everything but the weights, the first of it
    ``[B, T, .]``; ``results``: blocks of gradients per hidden unit, which are summed over time;
    ``each``: as in ``_forward``."""
    first, (w_ih, w_hh) = read[0], weights
    assert first is not None
    (batch, steps, _), (rows, hidden) = first.shape, w_hh.shape
    states = 2 if rows == 4 * hidden else 1
    units, made = batch * steps * hidden, results * batch * hidden
    numbers = sum(t.numel() for t in (*read, *weights) if t is not None)
    inputs = batch * steps * w_ih.shape[1]
    return itemised(
        [(numbers if batch else 0, first.dtype)],
        [(made * (steps + 1) + inputs + states * batch * hidden, first.dtype)],
        walked=("products",),
        products=dots(batch * steps * (w_ih.numel() + w_hh.numel())),
        cells=units * each,
        sums=Counts(ADD=made * steps),
    )


def lstm_backward(
    gates: torch.Tensor,
    cells: torch.Tensor,
    c: torch.Tensor,
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    gy: torch.Tensor | None,
    gh: torch.Tensor | None,
    gc: torch.Tensor | None,
    **_: Any,
) -> Itemised:
    """Count ``recurrent.lstm_backward``."""
    each = _TANH + Counts(MUL=16, SUB=5, ADD=1 + (gy is not None))
    return _backward((gates, cells, c, gy, gh, gc), (w_ih, w_hh), 4, each)


def gru_backward(
    gates: torch.Tensor,
    before: torch.Tensor,
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    gy: torch.Tensor | None,
    gh: torch.Tensor | None,
    **_: Any,
) -> Itemised:
    """Count ``recurrent.gru_backward``."""
    each = Counts(MUL=11, SUB=5, ADD=1 + (gy is not None))
    return _backward((gates, before, gy, gh), (w_ih, w_hh), 6, each)


def rnn_backward(
    before: torch.Tensor,
    last: torch.Tensor,
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    gy: torch.Tensor | None,
    gh: torch.Tensor | None,
    *,
    nonlinearity: str = "tanh",
    **_: Any,
) -> Itemised:
    """Count ``recurrent.rnn_backward``."""
    slope = Counts(MUL=1, SUB=1) if nonlinearity == "tanh" else Counts(CMP=1, MUX=1)
    each = slope + Counts(MUL=1, ADD=int(gy is not None))
    return _backward((before, last, gy, gh), (w_ih, w_hh), 1, each)


FORMS: dict[str, Form] = {
    "recurrent.gru": gru,
    "recurrent.gru_backward": gru_backward,
    "recurrent.lstm": lstm,
    "recurrent.lstm_backward": lstm_backward,
    "recurrent.rnn": rnn,
    "recurrent.rnn_backward": rnn_backward,
}
