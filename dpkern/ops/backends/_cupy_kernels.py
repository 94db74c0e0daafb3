"""The launchers of ``csrc/cuda/launch.h`` with CuPy as compiler and driver.

Grids, blocks, structs and workspaces are those of the ``.cu`` files; a test compares every launch
with the compiled launchers'.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import _tables
from ._cupy_coef import Coefficients
from ._cupy_launch import TILE_THREADS, TILES_PER_BLOCK, blocks_of, by_value, tile_blocks
from ._cupy_sources import FLOATS, GRADS, INTEGERS, LAWS, SYMBOLS
from ._launch_update import FROM_STREAM

_CIPHER_THREADS = 256
_SYMBOLS_PER_BLOCK = 8  # of the cipher
_FLAT_THREADS = 256
_ROW_THREADS, _FACTOR_THREADS, _WARP = 256, 128, 32
_BLOCK_COLUMNS = 1024
_BLOCKS_PER_CHUNK = _tables.CHUNK // _BLOCK_COLUMNS
_SPLIT_BLOCKS, _SPLIT_ROWS = 1024, 32

_ROWS = _tables.struct(tasks="u8", count="i8", chunks="i8", columns="i8", rows="i8")
_FACTORS = _tables.struct(of="u8", row_stride="i8", task_stride="i8")
_POWERS = _tables.struct(of="u8", row_stride="i8", task_stride="i8", p="i4")
_CLIP = _tables.struct(
    style="i4",
    p="i4",
    has_sums="?",
    exact="?",
    bounds="u8",
    norms="u8",
    factors="u8",
    powers="u8",
)


def _rows(tasks: int, count: int, chunks: int, columns: int, batch: int) -> _tables.Table:
    fields = {"tasks": tasks, "count": count, "chunks": chunks, "columns": columns, "rows": batch}
    return _tables.one(_ROWS, **fields).reshape(1)


def _splits(batch: int, count: int, columns: int) -> int:
    wanted = _SPLIT_BLOCKS // (columns // _BLOCK_COLUMNS + count)
    return max(1, min(wanted, batch // _SPLIT_ROWS))


def _room(count: int, size: int) -> int:
    """Bytes of an array in a workspace."""
    return -(-count * size // 16) * 16


class Launchers(Coefficients):
    """Every launcher by its name in ``launch.h``."""

    # noise

    def keystream(self, stream: bytes, first: int, blocks: int, out: int, cuda: int) -> int:
        """``keystream``."""
        if blocks == 0:
            return 0
        grid = (blocks_of(blocks, _CIPHER_THREADS),)
        what = by_value(stream, _tables.STREAM), np.uint64(first), np.int64(blocks), np.uint64(out)
        return self.launch("noise", "keystream_kernel", grid, _CIPHER_THREADS, cuda, *what)

    def lattice_draws(self, stream: bytes, law: int, first: int, n: int, x: int, cuda: int) -> int:
        """``lattice_draws``."""
        if n == 0:
            return 0
        kernel, grid = f"draws_kernel<{LAWS[law]}>", (tile_blocks(first, n),)
        what = by_value(stream, _tables.STREAM), np.uint64(first), np.int64(n), np.uint64(x)
        return self.launch("noise", kernel, grid, TILE_THREADS, cuda, *what)

    def rounding_bits(self, rounding: bytes, first: int, n: int, bits: int, cuda: int) -> int:
        """``rounding_bits``."""
        if n == 0:
            return 0
        grid = (tile_blocks(first, n),)
        what = by_value(rounding, _tables.STREAM), np.uint64(first), np.int64(n), np.uint64(bits)
        return self.launch("noise", "rounding_kernel", grid, TILE_THREADS, cuda, *what)

    def add_noise(
        self,
        stream: bytes,
        rounding: bytes,
        law: int,
        first: int,
        n: int,
        kind: int,
        per_unit: float,
        cell: float,
        x: int,
        nonfinite: int,
        cuda: int,
    ) -> int:
        """``add_noise``."""
        if n == 0:
            return 0
        place = np.uint64(first), np.int64(n)
        if kind < len(INTEGERS):
            kernel = f"add_noise_integer_kernel<{INTEGERS[kind]}, {LAWS[law]}>"
            what: tuple[Any, ...] = by_value(stream, _tables.STREAM), *place, np.uint64(x)
        else:
            wide = kind - len(INTEGERS)
            number = np.float64 if wide else np.float32
            kernel = f"add_noise_float_kernel<{FLOATS[wide]}, {LAWS[law]}>"
            streams = (by_value(packed, _tables.STREAM) for packed in (stream, rounding))
            numbers = number(per_unit), number(cell)
            what = *streams, *place, *numbers, np.uint64(x), np.uint64(nonfinite)
        return self.launch("noise", kernel, (tile_blocks(first, n),), TILE_THREADS, cuda, *what)

    # symbols

    def randomize_symbols(
        self, stream: bytes, first: int, lies: bytes, kind: int, x: int, n: int, out: int, cuda: int
    ) -> int:
        """``randomize_symbols``."""
        if n == 0:
            return 0
        kernel, per_block = f"symbols_kernel<{SYMBOLS[kind]}>", _CIPHER_THREADS * _SYMBOLS_PER_BLOCK
        grid = (blocks_of(first % _SYMBOLS_PER_BLOCK + n, per_block),)
        what = by_value(stream, _tables.STREAM), np.uint64(first), by_value(lies, _tables.LIES)
        places = np.uint64(x), np.int64(n), np.uint64(out)
        return self.launch("symbols", kernel, grid, _CIPHER_THREADS, cuda, *what, *places)

    # update

    def update_step(self, plan: bytes, tasks: int, nonfinite: int, cuda: int) -> int:
        """``update_step``."""
        packed = by_value(plan, _tables.UPDATE_PLAN)
        fields = {
            name: int(packed[name][0]) for name in ("pieces", "noise", "sum_type", "law", "wide")
        }
        if fields["pieces"] == 0:
            return 0
        value = FLOATS[fields["wide"]]
        total = (*INTEGERS, value)[fields["sum_type"]]
        if fields["noise"] == FROM_STREAM:
            kernel = f"update_tile_kernel<{value}, {total}, {LAWS[fields['law']]}>"
            grid, threads = (blocks_of(fields["pieces"], TILES_PER_BLOCK),), TILE_THREADS
        else:
            types = f"{total}, true" if fields["noise"] else f"{value}, false"
            kernel = f"update_flat_kernel<{value}, {types}>"
            grid, threads = (blocks_of(fields["pieces"]),), _FLAT_THREADS
        what = packed, np.uint64(tasks), np.uint64(nonfinite)
        return self.launch("update", kernel, grid, threads, cuda, *what)

    def advance(self, clock: int, beta1: float, beta2: float, cuda: int) -> int:
        """``advance``."""
        what = np.uint64(clock), np.float64(beta1), np.float64(beta2)
        return self.launch("update", "advance_kernel", (1,), 1, cuda, *what)

    # clip

    def clip_workspace(
        self, plan: bytes, kind: int, tasks: int, count: int, chunks: int, columns: int
    ) -> int:
        """``clip_workspace``."""
        return sum(self._clip_arrays(plan, kind, count, chunks, columns))

    def _clip_arrays(
        self, plan: bytes, kind: int, count: int, chunks: int, columns: int
    ) -> tuple[int, int, int, int]:
        """Bytes of the powers of chunks, the factors, the rows' powers and the partial sums."""
        packed = by_value(plan, _tables.CLIP_PLAN)
        batch, arithmetic = int(packed["rows"][0]), int(packed["arithmetic"][0])
        if not batch or not count:
            return 0, 0, 0, 0
        size = 8 if GRADS[kind][1] == "double" else 4
        splits = _splits(batch, count, columns)
        partial = splits * columns if arithmetic == 1 and splits > 1 else 0
        return (
            _room(batch * chunks, 8),
            _room(batch * count if arithmetic else 0, size),
            _room(batch * count if arithmetic > 1 else 0, 8),
            _room(partial, size),
        )

    def clip_sum(
        self,
        plan: bytes,
        kind: int,
        tasks: int,
        count: int,
        chunks: int,
        columns: int,
        bounds: int,
        norms: int,
        workspace: int,
        cuda: int,
    ) -> int:
        """``clip_sum``."""
        packed = by_value(plan, _tables.CLIP_PLAN)
        batch, arithmetic = int(packed["rows"][0]), int(packed["arithmetic"][0])
        if not batch or not count:
            return 0
        grad, value = GRADS[kind]
        sizes = self._clip_arrays(plan, kind, count, chunks, columns)
        partial, factors, powers, sums = (workspace + sum(sizes[:i]) for i in range(4))
        rows = _rows(tasks, count, chunks, columns, batch)
        exact = arithmetic > 1
        style, p = int(packed["style"][0]), int(packed["p"][0])
        clip = _tables.one(
            _CLIP,
            style=style,
            p=p,
            has_sums=arithmetic > 0,
            exact=exact,
            bounds=bounds,
            norms=norms,
            factors=factors,
            powers=powers,
        ).reshape(1)
        error = 0
        if chunks:
            grid = (blocks_of(batch * chunks),)
            what: tuple[Any, ...] = rows, np.int32(p), np.uint64(partial)
            error = self.launch("clip", f"power_kernel<{grad}>", grid, _ROW_THREADS, cuda, *what)
        if not error:
            grid = (blocks_of(batch, _FACTOR_THREADS // _WARP),)
            kernel = f"factor_kernel<{value}>"
            what = rows, clip, np.uint64(partial)
            error = self.launch("clip", kernel, grid, _FACTOR_THREADS, cuda, *what)
        if error or not arithmetic or not chunks:
            return error
        per_layer = style == 1
        weights = _factors(factors, count, 1)
        limits = _powers(powers, count if per_layer else 1, int(per_layer), p)
        total = (value, *INTEGERS)[arithmetic - 1]
        types = f"<{grad}, {total}, {value}>"
        splits = _splits(batch, count, columns)
        error = self._sum("clip", types, rows, splits, weights, sums, limits, cuda)
        if error or (not exact and splits == 1):
            return error
        if exact:
            grid = (blocks_of(batch),)
            return self.launch(
                "clip", f"repair_kernel{types}", grid, _ROW_THREADS, cuda, rows, clip
            )
        return self._combine("clip", value, rows, splits, sums, cuda)

    def _sum(
        self,
        source: str,
        types: str,
        rows: _tables.Table,
        splits: int,
        factors: _tables.Table,
        partial: int,
        powers: _tables.Table,
        cuda: int,
    ) -> int:
        grid = blocks_of(int(rows["chunks"][0]) * _BLOCKS_PER_CHUNK), splits
        what = rows, factors, np.uint64(partial), powers
        return self.launch(source, f"sum_kernel{types}", grid, _ROW_THREADS, cuda, *what)

    def _combine(
        self, source: str, value: str, rows: _tables.Table, splits: int, partial: int, cuda: int
    ) -> int:
        grid = (blocks_of(int(rows["chunks"][0])),)
        what = rows, np.int64(splits), np.uint64(partial)
        return self.launch(source, f"combine_kernel<{value}>", grid, _ROW_THREADS, cuda, *what)

    # gradients that exist anyway

    def explicit_norm_workspace(
        self, tasks: int, count: int, chunks: int, columns: int, batch: int
    ) -> int:
        """``explicit_norm_workspace``."""
        return batch * chunks * 8

    def explicit_norm(
        self,
        tasks: int,
        count: int,
        chunks: int,
        columns: int,
        wide: bool,
        batch: int,
        squares: int,
        workspace: int,
        cuda: int,
    ) -> int:
        """``explicit_norm``."""
        if batch == 0:
            return 0
        if chunks:
            rows = _rows(tasks, count, chunks, columns, batch)
            grid = (blocks_of(batch * chunks),)
            kernel = f"power_kernel<{FLOATS[wide]}>"
            what: tuple[Any, ...] = rows, np.int32(2), np.uint64(workspace)
            error = self.launch("explicit", kernel, grid, _ROW_THREADS, cuda, *what)
            if error:
                return error
        grid = (blocks_of(batch, _FACTOR_THREADS // _WARP),)
        what = np.uint64(workspace), np.int64(chunks), np.int64(batch), np.uint64(squares)
        return self.launch("explicit", "square_kernel", grid, _FACTOR_THREADS, cuda, *what)

    def clip_factors(
        self,
        squares: int,
        count: int,
        batch: int,
        rule: bytes,
        wide: bool,
        norms: int,
        factors: int,
        cuda: int,
    ) -> int:
        """``clip_factors``."""
        if batch == 0:
            return 0
        grid = (blocks_of(batch, _FACTOR_THREADS),)
        kernel = f"clip_factors_kernel<{FLOATS[wide]}>"
        sizes = np.uint64(squares), np.int64(count), np.int64(batch)
        what = *sizes, by_value(rule, _tables.CLIP_RULE), np.uint64(norms), np.uint64(factors)
        return self.launch("explicit", kernel, grid, _FACTOR_THREADS, cuda, *what)

    def contract_workspace(
        self, tasks: int, count: int, chunks: int, columns: int, wide: bool, batch: int
    ) -> int:
        """``contract_workspace``."""
        splits = _splits(batch, count, columns)
        return 0 if splits == 1 else splits * columns * (8 if wide else 4)

    def contract(
        self,
        tasks: int,
        count: int,
        chunks: int,
        columns: int,
        factors: int,
        wide: bool,
        batch: int,
        workspace: int,
        cuda: int,
    ) -> int:
        """``contract``."""
        if batch == 0 or chunks == 0:
            return 0
        value = FLOATS[wide]
        rows = _rows(tasks, count, chunks, columns, batch)
        splits = _splits(batch, count, columns)
        weights, none = _factors(factors, 1, 0), _powers(0, 0, 0, 0)
        types = f"<{value}, {value}, {value}>"
        error = self._sum("explicit", types, rows, splits, weights, workspace, none, cuda)
        if error or splits == 1:
            return error
        return self._combine("explicit", value, rows, splits, workspace, cuda)


def _factors(of: int, row_stride: int, task_stride: int) -> _tables.Table:
    fields = {"of": of, "row_stride": row_stride, "task_stride": task_stride}
    return _tables.one(_FACTORS, **fields).reshape(1)


def _powers(of: int, row_stride: int, task_stride: int, p: int) -> _tables.Table:
    fields = {"of": of, "row_stride": row_stride, "task_stride": task_stride, "p": p}
    return _tables.one(_POWERS, **fields).reshape(1)
