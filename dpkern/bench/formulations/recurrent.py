"""Recurrent layers by torch's own, which keep less for the backward pass; and plain products."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from ._formulation import Arguments, Formulation

KINDS = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "rnn": torch.nn.RNN}


def _layer(kind: str, args: Arguments) -> Callable[[], Any]:
    """Return torch's layer; its output is the op's first result."""
    x, state = args["x"], args["h"][None]
    options = {"nonlinearity": args["nonlinearity"]} if kind == "rnn" else {}
    biased = args["b_ih"] is not None
    layer: Any = KINDS[kind](x.shape[2], state.shape[2], bias=biased, batch_first=True, **options)
    names = ("w_ih", "w_hh", "b_ih", "b_hh")[: 4 if biased else 2]
    for name, parameter in zip(names, layer.parameters(), strict=True):
        parameter.data = args[name]
    before = (state, args["c"][None]) if kind == "lstm" else state
    return lambda: (layer(x, before)[0],)


def _looped(kind: str, args: Arguments) -> Callable[[], Any]:
    """Return a loop over time of torch's cell."""
    x, options = args["x"], (args["w_ih"], args["w_hh"], args["b_ih"], args["b_hh"])

    def call() -> Any:
        state, found = args["h"], []
        carried: Any = args.get("c")
        for t in range(x.shape[1]):
            if kind == "lstm":
                state, carried = torch.lstm_cell(x[:, t], (state, carried), *options)
            elif kind == "gru":
                state = torch.gru_cell(x[:, t], state, *options)
            else:
                state = torch.rnn_tanh_cell(x[:, t], state, *options)
            found.append(state)
        return (torch.stack(found, 1),)

    return call


def _hoisted(kind: str, args: Arguments) -> Callable[[], Any]:
    """Return a loop over time with the product with the inputs outside of it."""
    x, w_ih, b_ih, b_hh = (args[name] for name in ("x", "w_ih", "b_ih", "b_hh"))
    inputs, turned = x.transpose(0, 1).contiguous(), args["w_hh"].t().contiguous()
    width = turned.shape[0]

    def call() -> Any:
        state, found = args["h"], []
        carried: Any = args.get("c")
        for s in F.linear(inputs, w_ih, b_ih if kind == "gru" else b_ih + b_hh):
            if kind == "lstm":
                total = s.addmm_(state, turned)
                i, f, _, o = torch.sigmoid(total).chunk(4, 1)
                g = total[:, 2 * width : 3 * width].tanh()
                carried = torch.addcmul(f * carried, i, g)
                state = o * carried.tanh()
            elif kind == "gru":
                v = torch.addmm(b_hh, state, turned)
                r, z = torch.sigmoid(s[:, : 2 * width] + v[:, : 2 * width]).chunk(2, 1)
                n = torch.addcmul(s[:, 2 * width :], r, v[:, 2 * width :]).tanh_()
                state = torch.lerp(n, state, z)
            else:
                state = s.addmm_(state, turned).tanh_()
            found.append(state)
        return (torch.stack(found, 1),)

    return call


def _forwards(args: Arguments) -> bool:
    return not args["reverse"] and args.get("nonlinearity", "tanh") == "tanh"


# backwards, from kept activations: torch's own backward passes return sums over samples


def _lstm_backward(args: Arguments) -> Callable[[], Any]:
    """Return a loop over time with everything outside of it that does not depend on ``dh``."""
    gates, cells, c, w_ih, w_hh, gy = (
        args[n] for n in ("gates", "cells", "c", "w_ih", "w_hh", "gy")
    )
    width = cells.shape[2]

    def call() -> Any:
        i, f, g, o = gates.chunk(4, 2)
        tanh_c = cells.tanh()
        before = torch.cat((c[:, None], cells[:, :-1]), 1)
        of_cell = torch.cat((g * i * (1 - i), before * f * (1 - f), i * (1 - g * g)), 2)
        of_output = tanh_c * o * (1 - o)
        slope = o * (1 - tanh_c * tanh_c)
        d = torch.empty_like(gates)
        parts = d.view(*d.shape[:2], 4, width)
        rows = of_cell.view(*d.shape[:2], 3, width)
        dh, dc = _starts(args, cells)
        for t in range(gates.shape[1] - 1, -1, -1):
            dc = torch.addcmul(dc, dh, slope[:, t])
            torch.mul(rows[:, t], dc[:, None], out=parts[:, t, :3])
            torch.mul(of_output[:, t], dh, out=parts[:, t, 3])
            dc = dc * f[:, t]
            dh = _before(gy, t, d[:, t], w_hh)
        return d, d.sum(1), d @ w_ih, dh, dc

    return call


def _lstm_cell_backward(
    gates: torch.Tensor, after: torch.Tensor, before: torch.Tensor, dh: Any, dc: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    i, f, g, o = gates.chunk(4, 1)
    tanh_c = after.tanh()
    dc = dc + dh * o * (1 - tanh_c * tanh_c)
    by_cell = (dc * g * i * (1 - i), dc * before * f * (1 - f), dc * i * (1 - g * g))
    return torch.cat((*by_cell, dh * tanh_c * o * (1 - o)), 1), dc * f


def _lstm_backward_by_cells(
    cell: Callable[..., tuple[torch.Tensor, torch.Tensor]], args: Arguments
) -> Callable[[], Any]:
    """Return the loop with everything of a time step but its product in one function."""
    cells, w_ih, w_hh = args["cells"], args["w_ih"], args["w_hh"]
    gates, after = (args[name].transpose(0, 1).contiguous() for name in ("gates", "cells"))
    gy = None if args["gy"] is None else args["gy"].contiguous()
    before = [args["c"], *after[:-1]]

    def call() -> Any:
        made = torch.empty_like(gates)
        dh, dc = _starts(args, cells)
        for t in range(len(gates) - 1, -1, -1):
            d, dc = cell(gates[t], after[t], before[t], dh, dc)
            made[t] = d
            dh = _before(gy, t, d, w_hh)
        return made.transpose(0, 1), made.sum(0), (made @ w_ih).transpose(0, 1), dh, dc

    return call


def _lstm_backward_by_compiled_cells(args: Arguments) -> Callable[[], Any]:
    return _lstm_backward_by_cells(torch.compile(_lstm_cell_backward, dynamic=False), args)


def _starts(args: Arguments, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients by the states after the last step, its output's included."""
    zeros = like.new_zeros(len(like), like.shape[2])
    found = (zeros if args.get(name) is None else args[name] for name in ("gh", "gc"))
    dh, dc = found
    return (dh if args["gy"] is None else dh + args["gy"][:, -1]), dc


def _before(gy: torch.Tensor | None, t: int, d: torch.Tensor, w_hh: torch.Tensor) -> torch.Tensor:
    """Return the gradient by the state before step ``t``, with that of its output."""
    return d @ w_hh if gy is None or t == 0 else torch.addmm(gy[:, t - 1], d, w_hh)


def _gru_backward(args: Arguments) -> Callable[[], Any]:
    gates, before, w_ih, w_hh, gy = (args[n] for n in ("gates", "before", "w_ih", "w_hh", "gy"))
    width = before.shape[2]

    def call() -> Any:
        r, z, n, v_n = gates.chunk(4, 2)
        of_n = (1 - z) * (1 - n * n)
        slopes = torch.cat((of_n * v_n * r * (1 - r), (before - n) * z * (1 - z), of_n * r), 2)
        rows = slopes.view(*before.shape[:2], 3, width)
        e = torch.empty_like(slopes)
        parts = e.view_as(rows)
        by_state = torch.empty_like(before)
        dh, _ = _starts(args, before)
        for t in range(before.shape[1] - 1, -1, -1):
            by_state[:, t] = dh
            torch.mul(rows[:, t], dh[:, None], out=parts[:, t])
            adds = gy is not None and t > 0
            kept = torch.addcmul(gy[:, t - 1], dh, z[:, t]) if adds else dh * z[:, t]
            dh = torch.addmm(kept, e[:, t], w_hh)
        d = torch.cat((e[:, :, : 2 * width], of_n * by_state), 2)
        return d, e, d.sum(1), e.sum(1), d @ w_ih, dh

    return call


def _rnn_backward(args: Arguments) -> Callable[[], Any]:
    before, last, w_ih, w_hh, gy = (args[n] for n in ("before", "last", "w_ih", "w_hh", "gy"))

    def call() -> Any:
        states = torch.cat((before[:, 1:], last[:, None]), 1)
        slope = 1 - states * states
        d = torch.empty_like(before)
        dh, _ = _starts(args, before)
        for t in range(before.shape[1] - 1, -1, -1):
            torch.mul(dh, slope[:, t], out=d[:, t])
            dh = _before(gy, t, d[:, t], w_hh)
        return d, d.sum(1), d @ w_ih, dh

    return call


def _time_first(prepare: Callable[[Arguments], Callable[[], Any]]) -> Callable[..., Any]:
    """Return the same loop on tensors whose time steps lie together, as a loop may keep them."""

    def prepared(args: Arguments) -> Callable[[], Any]:
        moved = {
            name: value.transpose(0, 1).contiguous().transpose(0, 1)
            if isinstance(value, torch.Tensor) and value.dim() == 3
            else value
            for name, value in args.items()
        }
        return prepare(moved)

    return prepared


def _backwards(prepare: Callable[[Arguments], Callable[[], Any]]) -> tuple[Formulation, ...]:
    return (
        Formulation("loop over time", prepare, _forwards),
        Formulation("loop, time first", _time_first(prepare), _forwards),
    )


def _is_biased(args: Arguments) -> bool:
    return _forwards(args) and args["b_ih"] is not None


def _both(kind: str) -> tuple[Formulation, ...]:
    return (
        Formulation(f"nn.{kind.upper()}", lambda args: _layer(kind, args), _forwards),
        Formulation("loop of cells", lambda args: _looped(kind, args), _forwards),
        Formulation("loop of products", lambda args: _hoisted(kind, args), _is_biased),
    )


def _addmm(args: Arguments) -> Callable[[], Any]:
    x, w, bias = args["x"], args["w"], args["bias"]
    made = torch.empty(len(x), w.shape[1])
    if bias is None:
        return lambda: torch.mm(x, w, out=made)
    return lambda: torch.addmm(bias, x, w, out=made)


FORMULATIONS = {
    **{f"recurrent.{kind}": _both(kind) for kind in KINDS},
    "recurrent.lstm_backward": (
        *_backwards(_lstm_backward),
        Formulation(
            "loop of cells",
            partial(_lstm_backward_by_cells, _lstm_cell_backward),
            _forwards,
            compiles=True,
            in_parts=_lstm_backward_by_compiled_cells,
        ),
    ),
    "recurrent.gru_backward": _backwards(_gru_backward),
    "recurrent.rnn_backward": _backwards(_rnn_backward),
    "product.matmul": (
        Formulation("addmm", _addmm),
        Formulation("linear", lambda a: lambda: F.linear(a["x"], a["w"].t(), a["bias"])),
    ),
}
