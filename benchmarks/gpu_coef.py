"""Time coefficients of polynomial losses on a GPU, and compare them with the CPU's, bit for bit.

Part of ``benchmarks.gpu`` and ``benchmarks.gpu_bits``. Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from dpkern.base.rng import Purpose
from dpkern.ops import coef, noise
from dpkern.ops.testing import KEY

from .gpu_time import Setting, copies

OPS = ("coef.perturb", "coef.quadratic")
SHAPES = ((5000, 1000), (357_000, 14))
"""10^7 coefficients: long records, and those of the autoencoders."""

Calls = list[Callable[[], Any]]


def release(rows: int, columns: int, where: Setting, *, ahead: bool, scaled: bool) -> coef.Noise:
    """Return one release's noise, prefetched or not."""
    n, first = rows * columns, 512
    made = coef.Noise(
        scale=torch.linspace(0.5, 2, rows, device=where.device) if scaled else 1.5,
        stream=KEY.stream(Purpose.LAPLACE, 1),
        rounding=KEY.stream(Purpose.ROUNDING, 1),
        position=first,
    )
    if not ahead:
        return made
    place: dict[str, Any] = {"position": first, "device": where.device}
    place["count"] = coef.quadratic_position(first, n) + n - first
    values = noise.lattice_draws(made.stream, distribution="laplace", **place)
    return replace(
        made, draws=coef.Draws(first, values, noise.rounding_bits(made.rounding, **place))
    )


def tensors(op: str, rows: int, columns: int, where: Setting) -> tuple[torch.Tensor, ...]:
    """Return logits (of the loss only) and targets."""
    x = torch.rand(rows, columns, device=where.device)
    return (x,) if op == "coef.perturb" else (torch.randn_like(x), x)


def compare(op: str, backend: str, total: int, where: Setting) -> int:
    """Count the numbers that differ from the CPU's, in single and in double precision."""
    wrong = 0
    for columns in (14, 1000):
        rows = max(1, total // 2 // columns)
        drawn = release(rows, columns, where, ahead=False, scaled=True)
        on_cpu = replace(drawn, scale=torch.linspace(0.5, 2, rows))
        given = tensors(op, rows, columns, replace(where, device=torch.device("cpu")))
        drawn = replace(drawn, scale=on_cpu.scale.to(where.device))  # type: ignore[union-attr]
        for dtype in noise.FLOATS:
            parts = [part.to(dtype) for part in given]
            call = getattr(coef, op.removeprefix("coef."))
            want = call(*parts, form="printed", noise=on_cpu)
            there = [part.to(where.device) for part in parts]
            got = call(*there, form="printed", noise=drawn, backend=backend)
            wrong += sum(int((a.cpu() != b).sum()) for a, b in zip(got, want, strict=True))
    return wrong


def calls(
    op: str, shape: tuple[int, int], where: Setting, backend: str, *, ahead: bool
) -> tuple[Calls, int, Calls]:
    """Return what is timed, the bytes that one call moves, and torch's formulation.

    Raises:
        AssertionError: a result that is not finite, or without noise.
    """
    rows, columns = where.size(shape[0]), shape[1]
    call = getattr(coef, op.removeprefix("coef."))
    given: dict[str, Any] = {
        "form": "printed",
        "noise": release(rows, columns, where, ahead=ahead, scaled=False),
    }
    sets = []
    for _ in range(copies(4 * rows * columns, where)):
        parts = tensors(op, rows, columns, where)
        sets.append((parts, call(*parts, backend=backend, **given)))
    parts, made = sets[0]
    plain = call(*parts, form="printed", backend=backend)
    if not bool(torch.isfinite(made[1]).all()) or torch.equal(made[1], plain[1]):
        raise AssertionError("results without noise, or not finite")
    ours = [lambda p=p, o=o: call(*p, out=o, backend=backend, **given) for p, o in sets]  # type: ignore[misc]
    return ours, call.cost(*parts, **given).bytes, [formulation(parts, ahead=ahead)]


def formulation(parts: tuple[torch.Tensor, ...], *, ahead: bool) -> Callable[[], Any]:
    """Return the work in torch: preallocated, Laplace as a difference of exponential draws."""
    x = parts[-1]
    a1, a2, u, w = (torch.empty_like(x) for _ in range(4))

    def run() -> None:
        torch.sub(0.5, x, out=a1)
        torch.mul(x, 0.5, out=a2).sub_(0.25)
        for values in (a1, a2):
            values.add_(u) if ahead else values.add_(u.exponential_()).sub_(u.exponential_())
        if len(parts) > 1:
            torch.addcmul(a1, a2, parts[0], out=w).mul_(parts[0]).sum(1)
            torch.addcmul(a1, a2, parts[0], value=2, out=w)

    return run
