"""Run recurrent networks on batch-first tensors, layer by layer and direction by direction.

torch computes a whole network in one call that takes all its parameters. Here each layer and
direction has a call of its own (``fused_recurrent``). Layers that this call does not support
(packed sequences, projections, 16 bits, devices) run as ordinary torch code: a loop over time of
``F.linear`` and elementwise functions on ``[B, ...]``, in which the rule of ``F.linear`` applies to
every weight. The inputs of all time steps go through one product; the states cannot, so that T
steps cost T small products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...base.errors import InvalidInput, UnsupportedModule
from ..parameter import is_private, source_of
from . import fused_recurrent as fused
from .expression import as_samples
from .packed import Packing

State = tuple[Tensor, ...]
Step = Callable[[Tensor, State, "_Weights"], State]


@dataclass(frozen=True)
class _Kind:
    """Kind of network: its time step, the tensors in its state, and all time steps in one call."""

    step: Step
    states: int
    cell: fused.FusedCell
    operation: str


@dataclass(frozen=True)
class _Weights:
    """Weights of one layer and direction.

    They are ``w_ih [G H, F]``, ``w_hh [G H, H']``, biases ``[G H]`` or None, and ``w_hr [H', H]``
    of an LSTM with projections.
    """

    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor | None = None
    b_hh: Tensor | None = None
    w_hr: Tensor | None = None

    def of_input(self, x: Tensor) -> Tensor:
        return F.linear(x, self.w_ih, self.b_ih)

    def of_state(self, h: Tensor) -> Tensor:
        return F.linear(h, self.w_hh, self.b_hh)


def _lstm_step(from_input: Tensor, state: State, weights: _Weights) -> State:
    h, c = state
    i, f, g, o = (from_input + weights.of_state(h)).chunk(4, dim=1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    h = torch.sigmoid(o) * torch.tanh(c)
    return (h if weights.w_hr is None else F.linear(h, weights.w_hr)), c


def _gru_step(from_input: Tensor, state: State, weights: _Weights) -> State:
    (h,) = state
    r, z, n = from_input.chunk(3, dim=1)
    r_h, z_h, n_h = weights.of_state(h).chunk(3, dim=1)
    z = torch.sigmoid(z + z_h)
    n = torch.tanh(n + torch.sigmoid(r + r_h) * n_h)
    return ((h - n) * z + n,)


def _tanh_step(from_input: Tensor, state: State, weights: _Weights) -> State:
    return (torch.tanh(from_input + weights.of_state(state[0])),)


def _relu_step(from_input: Tensor, state: State, weights: _Weights) -> State:
    return (torch.relu(from_input + weights.of_state(state[0])),)


_LSTM = _Kind(_lstm_step, 2, fused.Lstm(), "lstm")
_GRU = _Kind(_gru_step, 1, fused.Gru(), "gru")
_RNN_TANH = _Kind(_tanh_step, 1, fused.Rnn("tanh"), "rnn_tanh")
_RNN_RELU = _Kind(_relu_step, 1, fused.Rnn("relu"), "rnn_relu")


def lstm(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Run ``torch._VF.lstm``, both overloads: same arguments, same results.

    ``c' = sigmoid(f) c + sigmoid(i) tanh(g)``, ``h' = sigmoid(o) tanh(c')`` with
    ``(i, f, g, o) = W_ih x + b_ih + W_hh h + b_hh``, and ``h' W_hr^T`` where there are projections
    (Hochreiter and Schmidhuber 1997; Sak et al. 2014).

    Args:
        arguments: ``(input, (h, c), params, has_biases, num_layers, dropout, train, bidirectional,
            batch_first)`` or, for packed sequences, ``(data, batch_sizes, (h, c), params,
            has_biases, num_layers, dropout, train, bidirectional)``; ``input`` is ``[T, B, F]`` or
            batch first, the states are ``[layers * directions, B, H]``.

    Returns:
        ``(output, h, c)`` in the layout of the input.

    Raises:
        UnsupportedModule: an unbatched input, or packed data of unknown order.
        InvalidInput: states for another number of samples.
    """
    output, (h, c) = _run(_LSTM, arguments)
    return output, h, c


def gru(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Run ``torch._VF.gru``, both overloads; arguments, layout and errors as in ``lstm``.

    ``h' = (1 - z) n + z h`` with ``r, z = sigmoid(W_ih x + b_ih + W_hh h + b_hh)`` and
    ``n = tanh(W_in x + b_in + r (W_hn h + b_hn))`` (Cho et al. 2014, in the form of torch).
    """
    output, (h,) = _run(_GRU, arguments)
    return output, h


def rnn_tanh(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Run ``torch._VF.rnn_tanh``, both overloads: ``h' = tanh(W_ih x + b_ih + W_hh h + b_hh)``."""
    output, (h,) = _run(_RNN_TANH, arguments)
    return output, h


def rnn_relu(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Run ``torch._VF.rnn_relu``, both overloads: ``h' = relu(W_ih x + b_ih + W_hh h + b_hh)``."""
    output, (h,) = _run(_RNN_RELU, arguments)
    return output, h


def lstm_cell(
    input: Tensor,
    hx: Sequence[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run ``torch._VF.lstm_cell``: one step on ``input [B, F]`` and states ``[B, H]``."""
    h, c = _step(_lstm_step, input, tuple(hx), _Weights(w_ih, w_hh, b_ih, b_hh))
    return h, c


def gru_cell(
    input: Tensor,
    hx: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Tensor:
    """Run ``torch._VF.gru_cell``: one step on ``input [B, F]`` and a state ``[B, H]``."""
    return _step(_gru_step, input, (hx,), _Weights(w_ih, w_hh, b_ih, b_hh))[0]


def rnn_tanh_cell(
    input: Tensor,
    hx: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Tensor:
    """Run ``torch._VF.rnn_tanh_cell``: one step on ``input [B, F]`` and a state ``[B, H]``."""
    return _step(_tanh_step, input, (hx,), _Weights(w_ih, w_hh, b_ih, b_hh))[0]


def rnn_relu_cell(
    input: Tensor,
    hx: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Tensor:
    """Run ``torch._VF.rnn_relu_cell``: one step on ``input [B, F]`` and a state ``[B, H]``."""
    return _step(_relu_step, input, (hx,), _Weights(w_ih, w_hh, b_ih, b_hh))[0]


def _step(cell: Step, x: Tensor, state: State, weights: _Weights) -> State:
    _batched(x, 2)
    for h in state:
        _same_samples(h.shape[0], x.shape[0])
        if is_private(h):
            raise _learned_state(h)
    state = tuple(h if h.requires_grad else as_samples(h.view_as(h)) for h in state)
    return cell(weights.of_input(x), state, weights)


def _run(kind: _Kind, arguments: tuple[Any, ...]) -> tuple[Tensor, State]:
    """Run a whole network; return its outputs and last states."""
    packing: Packing | None = None
    if isinstance(arguments[3], bool):
        x, hx, *rest, batch_first = arguments
        _batched(x, 3)
        x = x if batch_first else x.transpose(0, 1)
    else:
        data, batch_sizes, hx, *rest = arguments
        _batched(data, 2)
        batch_first = True
        packing = Packing.of(batch_sizes, data.device)
        x = packing.pad(data)
    params, has_biases, num_layers, dropout, train, bidirectional = rest
    hx = (hx,) if isinstance(hx, Tensor) else tuple(hx)
    if x.shape[1] == 0:
        raise InvalidInput(
            "input",
            expected="at least one time step",
            got=f"shape {list(x.shape)}",
            remedy="Leave out sequences of length 0.",
        )
    for h in hx:
        _same_samples(h.shape[1], x.shape[0])
        if is_private(h):
            raise _learned_state(h)
    if packing is not None:
        hx = tuple(packing.unsort(h) for h in hx)
    valid = None if packing is None else packing.valid

    directions = 2 if bidirectional else 1
    weights = _grouped(tuple(params), has_biases, num_layers * directions)
    last: list[State] = []
    for layer in range(num_layers):
        if layer > 0 and dropout > 0:
            x = F.dropout(x, dropout, train)
        outputs = []
        for direction in range(directions):
            index = layer * directions + direction
            start = tuple(as_samples(h[index]) for h in hx)
            y, end = _direction(kind, x, start, weights[index], valid, backwards=direction == 1)
            outputs.append(y)
            last.append(end)
        x = outputs[0] if directions == 1 else torch.cat(outputs, dim=2)
    ends = tuple(torch.stack([state[index] for state in last]) for index in range(kind.states))
    if packing is not None:
        return packing.gather(x), tuple(packing.sort(h) for h in ends)
    # Contiguous, because callers with time first may use view().
    return (x if batch_first else x.transpose(0, 1).contiguous()), ends


def _direction(
    kind: _Kind,
    x: Tensor,
    state: State,
    weights: _Weights,
    valid: Tensor | None,
    *,
    backwards: bool,
) -> tuple[Tensor, State]:
    """Run a layer in one direction, ``[B, T, F]`` to ``[B, T, H]`` and the last states.

    A sample's state does not change after its end, so that the direction backwards in time begins
    at its last entry.
    """
    flat = weights.w_ih, weights.w_hh, weights.b_ih, weights.b_hh
    if valid is None and weights.w_hr is None and fused.fits(x, state, flat):
        operation = f"{kind.operation} backwards" if backwards else kind.operation
        return fused.run(kind.cell, x, state, flat, reverse=backwards, operation=operation)
    # unbind and not x[:, t]: its gradient is one stack and not T full-sized sums.
    steps = weights.of_input(x).unbind(1)
    alive = None if valid is None else valid.unsqueeze(2).unbind(1)
    outputs: list[Tensor] = []
    order = range(len(steps))
    for t in reversed(order) if backwards else order:
        moved = kind.step(steps[t], state, weights)
        if alive is not None:
            moved = tuple(
                torch.where(alive[t], new, old) for new, old in zip(moved, state, strict=True)
            )
        state = moved
        outputs.append(state[0])
    if backwards:
        outputs.reverse()
    return torch.stack(outputs, dim=1), state


def _grouped(params: tuple[Tensor, ...], has_biases: bool, count: int) -> list[_Weights]:
    """Return torch's flat list of parameters, split by layer and direction."""
    each = len(params) // count
    found = []
    for index in range(count):
        some = params[index * each : (index + 1) * each]
        b_ih, b_hh = some[2:4] if has_biases else (None, None)
        w_hr = some[-1] if each % 2 else None
        found.append(_Weights(some[0], some[1], b_ih, b_hh, w_hr))
    return found


def _batched(x: Tensor, dims: int) -> None:
    if x.dim() != dims:
        raise UnsupportedModule(
            "input",
            expected=f"a batched input of {dims} dimensions",
            got=f"shape {list(x.shape)}",
            remedy="Add the batch dimension with unsqueeze: this input has no sample axis.",
        )


def _same_samples(got: int, expected: int) -> None:
    if got != expected:
        raise InvalidInput(
            "hx",
            expected=f"a state for {expected} samples",
            got=f"one for {got}",
            remedy="Make the state with the batch size of the input.",
        )


def _learned_state(h: Tensor) -> UnsupportedModule:
    return UnsupportedModule(
        source_of(h).name,
        expected="an initial state in which every sample has its own part",
        got="a trained one, the same for all samples",
        remedy="Let a layer make it for each sample: nn.Linear(1, H, bias=False), applied to "
        "x.new_ones(len(x), 1), has the same values and trains them.",
    )
