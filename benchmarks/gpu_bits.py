"""Compare bits on a GPU with the CPU's: draws, releases, updates and coefficients, by value.

    python -m benchmarks.gpu_bits [--device cuda] [--scale 1]

10^9 draws of each law for the compiled CUDA kernels, 10^8 for the other backends and for the float
tiers. A single difference is a failure. Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from dpkern.base.laws import LAWS
from dpkern.base.rng import Purpose
from dpkern.ops import noise, update
from dpkern.ops.testing import KEY

from . import gpu_coef
from .gpu_time import Setting, attempt, backends, exit_code, keep, setting

DRAWS = {"cuda": 10**9}
OTHERS = 10**8
PIECE = 1 << 24
START = (1 << 32) // 16 * 512 - 700  # counters pass 2^32 early
RULES = {
    "sgd": update.SGD(lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": update.AdamW(lr=0.001),
}


def pieces(total: int) -> Iterator[tuple[int, int]]:
    """Yield positions and counts; every piece begins where the one before ended."""
    for start in range(0, total, PIECE):
        yield START + start, min(PIECE, total - start)


def draws(backend: str, law: str, total: int) -> dict[str, Any]:
    """Compare X itself, all of its bits."""
    stream = KEY.stream(Purpose.NOISE, 1)
    wrong = 0
    for position, count in pieces(total):
        given: dict[str, Any] = {"position": position, "count": count, "distribution": law}
        got = noise.lattice_draws(stream, backend=backend, **given).cpu()
        wrong += int((got != noise.lattice_draws(stream, **given)).sum())
    return counted(total, wrong)


def releases(backend: str, dtype: torch.dtype, total: int, where: Setting) -> dict[str, Any]:
    """Compare integers and floats with noise, in place."""
    wrong = 0
    floats = dtype in noise.FLOATS
    given: dict[str, Any] = {"stream": KEY.stream(Purpose.NOISE, 2)}
    if floats:
        given |= {"scale": 1.5, "rounding": KEY.stream(Purpose.ROUNDING, 2)}
    for position, count in pieces(total):
        x = (torch.randn(count) * (3 if floats else 10**6)).to(dtype)
        got = noise.add_noise(x.to(where.device), position=position, backend=backend, **given)
        want = noise.add_noise(x, position=position, **given)
        wrong += int((got.cpu() != want).sum())
    return counted(total, wrong)


def updates(backend: str, rule: update.Rule, total: int, where: Setting) -> dict[str, Any]:
    """Compare two steps with noise from integer sums; parameters and state."""
    wrong = 0
    for position, count in pieces(total):
        held = [torch.randn(count), (torch.randn(count) * 10**6).to(torch.int32)]
        ends = [_trained(held, rule, position, b, d) for b, d in ((backend, where.device), _CPU)]
        wrong += sum(int((a.cpu() != b).sum()) for a, b in zip(*ends, strict=True))
    return counted(total, wrong)


def mapped(backend: str, total: int, where: Setting) -> dict[str, Any]:
    """Compare two steps whose sums, taps and integer coordinates, are noised in coordinates."""
    pairs, taps, rank = max(1, total // 9), 9, 5
    signal, back = torch.randn(rank, taps).double(), torch.randn(taps, rank).double()
    whole = update.PairMap(signal=signal, back=back)
    held = {
        whole: torch.randn(pairs, taps),
        whole.only_back: (torch.randn(pairs, rank) * 10**6).to(torch.int32),
    }
    wrong = 0
    for each, sums in held.items():
        both = [torch.randn(pairs, taps), sums]
        maps = update.PairMaps((each,))
        ends = [
            _trained(both, RULES["adamw"], 77, b, d, maps)
            for b, d in ((backend, where.device), _CPU)
        ]
        wrong += sum(int((a.cpu() != b).sum()) for a, b in zip(*ends, strict=True))
    return counted(2 * total, wrong)


_CPU = (None, torch.device("cpu"))


def _trained(
    held: Sequence[torch.Tensor],
    rule: update.Rule,
    position: int,
    backend: str | None,
    device: torch.device,
    maps: update.PairMaps | None = None,
) -> list[torch.Tensor]:
    param, total = (t.to(device, copy=True) for t in held)
    state = rule.init([param])
    for step in range(2):
        given = update.Noise(
            distribution="gaussian",
            scales=(0.5,),
            stream=KEY.stream(Purpose.NOISE, 3 + step),
            positions=(position,),
            rounding=KEY.stream(Purpose.ROUNDING, 3 + step),
        )
        update.step(
            [param], [total], rule=rule, state=state, noise=given, maps=maps, backend=backend
        )
    return [param, *(b for group in state.buffers.values() for b in group)]


def counted(total: int, wrong: int) -> dict[str, Any]:
    """Return what was compared.

    Raises:
        AssertionError: a difference.
    """
    if wrong:
        raise AssertionError(f"{wrong} of {total} values differ")
    return {"values": total, "differ": wrong}


def main(argv: Sequence[str] | None = None) -> int:
    """Compare everything; 1 if a bit differs."""
    where = setting("bits on a GPU", argv)
    rows: list[dict[str, Any]] = []

    def add(op: str, case: str, compare: Callable[[str, int], dict[str, Any]]) -> None:
        for backend, reason in backends(op, where).items():
            if backend == "reference":
                continue
            row = {"op": op, "case": case, "backend": backend}
            if reason:
                rows.append(row | {"not here": reason})
                continue
            full = DRAWS.get(backend, OTHERS) if op == "noise.lattice_draws" else OTHERS
            total = where.size(full, 4096)
            rows.append(attempt(row, lambda b=backend, n=total: compare(b, n)))  # type: ignore[misc]

    for law in LAWS:
        add("noise.lattice_draws", law, lambda b, n, law=law: draws(b, law, n))  # type: ignore[misc]
    for dtype in (*noise.INTEGERS, *noise.FLOATS):
        name = str(dtype).removeprefix("torch.")
        add("noise.add_noise", name, lambda b, n, d=dtype: releases(b, d, n, where))  # type: ignore[misc]
    for name, rule in RULES.items():
        add("update.step", name, lambda b, n, r=rule: updates(b, r, n, where))  # type: ignore[misc]
    add("update.step", "mapped", lambda b, n: mapped(b, n, where))
    for op in gpu_coef.OPS:

        def coefficients(b: str, n: int, op: str = op) -> dict[str, Any]:
            return counted(n, gpu_coef.compare(op, b, n, where))

        add(op, "laplace", coefficients)
    keep("bits", rows, where)
    return exit_code(rows)


if __name__ == "__main__":
    raise SystemExit(main())
