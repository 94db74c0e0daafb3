"""Recurrent layers by torch's own, which keep less for the backward pass; and plain products."""

from __future__ import annotations

from collections.abc import Callable
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


def _forwards(args: Arguments) -> bool:
    return not args["reverse"] and args.get("nonlinearity", "tanh") == "tanh"


def _both(kind: str) -> tuple[Formulation, ...]:
    return (
        Formulation(f"nn.{kind.upper()}", lambda args: _layer(kind, args), _forwards),
        Formulation("loop of cells", lambda args: _looped(kind, args), _forwards),
    )


def _addmm(args: Arguments) -> Callable[[], Any]:
    x, w, bias = args["x"], args["w"], args["bias"]
    made = torch.empty(len(x), w.shape[1])
    if bias is None:
        return lambda: torch.mm(x, w, out=made)
    return lambda: torch.addmm(bias, x, w, out=made)


FORMULATIONS = {
    **{f"recurrent.{kind}": _both(kind) for kind in KINDS},
    "product.matmul": (
        Formulation("addmm", _addmm),
        Formulation("linear", lambda a: lambda: F.linear(a["x"], a["w"].t(), a["bias"])),
    ),
}
