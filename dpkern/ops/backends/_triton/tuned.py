"""Choose the tiles of products by trying a few on the device, and remember them in a file.

Only where the environment variable ``DPKERN_TILES`` names a file. A tile that is tried is never
larger than the one that ships, whose registers and products were checked in machine code, and takes
chunks of as many positions, which the bounds of ``docs/ghost.md`` and the order of additions depend
on. Gradients and sums must have the bits of the shipped tile's, or it is not taken; norms are
bounded for the tile that made them. Not yet run on a GPU.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.errors import TritonError

from ....base.errors import InvalidInput
from ....base.files import file_at, unusable, write_atomically
from ....base.version import __version__
from .operands import Operands

VARIABLE = "DPKERN_TILES"
LEAST = 16
"""Rows and columns of a tile, at least."""
ROUNDS = 5
SMALL = 1e-4
"""Squares of norms may lie relatively so far from those of the shipped tile."""


class Tile(NamedTuple):
    """The rows and columns of a program's tile, positions in a chunk, and the program's shape."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int = 3


Attempt = Callable[[Tile], torch.Tensor]
"""Runs a product in a tile, on memory of its own."""


def candidates(shipped: Tile) -> list[Tile]:
    """Return the tiles to try, first the one that ships."""
    low, narrow = (max(LEAST, side // 2) for side in shipped[:2])
    tried = [
        shipped,
        shipped._replace(stages=shipped.stages - 1),
        shipped._replace(stages=shipped.stages + 1),
        shipped._replace(rows=low),
        shipped._replace(columns=narrow),
        shipped._replace(rows=low, columns=narrow, warps=4),
    ]
    return list(dict.fromkeys(tried))


class TileFile:
    """The tiles in a file: JSON, under a checksum.

    Args:
        path: the file; where there is none, the first tile makes it.

    Raises:
        InvalidInput: a file that is not what ``remember`` wrote, or that cannot be read.
    """

    def __init__(self, path: str) -> None:
        self.path = file_at(VARIABLE, path)
        self._tiles = _read(self.path)

    def find(self, key: str, shipped: Tile) -> Tile | None:
        """Return the tile of this key, if it is one of those that could be tried today."""
        tile = self._tiles.get(key)
        return tile if tile in candidates(shipped) else None

    def remember(self, key: str, tile: Tile) -> None:
        """Put a tile into the file, beside what other processes put there meanwhile."""
        self._tiles = {**_read(self.path), key: tile}
        content = json.dumps(self._tiles, indent=1, sort_keys=True)
        whole = json.dumps({"sha256": _digest(content), "tiles": json.loads(content)}, indent=1)
        write_atomically(self.path, lambda file: file.write(whole.encode()), name=VARIABLE)


def _digest(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()


def _read(path: Path) -> dict[str, Tile]:
    try:
        text = path.read_text(errors="replace")
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise unusable(VARIABLE, path, error) from error
    try:
        whole = json.loads(text)
        tiles = whole["tiles"]
        sealed = whole["sha256"] == _digest(json.dumps(tiles, indent=1, sort_keys=True))
        found = {str(key): Tile(*map(int, tile)) for key, tile in tiles.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        sealed = False
    if not sealed:
        raise InvalidInput(
            VARIABLE,
            expected="a file of tiles as dpkern wrote it",
            got=f"{path}: damaged, edited, or another file",
            remedy="Delete it, and tiles are tried again; or name another file.",
        )
    return found


@cache
def _table() -> TileFile | None:
    path = os.environ.get(VARIABLE)
    return TileFile(path) if path else None


def key(op: str, operands: Operands, dtype: torch.dtype, shipped: Tile, on: str) -> str:
    """Return the name of a product's class: never the batch size, on which no bit may depend."""
    sizes = (
        f"positions to {int(triton.next_power_of_2(operands.positions))}",
        f"{operands.rows} of {operands.sizes[5]} x {operands.columns} in {operands.groups}",
        "dense" if operands.dense else "channels last" if operands.last else "channels first",
    )
    numbers = f"{operands.a.dtype} in {dtype}".replace("torch.", "")
    versions = f"Triton {triton.__version__}", f"dpkern {__version__}"
    return "; ".join((op, *sizes, numbers, " x ".join(map(str, shipped)), on, *versions))


def _place(operands: Operands) -> str | None:
    """Return the device's name, if tiles can be tried there."""
    if not operands.a.is_cuda:
        return None
    major, minor = torch.cuda.get_device_capability(operands.a.device)
    return f"{torch.cuda.get_device_name(operands.a.device)} ({major}.{minor})"


def _recorded() -> bool:
    """Whether the work is recorded and not run, so that there is no time to take."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _milliseconds(run: Callable[[], Any]) -> float:
    """Return the median time of a run on the device, after one that compiles."""
    run()
    times: list[float] = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def tile(op: str, operands: Operands, dtype: torch.dtype, shipped: Tile, attempt: Attempt) -> Tile:
    """Return the tile of a product: the one that ships, or the fastest of a few.

    Args:
        op: what is computed.
        operands: of the product.
        dtype: of its sums.
        shipped: the tile that results are compared with.
        attempt: returns a result to compare: float64 squares of norms, or numbers whose bits count.
    """
    table = _table()
    on = _place(operands) if table is not None else None
    if table is None or on is None or dtype is torch.float64:
        return shipped
    name = key(op, operands, dtype, shipped, on)
    known = table.find(name, shipped)
    if known is not None or _recorded():
        return known or shipped
    try:
        best = _fastest(candidates(shipped), attempt)
    except torch.OutOfMemoryError:
        return shipped  # no room beside this call: a later one may find it
    table.remember(name, best)
    return best


def _fastest(tried: list[Tile], attempt: Attempt) -> Tile:
    """Return the fastest tile whose result is that of the first."""
    wanted = attempt(tried[0])
    times = {tried[0]: _milliseconds(lambda: attempt(tried[0]))}
    for other in tried[1:]:
        try:
            if _alike(attempt(other), wanted):
                times[other] = _milliseconds(lambda other=other: attempt(other))  # type: ignore[misc]
        except TritonError:
            continue  # more than this device has
    return min(times, key=lambda each: times[each])


def _alike(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether numbers have the same bits; squares of norms, which have bounds, nearly."""
    if wanted.dtype is torch.float64:
        return torch.allclose(found, wanted, rtol=SMALL, atol=0.0, equal_nan=True)
    kind = torch.int16 if wanted.itemsize == 2 else torch.int32
    return torch.equal(found.view(kind), wanted.view(kind))
