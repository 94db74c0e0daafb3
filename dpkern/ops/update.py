"""The update: noise, division by the public batch size and the optimizer rule in one pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import _validate as check
from .._dispatch import Cost, op
from ..errors import InvalidInput
from ..laws import LAWS, SCALE_CELLS
from ..rng import Stream
from . import _lattice
from .noise import FLOATS, INTEGERS, noise_words, rounding_words

Buffers = dict[str, list[torch.Tensor]]


@dataclass
class State:
    """What an optimizer rule remembers.

    Attributes:
        steps: updates applied so far.
        buffers: one list of tensors per buffer name (``momentum_buffer``, ``exp_avg``, ...).
    """

    steps: int = 0
    buffers: Buffers = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        """Steps and buffers, as tensors and plain values."""
        return {"steps": self.steps, "buffers": {k: list(v) for k, v in self.buffers.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy a saved state into this one's tensors.

        Raises:
            InvalidInput: other buffers than this rule's.
        """
        saved: Buffers = state["buffers"]
        same = saved.keys() == self.buffers.keys() and all(
            [s.shape for s in saved[k]] == [b.shape for b in self.buffers[k]] for k in saved
        )
        if not same:
            raise InvalidInput(
                "state",
                expected=f"buffers {sorted(self.buffers)} of the parameters' shapes",
                got=f"buffers {sorted(saved)}",
                remedy="Resume with the model and optimizer that wrote the state.",
            )
        for name, buffers in self.buffers.items():
            for mine, theirs in zip(buffers, saved[name], strict=True):
                mine.copy_(theirs)
        self.steps = int(state["steps"])


@dataclass(frozen=True, kw_only=True)
class SGD:
    """``torch.optim.SGD``'s rule: ``b = momentum b + (1 - dampening) g``, ``p -= lr b``."""

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check.non_negative(lr=self.lr)
        check.non_negative(momentum=self.momentum)
        check.non_negative(weight_decay=self.weight_decay)
        check.half_open_unit(dampening=self.dampening)
        if self.nesterov and (self.momentum <= 0 or self.dampening != 0):
            raise InvalidInput(
                "nesterov",
                expected="momentum > 0 and dampening = 0",
                got=f"momentum {self.momentum}, dampening {self.dampening}",
                remedy="Set a momentum, or leave nesterov off.",
            )

    def buffer_names(self) -> tuple[str, ...]:
        """Names of the buffers, one tensor per parameter each."""
        return ("momentum_buffer",) if self.momentum else ()

    def init(self, params: Sequence[torch.Tensor]) -> State:
        """A fresh state."""
        return _fresh_state(self.buffer_names(), params)

    def packed(self, t: int) -> tuple[float, ...]:
        """The kernels' form, at update number t (from 1)."""
        first = t == 1
        numbers = (self.momentum, self.dampening, self.nesterov, first)
        return (0, self.lr, self.weight_decay, False, *numbers, 0.0, 0.0, 0.0, 1.0, 1.0)

    def apply(self, p: torch.Tensor, g: torch.Tensor, buffers: list[torch.Tensor], t: int) -> None:
        """The reference, in torch."""
        g = g + self.weight_decay * p
        if buffers:
            (b,) = buffers
            b.copy_(g if t == 1 else self.momentum * b + (1 - self.dampening) * g)
            g = g + self.momentum * b if self.nesterov else b
        p.sub_(self.lr * g)


@dataclass(frozen=True, kw_only=True)
class Adam:
    """``torch.optim.Adam``'s rule (weight decay joins the gradient)."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check.non_negative(lr=self.lr)
        check.half_open_unit(beta1=self.betas[0])
        check.half_open_unit(beta2=self.betas[1])
        check.non_negative(eps=self.eps)
        check.non_negative(weight_decay=self.weight_decay)

    @property
    def decoupled(self) -> bool:
        """Whether the decay multiplies the parameter (AdamW)."""
        return False

    def buffer_names(self) -> tuple[str, ...]:
        """Names of the buffers, one tensor per parameter each."""
        return ("exp_avg", "exp_avg_sq")

    def init(self, params: Sequence[torch.Tensor]) -> State:
        """A fresh state."""
        return _fresh_state(self.buffer_names(), params)

    def packed(self, t: int) -> tuple[float, ...]:
        """The kernels' form, at update number t (from 1)."""
        beta1, beta2 = self.betas
        moments = (beta1, beta2, self.eps, 1 - beta1**t, 1 - beta2**t)
        return (1, self.lr, self.weight_decay, self.decoupled, 0.0, 0.0, False, False, *moments)

    def apply(self, p: torch.Tensor, g: torch.Tensor, buffers: list[torch.Tensor], t: int) -> None:
        """The reference, in torch."""
        mean, square = buffers
        beta1, beta2 = self.betas
        if self.decoupled:
            p.mul_(1 - self.lr * self.weight_decay)
        else:
            g = g + self.weight_decay * p
        mean.add_((1 - beta1) * (g - mean))
        square.copy_(beta2 * square + (1 - beta2) * g * g)
        root = square.sqrt() / math.sqrt(1 - beta2**t) + self.eps
        p.sub_(self.lr / (1 - beta1**t) * (mean / root))


@dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    """``torch.optim.AdamW``'s rule (decoupled weight decay)."""

    weight_decay: float = 1e-2

    @property
    def decoupled(self) -> bool:
        """Whether the decay multiplies the parameter (AdamW)."""
        return True


Rule = SGD | Adam


def _fresh_state(names: Sequence[str], params: Sequence[torch.Tensor]) -> State:
    return State(0, {name: [torch.zeros_like(p) for p in params] for name in names})


@dataclass(frozen=True, kw_only=True)
class Noise:
    """The noise of one step.

    Attributes:
        distribution: ``gaussian`` or ``laplace``.
        scales: certified standard deviation (or Laplace scale) of each tensor's sum.
        stream: keystream of the noise, this step's own.
        positions: where each tensor starts in the stream; ranges must not overlap.
        rounding: keystream of the stochastic rounding, for float sums.
    """

    distribution: str
    scales: tuple[float, ...]
    stream: Stream
    positions: tuple[int, ...]
    rounding: Stream | None = None


def _validate_step(
    params: Sequence[torch.Tensor],
    sums: Sequence[torch.Tensor],
    *,
    rule: Rule,
    state: State,
    gradient_scale: float = 1.0,
    noise: Noise | None = None,
    backend: str | None = None,
) -> str:
    for name, group in (("params", params), ("sums", sums)):
        if not isinstance(group, (list, tuple)):
            raise InvalidInput(
                name,
                expected="a list of tensors",
                got=type(group).__name__,
                remedy="Wrap a single tensor in a list.",
            )
    _same_length(len(params), sums=sums)
    if not isinstance(rule, (SGD, Adam)):
        raise InvalidInput(
            "rule",
            expected="an update.SGD, Adam or AdamW",
            got=type(rule).__name__,
            remedy="Use one of dpkern's rules; see dpkern.ops.update.",
        )
    check.positive(gradient_scale=gradient_scale)
    names = rule.buffer_names()
    if not isinstance(state, State) or tuple(state.buffers) != names:
        raise InvalidInput(
            "state",
            expected=f"a State with buffers {list(names)}",
            got=list(state.buffers) if isinstance(state, State) else type(state).__name__,
            remedy="Make it with rule.init(params).",
        )
    if not params:
        return "cpu"
    first = check.tensor_at("params[0]", params[0], dtypes=FLOATS)
    sum_dtypes = (*INTEGERS, first.dtype) if noise is not None else (first.dtype,)
    for i, (p, s) in enumerate(zip(params, sums, strict=True)):
        _check_pair(i, p, s, first, (sums[0].dtype,) if i else sum_dtypes)
    for name in names:
        _same_length(len(params), **{f"state.{name}": state.buffers[name]})
        for i, (p, b) in enumerate(zip(params, state.buffers[name], strict=True)):
            label = f"state.{name}[{i}]"
            check.tensor_at(
                label, b, shape=p.shape, dtypes=(p.dtype,), device=p.device, contiguous=True
            )
    if noise is not None:
        _check_noise(noise, params, sums)
    return first.device.type


def _same_length(count: int, **group: Sequence[object]) -> None:
    ((name, got),) = group.items()
    if len(got) != count:
        raise InvalidInput(
            name,
            expected=f"{count} entries, one per parameter",
            got=str(len(got)),
            remedy="Give exactly one for each parameter.",
        )


def _check_pair(
    i: int,
    param: torch.Tensor,
    total: torch.Tensor,
    first: torch.Tensor,
    sum_dtypes: tuple[torch.dtype, ...],
) -> None:
    names = f"params[{i}]", f"sums[{i}]"
    check.tensor_at(names[0], param, dtypes=(first.dtype,), device=first.device, contiguous=True)
    check.tensor_at(
        names[1], total, shape=param.shape, dtypes=sum_dtypes, device=first.device, contiguous=True
    )


def _check_noise(
    noise: Noise, params: Sequence[torch.Tensor], sums: Sequence[torch.Tensor]
) -> None:
    check.choice(LAWS, distribution=noise.distribution)
    _same_length(len(params), **{"noise.scales": noise.scales})
    _same_length(len(params), **{"noise.positions": noise.positions})
    for scale in noise.scales:
        check.positive_at("noise.scales", scale)
    for position in noise.positions:
        check.integer(0, 2**62, **{"noise.positions": position})
    if sums[0].dtype not in INTEGERS and noise.rounding is None:
        raise InvalidInput(
            "noise.rounding",
            expected="a stream, because the sums are floats",
            got="None",
            remedy="Pass key.stream(Purpose.ROUNDING, step).",
        )


def _cost_step(
    params: Sequence[torch.Tensor],
    sums: Sequence[torch.Tensor],
    *,
    rule: Rule,
    state: State,
    gradient_scale: float = 1.0,
    noise: Noise | None = None,
    backend: str | None = None,
) -> Cost:
    n = sum(p.numel() for p in params)
    moved = sum(p.numel() * p.element_size() for p in params) * (1 + len(rule.buffer_names()))
    read = moved + sum(s.numel() * s.element_size() for s in sums)
    rounded = noise is not None and bool(sums) and sums[0].dtype not in INTEGERS
    words = (noise_words(n) if noise else 0) + (rounding_words(n) if rounded else 0)
    per_entry = (4 if isinstance(rule, SGD) else 14) + (9 if rounded else 1)
    return Cost(bytes_read=read, bytes_written=moved, flops=per_entry * n, random_words=words)


@op(validate=_validate_step, cost=_cost_step)
def step(
    params: Sequence[torch.Tensor],
    sums: Sequence[torch.Tensor],
    *,
    rule: Rule,
    state: State,
    gradient_scale: float = 1.0,
    noise: Noise | None = None,
    backend: str | None = None,
) -> int:
    """Noise the clipped sums and apply the optimizer, reading and writing everything once.

    ``y = floor((v + X) / 2^14)``; gradient ``= gradient_scale (scale / 64) y``; then the rule
    updates ``params`` and ``state`` in place. Noise is made in registers and never stored.

    Args:
        params: float32 or float64 tensors of one dtype and device, contiguous.
        sums: clipped sums of the same shapes: int32 or int64 counts of ``u = scale / 2^20``, or
            floats of the parameters' dtype, which are rounded stochastically to ``u``.
        rule: ``SGD``, ``Adam`` or ``AdamW``, with the meaning of ``torch.optim``.
        state: from ``rule.init(params)``; its step count advances.
        gradient_scale: 1 / (public expected batch size).
        noise: the step's noise; None applies the rule to the float sums (not private).
        backend: who runs it.

    Returns:
        How many float sums were not finite (each counts as zero).

    ============== ======================================
    edge case      result
    ============== ======================================
    no parameters  nothing happens
    empty tensor   skipped
    NaN in a sum   counts as zero, counted in the result
    ============== ======================================

    Raises:
        InvalidInput: lists, shapes, dtypes or numbers that do not fit.
    """
    bad = 0
    params = [p.detach() for p in params]
    for i, (param, total) in enumerate(zip(params, sums, strict=True)):
        if noise is None:
            finite = torch.isfinite(total)
            bad += int((~finite).sum())
            gradient = torch.where(finite, total, torch.zeros_like(total)) * gradient_scale
        else:
            y, unusable = _noisy_sum(total, noise, i)
            bad += unusable
            factor = noise.scales[i] / SCALE_CELLS * gradient_scale
            gradient = y.to(param.dtype) * torch.tensor(factor, dtype=param.dtype)
        buffers = [state.buffers[name][i] for name in rule.buffer_names()]
        rule.apply(param, gradient, buffers, state.steps + 1)
    state.steps += 1 if params else 0
    return bad


def _noisy_sum(total: torch.Tensor, noise: Noise, i: int) -> tuple[torch.Tensor, int]:
    position, count = noise.positions[i], total.numel()
    draws = _lattice.draws(noise.stream, noise.distribution, position, count).view(total.shape)
    if total.dtype in INTEGERS:
        return _lattice.release_integers(total, draws), 0
    assert noise.rounding is not None
    bits = _lattice.rounding_bits(noise.rounding, position, count).view(total.shape)
    return _lattice.release_floats(total, noise.scales[i], bits, draws)
