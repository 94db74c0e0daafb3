"""List the ops of dpkern that a private step calls, from the uses of its parameters.

The routes are the engine's (``engine.routes``): per-sample gradients are written where that is
faster and fits, else the norm is taken alone and a weighted product makes the sum. Gradients of
biases, normalisations and other small parameters are written, [B, n] each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ..base.counts import Itemised
from ..cost.forms import FORMS
from ..engine.per_sample_gradients import ConvolutionGradients, LinearGradients
from ..engine.routes import worth_keeping
from ..ops._values import IdStatistics
from .fake_step import FakeStep, ParameterUse

NORMS, FACTORS, SUMS = "norms", "factors", "sums"
_KEEP = 0.25
"""The engine's default budget for written gradients, as a fraction of the captured inputs."""


@dataclass(frozen=True, kw_only=True)
class PrivateCall:
    """One call of an op, or what torch does between ops.

    Attributes:
        op: name of the op.
        phase: ``norms``, ``factors`` or ``sums``.
        items: its closed form.
        dtype: format of its operands.
        parameter: the parameter that it works on; empty for several.
        launches: kernels or calls.
    """

    op: str
    phase: str
    items: Itemised
    dtype: torch.dtype
    parameter: str = ""
    launches: int = 1


@dataclass(frozen=True, kw_only=True)
class PrivateCalls:
    """The calls that make a step's clipped sums.

    Attributes:
        calls: ops, in order.
        written: bytes of per-sample gradients that wait for the clip factors.
        missing: uses whose norms are in no count, in words.
    """

    calls: list[PrivateCall]
    written: int
    missing: list[str]


def private_calls(step: FakeStep, *, device: str) -> PrivateCalls:
    """Return the calls that make the clipped sums of a step.

    Args:
        step: trace of the step.
        device: ``cpu`` or ``gpu``, whose routes differ.
    """
    with FakeTensorMode():
        return _Lister(step, device).listed()


class _Lister:
    def __init__(self, step: FakeStep, device: str) -> None:
        self.step, self.device = step, device
        self.calls: list[PrivateCall] = []
        self.later: list[PrivateCall] = []
        self.explicit: dict[str, tuple[int, ...]] = {}
        self.kept: dict[str, tuple[int, ...]] = {}
        self.missing: list[str] = []
        self.budget = _KEEP * sum(
            math.prod(use.x) * step.dtype.itemsize
            for use in step.uses
            if use.kind in ("linear", "conv")
        )

    def listed(self) -> PrivateCalls:
        step, batch = self.step, self.step.batch
        for use in reversed(step.uses):
            self._use(use)
        parts = len(self.calls)
        small = [self._empty(batch, *shape) for shape in self.explicit.values()]
        if small:
            self._call("ghost.explicit_norm", NORMS, small)
        squares = [torch.empty(batch, dtype=torch.float64)] * (parts + bool(small))
        self._call("ghost.clip_factors", FACTORS, squares, 1.0, dtype=torch.float32)
        self.calls += self.later
        written = {**self.explicit, **self.kept}
        if written:
            grads = [self._empty(batch, *shape) for shape in written.values()]
            outs = [self._empty(*shape) for shape in written.values()]
            factors = torch.empty(batch)
            self._call("ghost.contract", SUMS, grads, factors, outs, dropped=0)
        size = 4 * batch * sum(math.prod(shape) for shape in written.values())
        return PrivateCalls(calls=self.calls, written=size, missing=self.missing)

    def _empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def _call(self, op: str, phase: str, *args: Any, later: bool = False, **given: Any) -> None:
        items = FORMS[op](*args, **given)
        first = args[0][0] if isinstance(args[0], list) else args[0]
        dtype = first.dtype if first.is_floating_point() else torch.float32
        made = PrivateCall(op=op, phase=phase, items=items, dtype=dtype, parameter=self.now)
        (self.later if later else self.calls).append(made)

    now = ""

    def _use(self, use: ParameterUse) -> None:
        self.now = use.parameter
        shape = self.step.shapes[use.parameter]
        if use.parameter in self.explicit or use.parameter in self.kept:
            return  # of several uses the gradients are added
        if use.kind == "linear" and len(shape) == 2:
            self._linear(use, shape)
        elif use.kind == "conv":
            self._convolution(use, shape)
        elif use.kind == "embedding":
            self._embedding(use, shape)
        elif use.kind in ("layer_norm", "group_norm"):
            self._normalisation(use)
            self.explicit[use.parameter] = shape
        else:
            if math.prod(shape) > 1 << 20:
                self.missing.append(f"{use.parameter}, used by {use.kind}")
            self.explicit[use.parameter] = shape
        self.now = ""

    def _operands(self, *shapes: tuple[int, ...]) -> Iterator[Tensor]:
        gpu = self.device == "gpu"
        dtype = self.step.dtype if gpu or self.step.dtype is torch.float64 else torch.float32
        return (self._empty(*shape, dtype=dtype) for shape in shapes)

    def _keeps(self, record: LinearGradients | ConvolutionGradients) -> bool:
        extra = max(0, record.gradient_bytes - record.held_bytes)
        if self.device == "gpu":
            worth = record.gradient_bytes <= record.held_bytes
        else:
            worth = worth_keeping(record)
        if not worth or extra > self.budget:
            return False
        self.budget -= extra
        return True

    def _linear(self, use: ParameterUse, shape: tuple[int, ...]) -> None:
        batch = self.step.batch
        rows, inputs = math.prod(use.x[:-1]), use.x[-1]
        outputs = math.prod(shape) // inputs
        positions = max(1, rows // batch)
        a, g = self._operands((batch, positions, inputs), (batch, positions, outputs))
        record = LinearGradients(a, g)
        if positions > 1 and self._keeps(record):
            self._call("ghost.linear_gradient", NORMS, a, g)
            self.kept[use.parameter] = shape
            return
        self._call("ghost.linear_norm", NORMS, a, g)
        out = self._empty(outputs, inputs)
        factors = self._empty(batch)
        self._call("ghost.linear_sum", SUMS, a, g, factors, out, later=True, used=batch)

    def _convolution(self, use: ParameterUse, shape: tuple[int, ...]) -> None:
        x, g = self._operands(use.x, use.y)
        given = {k: v for k, v in use.given.items() if k != "kernel_size"}
        size = use.given["kernel_size"]
        record = ConvolutionGradients(x, g, size, given)
        if self._keeps(record):
            self._call("ghost.conv_gradient", NORMS, x, g, kernel_size=size, **given)
            self.kept[use.parameter] = shape
            return
        self._call("ghost.conv_norm", NORMS, x, g, kernel_size=size, **given)
        factors = self._empty(self.step.batch)
        out = self._empty(*shape)
        self._call(
            *("ghost.conv_sum", SUMS, x, g, factors, out),
            later=True,
            used=self.step.batch,
            kernel_size=size,
            **given,
        )

    def _embedding(self, use: ParameterUse, shape: tuple[int, ...]) -> None:
        batch = self.step.batch
        positions = max(1, math.prod(use.x) // batch)
        ids = torch.empty((batch, positions), dtype=torch.int64)
        (g,) = self._operands((batch, positions, shape[1]))
        rows = batch * positions
        found = IdStatistics(rows, rows, 0, 0, min(rows, shape[0]))
        self._call("ghost.embedding_norm", NORMS, ids, g, found=found)
        factors, out = self._empty(batch), self._empty(*shape)
        given: dict[str, Any] = {"found": found, "used": batch, "later": True}
        self._call("ghost.embedding_sum", SUMS, ids, g, factors, out, **given)

    def _normalisation(self, use: ParameterUse) -> None:
        batch, x = self.step.batch, use.x
        if use.kind == "layer_norm":
            width = self.step.shapes[use.parameter][-1]
            rows = max(1, math.prod(x) // width // batch)
            g, y = self._operands((batch, rows, width), (batch, rows, width))
            lines = self._empty(batch, rows)
        else:
            inner = math.prod(x[2:])
            g, y = self._operands((batch, x[1], inner), (batch, x[1], inner))
            lines = self._empty(batch, use.given["groups"])
        weight = self._empty(g.shape[2 if use.kind == "layer_norm" else 1])
        self._call(f"ghost.{use.kind}_backward", NORMS, g, y, lines, lines, weight)


__all__ = ["FACTORS", "NORMS", "SUMS", "PrivateCall", "PrivateCalls", "private_calls"]
