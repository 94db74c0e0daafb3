"""Time the ops on a GPU beside what its memory and its matrix units allow.

    python -m benchmarks.gpu [--device cuda] [--scale 1]

Medians by CUDA events; buffers are rotated past the last-level cache; a case is checked before it
is timed. ``of copy`` is the op's own count of bytes per second over that of a plain copy. Not yet
run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from dpkern.base.rng import Key, Purpose
from dpkern.ops import clip, ghost, noise, update
from dpkern.ops.testing import KEY

from . import gpu_coef
from .gpu_time import (
    Setting,
    attempt,
    backends,
    copies,
    exit_code,
    keep,
    milliseconds,
    normal,
    setting,
)

PARAMETERS = 100_000_000
OPS = (
    "update.step",
    "clip.clip_sum",
    "ghost.linear_norm",
    "ghost.linear_sum",
    "ghost.conv_norm",
    "ghost.conv_sum",
    *gpu_coef.OPS,
)
Row = dict[str, Any]


def copy_bandwidth(where: Setting) -> float:
    """Return GB/s of a plain copy, read and written."""
    n = where.size(1 << 28)
    pairs = [(normal((n,), where), torch.empty(n, device=where.device)) for _ in range(2)]
    calls = [lambda a=a, b=b: b.copy_(a) for a, b in pairs]  # type: ignore[misc]
    return 8 * n / milliseconds(calls, where) / 1e6


def timed(
    calls: Sequence[Callable[[], Any]],
    where: Setting,
    copy: float,
    size: int = 0,
    torch_calls: Sequence[Callable[[], Any]] = (),
) -> Row:
    """Return time, bandwidth and what torch needs for the same work."""
    ms = milliseconds(calls, where)
    row: Row = {"ms": ms}
    if size:
        row |= {"GB/s": size / ms / 1e6, "of copy": size / ms / 1e6 / copy}
    if torch_calls:
        theirs = milliseconds(torch_calls, where)
        row |= {"torch ms": theirs, "ratio": theirs / ms}
    return row


def each_backend(op: str, case: str, where: Setting, measure: Callable[[str], Row]) -> list[Row]:
    """Return one row for each backend that can run the op here; the reference is not timed."""
    able = [name for name, reason in backends(op, where).items() if not reason]
    return [
        attempt({"op": op, "case": case, "backend": name}, lambda b=name: measure(b))  # type: ignore[misc]
        for name in able
        if name != "reference"
    ]


def absent(where: Setting) -> list[Row]:
    """Return why the other backends are left out."""
    return [
        {"op": op, "backend": name, "not here": reason}
        for op in OPS
        for name, reason in backends(op, where).items()
        if reason
    ]


def dtypes(where: Setting) -> tuple[torch.dtype, ...]:
    """Return the operands of products; 16 bits only where the hardware multiplies them."""
    wide = (torch.float32,)
    return (torch.bfloat16, *wide) if where.device.type == "cuda" else wide


# update


def update_rows(where: Setting, copy: float) -> list[Row]:
    """Time noise and rule in one pass: by source of noise, and by rule."""
    n = where.size(PARAMETERS)
    rows = []
    rules = {"sgd": update.SGD(lr=0.1, momentum=0.9), "adamw": update.AdamW(lr=0.001)}
    for name, rule in rules.items():
        for source in ("none", "draws", "8", "12", "20"):
            case = f"{name}, {'ChaCha' if source.isdigit() else 'noise:'} {source}, {n}"

            def measure(backend: str, rule: Any = rule, source: str = source) -> Row:
                return update_row(rule, source, n, where, copy, backend)

            rows += each_backend("update.step", case, where, measure)
    return rows


def update_row(
    rule: update.Rule, source: str, n: int, where: Setting, copy: float, backend: str
) -> Row:
    """Time one rule and one source of noise."""
    key = Key.from_unsafe_seed(0, int(source)) if source.isdigit() else KEY
    given = update.Noise(
        distribution="gaussian",
        scales=(0.5,),
        stream=key.stream(Purpose.NOISE, 1),
        positions=(0,),
    )
    private = source != "none"
    if source == "draws":
        values = noise.lattice_draws(given.stream, position=0, count=n, device=where.device)
        given = replace(given, draws=update.Draws(0, values))
    sets = []
    for _ in range(copies(4 * n, where)):
        param, total = normal((n,), where), normal((n,), where)
        counts = (total * 10**6).to(torch.int32) if private else total
        sets.append(([param], [counts], rule.init([param])))
    arguments = {"rule": rule, "noise": given if private else None, "backend": backend}
    calls = [
        lambda p=p, t=t, s=s: update.step(p, t, state=s, **arguments)  # type: ignore[misc]
        for p, t, s in sets
    ]
    params, sums, state = sets[0]
    before = params[0].clone()
    calls[0]()
    if not bool(torch.isfinite(params[0]).all()) or torch.equal(before, params[0]):
        raise AssertionError("the update left its parameters alone, or not finite")
    size = update.step.cost(params, sums, state=state, **arguments).bytes
    return timed(calls, where, copy, size, torch_update(rule, private, n, where))


def torch_update(
    rule: update.Rule, private: bool, n: int, where: Setting
) -> list[Callable[[], Any]]:
    """Return torch's fused optimizer, behind ``normal_`` and an addition if there is noise."""
    param = torch.nn.Parameter(normal((n,), where))
    param.grad = normal((n,), where)
    drawn = torch.empty(n, device=where.device)
    kind = torch.optim.AdamW if isinstance(rule, update.Adam) else torch.optim.SGD
    options = {} if kind is torch.optim.AdamW else {"momentum": 0.9}
    optimizer = kind([param], lr=0.001, fused=True, **options)

    def call() -> None:
        if private:
            assert param.grad is not None
            param.grad.add_(drawn.normal_())
        optimizer.step()

    return [call]


# clip


def clip_rows(where: Setting, copy: float) -> list[Row]:
    """Time norm, clip and sum of explicit gradients."""
    batch, columns = 256, where.size(1_000_000)
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for arithmetic in ("float", "exact"):
            case = f"{arithmetic}, {str(dtype).removeprefix('torch.')}, {batch} x {columns}"

            def measure(backend: str, dtype: Any = dtype, arithmetic: str = arithmetic) -> Row:
                return clip_row(dtype, arithmetic, (batch, columns), where, copy, backend)

            rows += each_backend("clip.clip_sum", case, where, measure)
    return rows


def clip_row(
    dtype: torch.dtype,
    arithmetic: str,
    shape: tuple[int, int],
    where: Setting,
    copy: float,
    backend: str,
) -> Row:
    """Time one kind of gradients."""
    grads = normal(shape, where, dtype)
    unit = 1.5 * 2.0**-20 if arithmetic == "exact" else None
    given: dict[str, Any] = {"arithmetic": arithmetic, "unit": unit, "backend": backend}
    result = clip.clip_sum(grads, 1.5, **given)
    want = torch.linalg.vector_norm(grads.double(), dim=1)
    torch.testing.assert_close(result.norms, want, rtol=1e-9, atol=0)
    norms = torch.empty(shape[0], device=where.device)

    def formulation() -> None:
        wide = grads.float()
        torch.linalg.vector_norm(wide, dim=1, out=norms)
        torch.mv(wide.t(), (1.5 / norms).clamp_(max=1.0))

    size = 2 * grads.numel() * grads.element_size()  # the floor of two reads
    calls = [lambda: clip.clip_sum(grads, 1.5, **given)]
    return timed(calls, where, copy, size, [formulation])


# ghost


def linear_rows(where: Setting, copy: float) -> list[Row]:
    """Time norms and weighted sums of linear layers beside the ordinary weight gradient."""
    rows = []
    for shape in ((8, 1024, 4096), (64, 1024, 768), (4096, 1, 1024)):
        b, t, w = shape if where.scale == 1 else (4, min(shape[1], 6), 12)
        for dtype in dtypes(where):
            case = f"B {b}, T {t}, {w} to {w}, {str(dtype).removeprefix('torch.')}"
            for op in ("linear_norm", "linear_sum"):

                def measure(backend: str, op: str = op, s: Any = (b, t, w), d: Any = dtype) -> Row:
                    return linear_row(op, s, d, where, copy, backend)

                rows += each_backend(f"ghost.{op}", case, where, measure)
    return rows


def linear_row(
    op: str,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    where: Setting,
    copy: float,
    backend: str,
) -> Row:
    """Time one op and shape."""
    batch, _, width = shape
    a, g = normal(shape, where, dtype), normal(shape, where, dtype)
    each = torch.bmm(g[:2].double().transpose(1, 2), a[:2].double())

    def product() -> torch.Tensor:
        return g.flatten(0, 1).t() @ a.flatten(0, 1)

    if op == "linear_norm":
        want = each.square().sum((1, 2))
        got = ghost.linear_norm(a, g, backend=backend)[:2]
        if not bool(((got >= want) & (got <= 1.01 * want)).all()):
            raise AssertionError(f"norms {got.tolist()} for {want.tolist()}")
        return timed([lambda: ghost.linear_norm(a, g, backend=backend)], where, copy, 0, [product])
    factors = torch.rand(batch, device=where.device)
    first = torch.zeros_like(factors)
    first[:2] = 1
    out = torch.zeros(width, width, device=where.device)
    ghost.linear_sum(a, g, first, out, backend=backend)
    error = float((out.double() - each.sum(0)).norm() / each.sum(0).norm())
    if not error < 1e-2:
        raise AssertionError(f"the sum is off by {error:.2g}")
    return timed(
        [lambda: ghost.linear_sum(a, g, factors, out, backend=backend)], where, copy, 0, [product]
    )


def conv_rows(where: Setting, copy: float) -> list[Row]:
    """Time the same for a 3 x 3 convolution, beside torch's weight gradient."""
    rows = []
    channels, size = (64, 32) if where.scale == 1 else (4, 8)
    for dtype in dtypes(where):
        case = f"B 64, {channels} channels, {size} x {size}, {str(dtype).removeprefix('torch.')}"
        for op in ("conv_norm", "conv_sum"):

            def measure(backend: str, op: str = op, dtype: Any = dtype) -> Row:
                return conv_row(op, (64, channels, size), dtype, where, copy, backend)

            rows += each_backend(f"ghost.{op}", case, where, measure)
    return rows


def conv_row(
    op: str,
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    where: Setting,
    copy: float,
    backend: str,
) -> Row:
    """Time one op."""
    batch, channels, size = sizes
    x = normal((batch, channels, size, size), where, dtype)
    g = normal((batch, channels, size, size), where, dtype)
    weight = normal((channels, channels, 3, 3), where, dtype)
    geometry: dict[str, Any] = {
        "kernel_size": (3, 3),
        "stride": (1, 1),
        "padding": (1, 1),
        "dilation": (1, 1),
        "groups": 1,
        "backend": backend,
    }

    def gradient(x: Any = x, g: Any = g, weight: Any = weight) -> torch.Tensor:
        rest = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, False])
        return torch.ops.aten.convolution_backward(g, x, weight, None, *rest)[1]  # type: ignore[no-any-return]

    each = gradient(x[:1].cpu().double(), g[:1].cpu().double(), weight.cpu().double())
    if op == "conv_norm":
        want = float(each.square().sum())
        got = float(ghost.conv_norm(x, g, **geometry)[0])
        if not want <= got <= 1.01 * want:
            raise AssertionError(f"norm {got} for {want}")
        return timed([lambda: ghost.conv_norm(x, g, **geometry)], where, copy, 0, [gradient])
    out = torch.zeros(weight.shape, device=where.device)
    factors = torch.rand(batch, device=where.device)
    first = torch.zeros(batch, device=where.device)
    first[0] = 1
    ghost.conv_sum(x, g, first, out, **geometry)
    error = float((out.cpu().double() - each).norm() / each.norm())
    if not error < 1e-2:
        raise AssertionError(f"the sum is off by {error:.2g}")
    calls = [lambda: ghost.conv_sum(x, g, factors, out, **geometry)]
    return timed(calls, where, copy, 0, [gradient])


# coef


def coef_rows(where: Setting, copy: float) -> list[Row]:
    """Time 10^7 coefficients, with their noise prefetched or not."""
    rows = []
    for op in gpu_coef.OPS:
        for shape in gpu_coef.SHAPES:
            for ahead in (True, False):
                case = f"noise {'ahead' if ahead else 'in the kernel'}, {shape[0]} x {shape[1]}"

                def measure(
                    backend: str, op: str = op, shape: Any = shape, ahead: bool = ahead
                ) -> Row:
                    ours, size, theirs = gpu_coef.calls(op, shape, where, backend, ahead=ahead)
                    return timed(ours, where, copy, size, theirs)

                rows += each_backend(op, case, where, measure)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Measure everything; 1 if a case failed."""
    where = setting("ops on a GPU", argv)
    # Products of single precision must not become TF32 behind our back.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    copy = copy_bandwidth(where)
    rows: list[Row] = [{"op": "copy", "GB/s": copy}]
    for part in (update_rows, clip_rows, linear_rows, conv_rows, coef_rows):
        rows += part(where, copy)
    keep("ops", rows + absent(where), where)
    return exit_code(rows)


if __name__ == "__main__":
    raise SystemExit(main())
