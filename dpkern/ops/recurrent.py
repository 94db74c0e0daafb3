"""Recurrent layers in one direction, forwards and backwards, all time steps in one call.

B samples, T time steps, D inputs, H hidden units. With ``s = W_ih x_t + b_ih`` and
``v = W_hh h_(t-1) + b_hh``, cut into blocks of H entries in torch's order:

    LSTM   i, f, o = sigmoid(s + v), g = tanh(s_g + v_g),
           c_t = f c_(t-1) + i g, h_t = o tanh(c_t)         (Hochreiter and Schmidhuber 1997)
    GRU    r, z = sigmoid(s + v), n = tanh(s_n + r v_n),
           h_t = (1 - z) n + z h_(t-1)                      (Cho et al. 2014, in the form of torch)
    RNN    h_t = tanh(s + v), or relu

Backwards, ``d`` is the gradient by ``s``. A sample's gradients are then those of linear layers with
T positions: ``sum_t d_t x_t^T``, ``sum_t d_t h_(t-1)^T`` and ``sum_t d_t``. With ``reverse`` time
runs from the last step to the first: what is "before" a step stands behind it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ..base.dispatch import op
from ..base.errors import InvalidInput
from ..base.signature import Float

Nonlinearity = Literal["tanh", "relu"]


def _check_blocks(w_hh: Tensor, blocks: int) -> None:
    rows, hidden = w_hh.shape
    if rows != blocks * hidden:
        raise InvalidInput(
            "w_hh",
            expected=f"{blocks} rows for each of its {hidden} columns",
            got=f"shape {list(w_hh.shape)}",
            remedy="Pass the weights of one layer and direction, as torch's modules hold them.",
        )


def _check_gates(gates: Tensor, hidden: int) -> None:
    if gates.shape[2] != 4 * hidden:
        raise InvalidInput(
            "gates",
            expected=f"[B, T, {4 * hidden}]",
            got=f"shape {list(gates.shape)}",
            remedy="Pass what the forward op returned.",
        )


def _check_lstm(
    x: Tensor,
    h: Tensor,
    c: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    reverse: bool,
) -> None:
    _check_blocks(w_hh, 4)


def _check_gru(
    x: Tensor,
    h: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    reverse: bool,
) -> None:
    _check_blocks(w_hh, 3)


def _check_lstm_backward(
    gates: Tensor,
    cells: Tensor,
    c: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    gy: Tensor | None,
    gh: Tensor | None,
    gc: Tensor | None,
    reverse: bool,
) -> None:
    _check_blocks(w_hh, 4)
    _check_gates(gates, w_hh.shape[1])


def _check_gru_backward(
    gates: Tensor,
    before: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    gy: Tensor | None,
    gh: Tensor | None,
    reverse: bool,
) -> None:
    _check_blocks(w_hh, 3)
    _check_gates(gates, w_hh.shape[1])


def _steps(count: int, reverse: bool) -> Iterator[int]:
    """Return the time steps in the order in which they are computed."""
    return iter(range(count - 1, -1, -1) if reverse else range(count))


def _before(states: Tensor, start: Tensor, t: int, reverse: bool) -> Tensor:
    """Return the state before step ``t``."""
    before = t + 1 if reverse else t - 1
    return states[:, before] if 0 <= before < states.shape[1] else start


@op(check=_check_lstm)
@torch.no_grad()
def lstm(
    x: Float[Tensor, "B T D"],
    h: Float[Tensor, "B H"],
    c: Float[Tensor, "B H"],
    w_ih: Float[Tensor, "G D"],
    w_hh: Float[Tensor, "G H"],
    b_ih: Float[Tensor, "G"] | None,
    b_hh: Float[Tensor, "G"] | None,
    *,
    reverse: bool = False,
) -> tuple[
    Float[Tensor, "y: B T H"],
    Float[Tensor, "before: B T H"],
    Float[Tensor, "gates: B T 4*H"],
    Float[Tensor, "cells: B T H"],
]:
    """Run an LSTM over all time steps.

    Args:
        x: inputs ``[B, T, D]``, float32 or float64.
        h, c: states before the first step, ``[B, H]``, same dtype.
        w_ih, w_hh: ``[4 H, D]`` and ``[4 H, H]``, same dtype.
        b_ih, b_hh: ``[4 H]``, same dtype, or None.
        reverse: whether time runs backwards.

    Returns:
        ``y`` ``[B, T, H]``, the states ``h_t``; ``before``, the states ``h_(t-1)``; ``gates``
        ``[B, T, 4 H]``, the values of i, f, g and o; ``cells`` ``[B, T, H]``, the states ``c_t``.
        The CPU's kernel gives a sample the same bits in every batch and with any number of threads.

    Raises:
        InvalidInput: wrong type, shape, dtype, device or layout.
    """
    y = x.new_empty((*x.shape[:2], h.shape[1]))
    before, cells = torch.empty_like(y), torch.empty_like(y)
    gates = x.new_empty((*x.shape[:2], w_hh.shape[0]))
    from_input = F.linear(x, w_ih, b_ih)
    for t in _steps(x.shape[1], reverse):
        before[:, t] = h
        i, f, g, o = (from_input[:, t] + F.linear(h, w_hh, b_hh)).chunk(4, dim=1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        c = f * c + i * g
        h = o * c.tanh()
        y[:, t], cells[:, t], gates[:, t] = h, c, torch.cat((i, f, g, o), dim=1)
    return y, before, gates, cells


@op(check=_check_lstm_backward)
@torch.no_grad()
def lstm_backward(
    gates: Float[Tensor, "B T G"],
    cells: Float[Tensor, "B T H"],
    c: Float[Tensor, "B H"],
    w_ih: Float[Tensor, "G D"],
    w_hh: Float[Tensor, "G H"],
    gy: Float[Tensor, "B T H"] | None,
    gh: Float[Tensor, "B H"] | None,
    gc: Float[Tensor, "B H"] | None,
    *,
    reverse: bool = False,
) -> tuple[
    Float[Tensor, "d: B T G"],
    Float[Tensor, "sums: B G"],
    Float[Tensor, "dx: B T D"],
    Float[Tensor, "dh: B H"],
    Float[Tensor, "dc: B H"],
]:
    """Propagate gradients back through all time steps of ``lstm``.

    Args:
        gates, cells: what ``lstm`` returned.
        c: the state before the first step, ``[B, H]``.
        w_ih, w_hh: the weights. If ``dx`` is not needed, ``w_ih`` may have no columns.
        gy: gradient by ``y``; gh, gc: by the states after the last step. None means zeros.
        reverse: as in ``lstm``.

    Returns:
        ``d`` ``[B, T, 4 H]``, the gradients by what the nonlinearities take; their sums over time
        ``[B, 4 H]``, which are the gradients of both biases; and the gradients by the inputs,
        ``[B, T, D]``, and by both states before the first step, ``[B, H]``. Bits as in ``lstm``.

    Raises:
        InvalidInput: wrong type, shape, dtype, device or layout.
    """
    d, dx = torch.empty_like(gates), gates.new_zeros((*gates.shape[:2], w_ih.shape[1]))
    dh = torch.zeros_like(c) if gh is None else gh.clone()
    dc = torch.zeros_like(c) if gc is None else gc.clone()
    for t in _steps(gates.shape[1], not reverse):
        i, f, g, o = gates[:, t].chunk(4, dim=1)
        tanh_c = cells[:, t].tanh()
        dh = dh if gy is None else dh + gy[:, t]
        dc = dc + dh * o * (1 - tanh_c * tanh_c)
        d[:, t] = torch.cat(
            (
                dc * g * (i * (1 - i)),
                dc * _before(cells, c, t, reverse) * (f * (1 - f)),
                dc * i * (1 - g * g),
                dh * tanh_c * (o * (1 - o)),
            ),
            dim=1,
        )
        dc = dc * f
        dh = d[:, t] @ w_hh
        dx[:, t] = d[:, t] @ w_ih
    return d, d.sum(1), dx, dh, dc


@op(check=_check_gru)
@torch.no_grad()
def gru(
    x: Float[Tensor, "B T D"],
    h: Float[Tensor, "B H"],
    w_ih: Float[Tensor, "G D"],
    w_hh: Float[Tensor, "G H"],
    b_ih: Float[Tensor, "G"] | None,
    b_hh: Float[Tensor, "G"] | None,
    *,
    reverse: bool = False,
) -> tuple[
    Float[Tensor, "y: B T H"], Float[Tensor, "before: B T H"], Float[Tensor, "gates: B T 4*H"]
]:
    """Run a GRU over all time steps.

    Args:
        x: inputs ``[B, T, D]``, float32 or float64.
        h: the state before the first step, ``[B, H]``, same dtype.
        w_ih, w_hh: ``[3 H, D]`` and ``[3 H, H]``, same dtype.
        b_ih, b_hh: ``[3 H]``, same dtype, or None.
        reverse: whether time runs backwards.

    Returns:
        ``y`` ``[B, T, H]``, the states ``h_t``; ``before``, the states ``h_(t-1)``; ``gates``
        ``[B, T, 4 H]``, the values of r, z, n and ``v_n``. Bits as in ``lstm``.

    Raises:
        InvalidInput: wrong type, shape, dtype, device or layout.
    """
    y = x.new_empty((*x.shape[:2], h.shape[1]))
    before = torch.empty_like(y)
    gates = x.new_empty((*x.shape[:2], 4 * h.shape[1]))
    from_input = F.linear(x, w_ih, b_ih)
    for t in _steps(x.shape[1], reverse):
        before[:, t] = h
        s_r, s_z, s_n = from_input[:, t].chunk(3, dim=1)
        v_r, v_z, v_n = F.linear(h, w_hh, b_hh).chunk(3, dim=1)
        r, z = (s_r + v_r).sigmoid(), (s_z + v_z).sigmoid()
        n = (s_n + r * v_n).tanh()
        h = (1 - z) * n + z * h
        y[:, t], gates[:, t] = h, torch.cat((r, z, n, v_n), dim=1)
    return y, before, gates


@op(check=_check_gru_backward)
@torch.no_grad()
def gru_backward(
    gates: Float[Tensor, "B T Q"],
    before: Float[Tensor, "B T H"],
    w_ih: Float[Tensor, "G D"],
    w_hh: Float[Tensor, "G H"],
    gy: Float[Tensor, "B T H"] | None,
    gh: Float[Tensor, "B H"] | None,
    *,
    reverse: bool = False,
) -> tuple[
    Float[Tensor, "d: B T G"],
    Float[Tensor, "e: B T G"],
    Float[Tensor, "sums_d: B G"],
    Float[Tensor, "sums_e: B G"],
    Float[Tensor, "dx: B T D"],
    Float[Tensor, "dh: B H"],
]:
    """Propagate gradients back through all time steps of ``gru``.

    Args:
        gates, before: what ``gru`` returned.
        w_ih, w_hh: the weights. If ``dx`` is not needed, ``w_ih`` may have no columns.
        gy: gradient by ``y``; gh: by the state after the last step. None means zeros.
        reverse: as in ``gru``.

    Returns:
        ``d`` ``[B, T, 3 H]``, the gradients by ``s``; ``e``, those by ``v``, which differ in the
        last block, where r multiplies v; the sums of both over time ``[B, 3 H]``, which are the
        gradients of the biases; and the gradients by the inputs, ``[B, T, D]``, and by the state
        before the first step, ``[B, H]``. Bits as in ``lstm``.

    Raises:
        InvalidInput: wrong type, shape, dtype, device or layout.
    """
    d = gates.new_empty((*gates.shape[:2], w_hh.shape[0]))
    e, dx = torch.empty_like(d), gates.new_zeros((*gates.shape[:2], w_ih.shape[1]))
    dh = gates.new_zeros((len(gates), w_hh.shape[1])) if gh is None else gh.clone()
    for t in _steps(gates.shape[1], not reverse):
        r, z, n, v_n = gates[:, t].chunk(4, dim=1)
        dh = dh if gy is None else dh + gy[:, t]
        d_n = dh * (1 - z) * (1 - n * n)
        d_z = dh * (before[:, t] - n) * (z * (1 - z))
        d_r = d_n * v_n * (r * (1 - r))
        d[:, t] = torch.cat((d_r, d_z, d_n), dim=1)
        e[:, t] = torch.cat((d_r, d_z, d_n * r), dim=1)
        dh = dh * z + e[:, t] @ w_hh
        dx[:, t] = d[:, t] @ w_ih
    return d, e, d.sum(1), e.sum(1), dx, dh


@op()
@torch.no_grad()
def rnn(
    x: Float[Tensor, "B T D"],
    h: Float[Tensor, "B H"],
    w_ih: Float[Tensor, "H D"],
    w_hh: Float[Tensor, "H H"],
    b_ih: Float[Tensor, "H"] | None,
    b_hh: Float[Tensor, "H"] | None,
    *,
    nonlinearity: Nonlinearity = "tanh",
    reverse: bool = False,
) -> tuple[Float[Tensor, "y: B T H"], Float[Tensor, "before: B T H"]]:
    """Run an RNN of Elman's kind over all time steps.

    Args:
        x: inputs ``[B, T, D]``, float32 or float64.
        h: the state before the first step, ``[B, H]``, same dtype.
        w_ih, w_hh: ``[H, D]`` and ``[H, H]``, same dtype.
        b_ih, b_hh: ``[H]``, same dtype, or None.
        nonlinearity: ``tanh`` or ``relu``.
        reverse: whether time runs backwards.

    Returns:
        ``y`` ``[B, T, H]``, the states ``h_t``; ``before``, the states ``h_(t-1)``. Bits as in
        ``lstm``.

    Raises:
        InvalidInput: wrong type, shape, dtype, device or layout.
    """
    y = x.new_empty((*x.shape[:2], h.shape[1]))
    before = torch.empty_like(y)
    from_input = F.linear(x, w_ih, b_ih)
    for t in _steps(x.shape[1], reverse):
        before[:, t] = h
        total = from_input[:, t] + F.linear(h, w_hh, b_hh)
        h = total.tanh() if nonlinearity == "tanh" else total.relu()
        y[:, t] = h
    return y, before


@op()
@torch.no_grad()
def rnn_backward(
    before: Float[Tensor, "B T H"],
    last: Float[Tensor, "B H"],
    w_ih: Float[Tensor, "H D"],
    w_hh: Float[Tensor, "H H"],
    gy: Float[Tensor, "B T H"] | None,
    gh: Float[Tensor, "B H"] | None,
    *,
    nonlinearity: Nonlinearity = "tanh",
    reverse: bool = False,
) -> tuple[
    Float[Tensor, "d: B T H"],
    Float[Tensor, "sums: B H"],
    Float[Tensor, "dx: B T D"],
    Float[Tensor, "dh: B H"],
]:
    """Propagate gradients back through all time steps of ``rnn``.

    Args:
        before: what ``rnn`` returned; last: the state after the last step, ``[B, H]``.
        w_ih, w_hh: the weights. If ``dx`` is not needed, ``w_ih`` may have no columns.
        gy: gradient by ``y``; gh: by the state after the last step. None means zeros.
        nonlinearity, reverse: as in ``rnn``.

    Returns:
        ``d`` ``[B, T, H]``, the gradients by what the nonlinearity takes; their sums over time
        ``[B, H]``, which are the gradients of both biases; and the gradients by the inputs,
        ``[B, T, D]``, and by the state before the first step, ``[B, H]``. Bits as in ``lstm``.

    Raises:
        InvalidInput: wrong type, shape, dtype, device or layout.
    """
    d, dx = torch.empty_like(before), before.new_zeros((*before.shape[:2], w_ih.shape[1]))
    dh = torch.zeros_like(last) if gh is None else gh.clone()
    state = last
    for t in _steps(before.shape[1], not reverse):
        dh = dh if gy is None else dh + gy[:, t]
        d[:, t] = dh * (1 - state * state if nonlinearity == "tanh" else (state > 0).to(dh.dtype))
        state = before[:, t]
        dh = d[:, t] @ w_hh
        dx[:, t] = d[:, t] @ w_ih
    return d, d.sum(1), dx, dh


__all__ = [
    "Nonlinearity",
    "gru",
    "gru_backward",
    "lstm",
    "lstm_backward",
    "rnn",
    "rnn_backward",
]
