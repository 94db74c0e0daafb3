"""Try tiles of Triton's products on a GPU: which are fastest for which shape.

    python -m benchmarks.gpu_tiles [--device cuda] [--scale 1]

The tiles that ship were chosen by registers and machine code. Here a small grid around them is
timed for norms, materialized gradients and weighted sums. Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from dpkern.ops import ghost

from .gpu_time import Setting, attempt, backends, exit_code, keep, milliseconds, normal, setting

Row = dict[str, Any]
TILES = {
    torch.bfloat16: (
        (128, 128, 64, 8, 3), (128, 64, 64, 8, 3), (128, 128, 32, 8, 4), (64, 128, 64, 4, 3),
        (128, 256, 64, 8, 3), (64, 64, 64, 4, 4),
    ),
    torch.float32: (
        (64, 64, 16, 8, 3), (128, 64, 16, 8, 3), (128, 128, 16, 8, 2), (64, 64, 32, 8, 2),
        (64, 64, 16, 4, 3),
    ),
}  # fmt: skip
"""Rows, columns, depth, warps and stages; the first is the one that ships for wide layers."""
LINEAR = {
    "GPT-2 up": (16, 1024, 768, 3072),
    "vocabulary": (4, 1024, 768, 50257),
    "ViT up": (64, 197, 768, 3072),
}
CONV = {"block": (256, 64, 64, 32), "last": (256, 512, 512, 4)}


@contextmanager
def tile(shape: tuple[int, int, int, int, int] | None) -> Iterator[None]:
    """Let products run in this tile, sums beside a total; in None as they ship."""
    from dpkern.ops.backends._triton import chained, direct, tuned, weighted

    if shape is None:
        yield
        return
    chosen = tuned.Tile(*shape)
    before = direct.tile_of, weighted.tile_of, chained.here
    direct.tile_of = weighted.tile_of = lambda *_: chosen  # type: ignore[assignment]
    chained.here = lambda _: False
    try:
        yield
    finally:
        direct.tile_of, weighted.tile_of, chained.here = before


def works(where: Setting, dtype: torch.dtype) -> Iterator[tuple[str, float, Callable[[], Any]]]:
    """Yield names, FLOPs and calls."""
    on: dict[str, Any] = {"backend": "triton"}
    kind = torch.float32
    for name, shape in LINEAR.items():
        batch, t, d, p = shape if where.scale == 1 else (2, 70, 20, 30)
        a, g = (normal((batch, t, n), where, dtype) for n in (d, p))
        flops = 2.0 * batch * t * d * p
        factors = torch.ones(batch, device=where.device, dtype=kind)
        out = torch.zeros(p, d, device=where.device, dtype=kind)
        yield (
            f"{name}, norm",
            flops,
            lambda a=a, g=g: ghost.linear_norm(a, g, route="direct", **on),  # type: ignore[misc]
        )
        yield (
            f"{name}, sum",
            flops,
            lambda a=a, g=g, f=factors, o=out: ghost.linear_sum(a, g, f, o, **on),  # type: ignore[misc]
        )
    for name, shape in CONV.items():
        batch, ci, co, side = shape if where.scale == 1 else (2, 3, 4, 6)
        x, g = (normal((batch, n, side, side), where, dtype) for n in (ci, co))
        flops = 2.0 * batch * side * side * 9 * ci * co
        options: dict[str, Any] = {"kernel_size": 3, "padding": 1, **on}
        yield (
            f"{name}, gradient",
            flops,
            lambda x=x, g=g, o=options: ghost.conv_gradient(x, g, **o),  # type: ignore[misc]
        )


def rows(where: Setting) -> list[Row]:
    """Time every work in every tile."""
    reason = backends("ghost.linear_norm", where).get("triton", "is for other devices")
    if reason:
        return [{"backend": "triton", "not here": reason}]
    found = []
    for dtype, tiles in TILES.items():
        for name, flops, call in works(where, dtype):
            for shape in (None, *tiles) if where.scale == 1 else (None, tiles[0]):
                title = " x ".join(map(str, shape)) if shape else "as shipped"
                row = {"work": name, "dtype": str(dtype)[6:], "tile": title}

                def measure(c: Any = call, s: Any = shape, f: float = flops) -> Row:
                    with tile(s):
                        return {"TFLOP/s": f / milliseconds([c], where) / 1e9}

                found.append(attempt(row, measure))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Time the tiles; 1 if nothing ran: some tiles may need more than a device has."""
    where = setting("tiles of products on a GPU", argv)
    found = rows(where)
    keep("tiles", found, where)
    ran = any("TFLOP/s" in row for row in found)
    return 0 if ran or all("not here" in row for row in found) else exit_code(found)


if __name__ == "__main__":
    raise SystemExit(main())
