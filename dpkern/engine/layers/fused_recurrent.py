"""Run recurrent layers in one call per direction, and capture the gradients of their weights.

    W_ih: sum_t d_t x_t^T     W_hh: sum_t e_t h_(t-1)^T     b_ih: sum_t d_t     b_hh: sum_t e_t

``d`` and ``e`` are a sample's gradients by ``W_ih x + b_ih`` and by ``W_hh h + b_hh``; they differ
only in a GRU. The per-sample gradient of each weight is that of a linear layer with T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ...base.dtypes import FLOATS
from ...ops import recurrent
from ...ops.ghost import linear
from ..parameter import (
    REPLAYED,
    applied,
    differentiable_once,
    is_constant,
    is_plainly_called,
    is_private,
    plain,
    source_of,
    without_torch_function,
)
from ..per_sample_gradients import ExplicitGradients, LinearGradients, PerSampleGradients
from ..uses import CapturedOp, GradientTarget
from .expression import is_buffer, whole_target_of

State = tuple[Tensor, ...]
Weights = Sequence[Tensor | None]
"""``w_ih``, ``w_hh``, ``b_ih``, ``b_hh``, as in the ops."""


class Forward(NamedTuple):
    """Results of the forward pass of a layer."""

    y: Tensor
    before: Tensor
    """The states ``h_(t-1)``, which ``w_hh`` multiplies."""
    ends: State
    """The states after the last step."""
    kept: tuple[Tensor, ...]
    """Tensors that the backward pass needs besides the weights."""


class Backward(NamedTuple):
    """Results of the backward pass of a layer."""

    d: Tensor
    e: Tensor
    sums_d: Tensor
    sums_e: Tensor
    dx: Tensor
    starts: State
    """The gradients by the states before the first step."""


class FusedCell(Protocol):
    """Interface of a kind of recurrent layer: its forward and its backward pass."""

    def forward(self, x: Tensor, state: State, weights: Any, *, reverse: bool) -> Forward:
        """Run all time steps of ``x [B, T, D]``."""

    def backward(self, kept: State, weights: Any, gradients: Any, *, reverse: bool) -> Backward:
        """Propagate the gradients by ``y`` and by the last states back through all time steps.

        ``weights`` are ``w_ih`` and ``w_hh``.
        """


class Lstm:
    """LSTM that runs in ``recurrent.lstm``."""

    def forward(self, x: Tensor, state: State, weights: Any, *, reverse: bool) -> Forward:
        y, before, gates, cells = recurrent.lstm(x, *state, *weights, reverse=reverse)
        ends = _last(y, reverse), _last(cells, reverse)
        return Forward(y, before, ends, (gates, cells, state[1]))

    def backward(self, kept: State, weights: Any, gradients: Any, *, reverse: bool) -> Backward:
        d, sums, dx, *starts = recurrent.lstm_backward(*kept, *weights, *gradients, reverse=reverse)
        return Backward(d, d, sums, sums, dx, tuple(starts))


class Gru:
    """GRU that runs in ``recurrent.gru``."""

    def forward(self, x: Tensor, state: State, weights: Any, *, reverse: bool) -> Forward:
        y, before, gates = recurrent.gru(x, *state, *weights, reverse=reverse)
        return Forward(y, before, (_last(y, reverse),), (gates, before))

    def backward(self, kept: State, weights: Any, gradients: Any, *, reverse: bool) -> Backward:
        d, e, sums_d, sums_e, dx, dh = recurrent.gru_backward(
            *kept, *weights, *gradients, reverse=reverse
        )
        return Backward(d, e, sums_d, sums_e, dx, (dh,))


@dataclass(frozen=True)
class Rnn:
    """Elman network that runs in ``recurrent.rnn``."""

    nonlinearity: recurrent.Nonlinearity

    def forward(self, x: Tensor, state: State, weights: Any, *, reverse: bool) -> Forward:
        options: Any = {"nonlinearity": self.nonlinearity, "reverse": reverse}
        y, before = recurrent.rnn(x, *state, *weights, **options)
        last = _last(y, reverse)
        return Forward(y, before, (last,), (before, last))

    def backward(self, kept: State, weights: Any, gradients: Any, *, reverse: bool) -> Backward:
        options: Any = {"nonlinearity": self.nonlinearity, "reverse": reverse}
        d, sums, dx, dh = recurrent.rnn_backward(*kept, *weights, *gradients, **options)
        return Backward(d, d, sums, sums, dx, (dh,))


def _last(states: Tensor, reverse: bool) -> Tensor:
    # Contiguous, and no view of another output.
    return states[:, 0 if reverse else -1].clone()


class _Layer(torch.autograd.Function):
    """Map of ``x [k B, T, D]`` and states ``[k B, H]`` to ``y [k B, T, H]`` and the last states."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        use: CapturedOp | Use,
        cell: FusedCell,
        reverse: bool,
        x: Tensor,
        *more: Tensor,
    ) -> State:
        ctx.use, ctx.cell, ctx.reverse, ctx.states = use, cell, reverse, len(more) - 4
        ctx.set_materialize_grads(False)
        x, state, weights = x.contiguous(), more[:-4], more[-4:]
        made = cell.forward(x, tuple(h.contiguous() for h in state), weights, reverse=reverse)
        ctx.save_for_backward(x, made.before, *weights[:2], *made.kept)
        return made.y, *made.ends

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        nothing = (None,) * 4
        if all(g is None for g in gradients):
            return *nothing, None, *(None,) * ctx.states, *nothing
        x, before, w_ih, w_hh, *kept = ctx.saved_tensors
        use: CapturedOp | Use = ctx.use
        to_input = ctx.needs_input_grad[4] and use.passes_on
        weights = w_ih if to_input else w_ih[:, :0], w_hh
        given = [None if g is None else g.contiguous() for g in gradients]
        made = ctx.cell.backward(tuple(kept), weights, given, reverse=ctx.reverse)
        if not isinstance(use, CapturedOp):
            use.take(x, before, made)
        elif use.wants(made.d):
            deliver(use, x, before, made)
        return *nothing, made.dx if to_input else None, *made.starts, *nothing


def deliver(use: CapturedOp, x: Tensor, before: Tensor, made: Backward) -> None:
    """Capture the gradients of a backward pass."""
    with without_torch_function():
        records, joint = gradients_of(use.batch, x, before, made)
        each = [use.per_batch(sums) for sums in (made.sums_d, made.sums_e)]
        biases = [rows[:, 0] if rows.shape[1] == 1 else rows.sum(1) for rows in each]
        arrive(use, records, joint, biases)


def gradients_of(
    batch: int, x: Tensor, before: Tensor, made: Backward
) -> tuple[list[LinearGradients], Callable[[], PerSampleGradients] | None]:
    """Return the gradients of both weights, and what ``_joined`` makes of them."""

    def samples(tensor: Tensor) -> Tensor:
        return tensor.reshape(batch, -1, tensor.shape[-1]) if batch else tensor

    a, states, d, e = map(samples, (x, before, made.d, made.e))
    joint = _joined(a, states, d) if made.e is made.d else None
    return [LinearGradients(a, d), LinearGradients(states, e)], joint


def arrive(
    use: CapturedOp,
    records: Sequence[PerSampleGradients],
    joint: Callable[[], PerSampleGradients] | None,
    biases: Sequence[Tensor],
) -> None:
    """Add gradients of both weights, with ``joint`` for their norm, and of the biases."""
    use.arrive_together(dict(enumerate(records)), joint)
    for which, rows in enumerate(biases, 2):
        if use.targets[which] is not None:
            use.arrive(which, ExplicitGradients(rows))


def _joined(a: Tensor, states: Tensor, d: Tensor) -> Callable[[], PerSampleGradients] | None:
    """Return a maker of both weights' gradients as one, if that saves products, else None.

    If both norms are taken from Gram matrices, the joined norm needs that of ``d`` only once.
    """
    cheaper = linear.norm_route(a, d) == linear.norm_route(states, d) == "gram"
    return (lambda: LinearGradients(torch.cat((a, states), 2), d)) if cheaper else None


class Use(Protocol):
    """A use that a program replays (``engine.program.recurrent``)."""

    passes_on: bool
    """Whether the gradient of its input is needed."""

    def take(self, x: Tensor, before: Tensor, made: Backward) -> None:
        """Take the gradients of a backward pass."""


def fits(x: Tensor, state: State, weights: Weights) -> bool:
    """Whether ``run`` can take a layer in one direction."""
    given = [w for w in weights if w is not None]
    private = next((w for w in given if is_private(w)), None)
    if private is None or any(map(is_private, (x, *state))) or not is_constant(*given):
        return False
    alike = all(
        t.dtype is x.dtype and t.device == x.device and t.dim() == n
        for t, n in ((x, 3), *((h, 2) for h in state), *zip(given, (2, 2, 1, 1), strict=False))
    )
    return (
        alike
        and x.is_cpu
        and x.dtype in FLOATS
        and not torch.is_autocast_enabled("cpu")
        and all(w.is_contiguous() for w in given)
        and not is_buffer(x, private)
    )


def run(
    cell: FusedCell, x: Tensor, state: State, weights: Weights, *, reverse: bool, operation: str
) -> tuple[Tensor, State]:
    """Run a layer in one direction, ``[B, T, D]`` to ``[B, T, H]`` and the last states."""
    targets: list[GradientTarget | None] = [
        whole_target_of(w) if is_private(w) else None for w in weights
    ]
    capture = next(source_of(w).capture for w in weights if is_private(w))
    replay = REPLAYED.get(run)
    use = None
    if replay is not None and is_plainly_called():
        use = replay(operation, x, weights)
    if use is None:
        use = capture.use(operation, targets, x)
    values = [plain(w) for w in weights]
    y, *ends = applied(_Layer, capture.anchor, use, cell, reverse, x, *state, *values)
    return y, tuple(ends)
