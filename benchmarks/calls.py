"""Host time of single calls of ops on small tensors: raw kernel, through Python, through C++.

``raw`` is the kernel's binding with addresses that are known already; ``Python`` checks and
marshals in Python, as every call does that C++ leaves to it; ``call`` is the op as users call it.
All in turns in one process and on one thread, in bursts that are shorter than a time slice, so that
the smallest one was not disturbed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dpkern.base.dispatch import OPS, Op
from dpkern.base.rng import Purpose
from dpkern.base.schema import Schema
from dpkern.ops import testing, update
from dpkern.ops.backends import _clip, _extension, _native, _update

BURST = 20
"""Calls that are timed together."""
B, T, D = 8, 4, 16


@dataclass(frozen=True)
class Call:
    """A call of an op, and the compiled function behind it where that is not the op's own."""

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    compiled: _native.CompiledFunction[..., Any] | None = None


def calls() -> dict[str, Call]:
    """Calls by the name of their row."""
    torch.manual_seed(0)
    stream = testing.KEY.stream(Purpose.NOISE, 1)
    rounding = testing.KEY.stream(Purpose.ROUNDING, 1)
    a, g = torch.randn(B, 1, D), torch.randn(B, 1, D)
    x, mean = torch.randn(B, T, D), torch.randn(B, T)
    factors, weight = torch.rand(B), torch.rand(D)
    grads, sums = [torch.randn(B, D), torch.randn(B, D)], [torch.zeros(D), torch.zeros(D)]
    squares = [torch.rand(B, dtype=torch.float64) for _ in range(3)]
    ids, table = torch.randint(5, (B, T)), torch.zeros(5, D)
    rule = update.SGD(lr=0.1, momentum=0.9)
    params = [torch.zeros(D, D), torch.zeros(D)]
    totals = [torch.ones(D, D), torch.ones(D)]
    small, out = [torch.randn(4, 6), torch.randn(4, 3)], [torch.zeros(6), torch.zeros(3)]
    state = {"rule": rule, "state": rule.init(params)}

    def plain(op: str, *args: Any, **kwargs: Any) -> Call:
        return Call(op, args, kwargs)

    return {
        "clip_sum": Call("clip.clip_sum", (small, 1.0), {}, _clip.clip_rows),
        "clip_sum, out": Call("clip.clip_sum", (small, 1.0), {"out": out}, _clip.clip_rows),
        "linear_norm": plain("ghost.linear_norm", a, g),
        "linear_sum": plain("ghost.linear_sum", a, g, factors, torch.zeros(D, D)),
        "linear_gradient": plain("ghost.linear_gradient", a, g),
        "explicit_norm": plain("ghost.explicit_norm", grads),
        "contract": plain("ghost.contract", grads, factors, sums),
        "clip_factors": plain("ghost.clip_factors", squares, 1.0, dtype=torch.float32),
        "layer_norm_backward": plain("ghost.layer_norm_backward", x, x, mean, mean, weight),
        "embedding_norm": plain("ghost.embedding_norm", ids, x),
        "embedding_sum": plain("ghost.embedding_sum", ids, x, factors, table),
        "matmul": plain("product.matmul", x[:, 0].contiguous(), torch.randn(D, D)),
        "add_noise, int32": plain("noise.add_noise", torch.zeros(1).int(), stream=stream),
        "add_noise, float32": plain(
            "noise.add_noise", torch.zeros(D), stream=stream, rounding=rounding, scale=1.0
        ),
        "update.step": Call("update.step", (params, totals), state, _update.update_tensors),
    }


def _raw(op: Op[..., Any], call: Call) -> tuple[Callable[[], Any], Any]:
    """The kernel's binding with what one call gives it, and what must be held for that."""
    given: list[Any] = []

    def recording(kernels: dict[Any, Any]) -> dict[Any, Any]:
        def record(kernel: Any) -> Callable[..., Any]:
            def run(*args: Any) -> Any:
                given[:] = kernel, args
                return kernel(*args)

            return run

        return {kind: record(kernel) for kind, kernel in kernels.items()}

    schema, extension = op.schema, _extension.compiled()
    if call.compiled is None:
        kernels = recording(_native._kernels(schema, extension))
        run = _native.caller(schema, kernels, _extension.threads, {})
        held = run(schema.bind(*call.args, **call.kwargs))
    else:
        function, direct = call.compiled, call.compiled.direct
        kernels = recording(_native._kernels(function._schema, extension))
        function._run = _native.caller(function._schema, kernels, _extension.threads, {})
        function.direct = _native._never
        try:
            bound = schema.bind(*call.args, **call.kwargs)
            held = op._chosen(None, bound)[1].run(bound)
        finally:
            function.direct = direct
            del function._run
    kernel, args = given
    return lambda: kernel(*args), held


def ways(call: Call) -> tuple[dict[str, Callable[[], Any]], Any]:
    """The ways of a call by column, and what they need besides."""
    op = OPS[call.op]
    op(*call.args, **call.kwargs)  # which chooses the backend
    bind = Schema(op.schema.function, op.schema.own_check, op.schema.plan).bind
    raw, held = _raw(op, call)

    def in_python() -> Any:
        bound = bind(*call.args, **call.kwargs)
        return op._chosen(None, bound)[1].run(bound)

    return {
        "raw": raw,
        "Python": in_python,
        "call": lambda: op(*call.args, **call.kwargs),
    }, held


def measured(rounds: int) -> list[dict[str, Any]]:
    """Microseconds of every call by its way: the smallest of all bursts."""
    with testing.threads(1):
        every = {name: ways(call) for name, call in calls().items()}
        best = {name: dict.fromkeys(columns, float("inf")) for name, (columns, _) in every.items()}
        for _ in range(rounds):
            for name, (columns, _) in every.items():
                for column, run in columns.items():
                    began = time.thread_time()
                    for _ in range(BURST):
                        run()
                    taken = (time.thread_time() - began) / BURST
                    best[name][column] = min(best[name][column], taken)
    return [
        {
            "op": name,
            **{f"{column} us": 1e6 * seconds for column, seconds in found.items()},
            "added us": 1e6 * (found["call"] - found["raw"]),
        }
        for name, found in best.items()
    ]


def markdown(machine: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The table that is printed and committed."""
    lines = [
        f"dpkern {machine['dpkern']}, torch {machine['torch']}, {machine['processor']}, one "
        "thread. Microseconds of host time for one call on small tensors; `raw` = the kernel with "
        "known addresses, `Python` = checked and marshalled in Python, `call` = as users call it, "
        "`added` = call - raw.",
        "",
        "| " + " | ".join(rows[0]) + " |",
        "|" + "---|" * len(rows[0]),
    ]
    lines += [
        "| " + " | ".join(v if isinstance(v, str) else f"{v:.1f}" for v in row.values()) + " |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


__all__ = ["markdown", "measured"]
