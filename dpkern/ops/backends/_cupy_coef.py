"""The launchers of ``csrc/cuda/coef.cu`` with CuPy as compiler and driver."""

from __future__ import annotations

import numpy as np

from . import _tables
from ._cupy_launch import TILE_THREADS, Launcher, blocks_of, by_value, tile_blocks
from ._cupy_sources import BOOLS, FLOATS
from ._launch_update import FROM_STREAM

_FLAT_THREADS = 256
_PIECE, _WINDOW = 2048, 1536

_SIZES = _tables.struct(classes="i8", width="i8")
_ARRAYS = _tables.struct(hidden="u8", targets="u8", weights="u8", loss="u8", dhidden="u8")
_SUMS = _tables.struct(linear="u8", columns="u8", terms="u8", slopes="u8")


class Coefficients(Launcher):
    """By their names in ``launch.h``."""

    def coef_perturb(
        self, plan: bytes, targets: int, linear: int, quadratic: int, cuda: int
    ) -> int:
        """``coef_perturb``."""
        packed, from_stream, types = _coef(plan)
        n = int(packed["rows"][0]) * int(packed["columns"][0])
        if n == 0:
            return 0
        if from_stream:
            grid: tuple[int, ...] = (tile_blocks(int(packed["linear"][0]), n), 2)
            kernel, threads = "perturb_tile_kernel", TILE_THREADS
        else:
            grid = (blocks_of(n, _PIECE),)
            kernel, threads = "perturb_flat_kernel", _FLAT_THREADS
        what = packed, *(np.uint64(place) for place in (targets, linear, quadratic))
        return self.launch("coef", kernel + types, grid, threads, cuda, *what)

    def coef_quadratic(
        self, plan: bytes, z: int, targets: int, shift: int, loss: int, dz: int, cuda: int
    ) -> int:
        """``coef_quadratic``."""
        packed, from_stream, types = _coef(plan)
        rows, columns = int(packed["rows"][0]), int(packed["columns"][0])
        if rows * columns == 0:
            return 0
        kernel = "quadratic_tile_kernel" if from_stream else "quadratic_flat_kernel"
        grid = (blocks_of(rows, max(1, _WINDOW // columns)),)
        what = packed, *(np.uint64(place) for place in (z, targets, shift, loss, dz))
        return self.launch("coef", kernel + types, grid, TILE_THREADS, cuda, *what)

    def coef_expanded_workspace(self, records: int, classes: int, width: int) -> int:
        """``coef_expanded_workspace``."""
        return 16 * records * classes * (width + 1)

    def coef_expanded(
        self,
        plan: bytes,
        classes: int,
        width: int,
        hidden: int,
        targets: int,
        weights: int,
        loss: int,
        dweights: int,
        dhidden: int,
        workspace: int,
        cuda: int,
    ) -> int:
        """``coef_expanded``."""
        packed, from_stream, types = _coef(plan)
        records, numbers = int(packed["rows"][0]), classes * width
        if records * numbers == 0:
            return 0
        columns = workspace + 8 * records * numbers
        terms = columns + 8 * records * numbers
        slopes = terms + 8 * records * classes
        given = (
            (_SIZES, classes, width),
            (_ARRAYS, hidden, targets, weights, loss, dhidden),
            (_SUMS, workspace, columns, terms, slopes),
        )
        what = packed, *(np.array([tuple(values)], layout) for layout, *values in given)
        kernel = "features_tile_kernel" if from_stream else "features_flat_kernel"
        grid = (blocks_of(records),)
        error = self.launch("coef_features", kernel + types, grid, TILE_THREADS, cuda, *what)
        if error:
            return error
        kernel = f"features_sum_kernel<{FLOATS[int(packed['wide'][0])]}>"
        sizes = np.int64(records), np.int64(numbers), np.uint64(columns), np.uint64(dweights)
        grid = (blocks_of(numbers, _FLAT_THREADS),)
        return self.launch("coef_features", kernel, grid, _FLAT_THREADS, cuda, *sizes)


def _coef(plan: bytes) -> tuple[_tables.Table, bool, str]:
    """The plan, whether its noise comes from the stream, and the kernel's types."""
    packed = by_value(plan, _tables.COEF_PLAN)
    value, noise = FLOATS[int(packed["wide"][0])], int(packed["noise"][0])
    from_stream = noise == FROM_STREAM
    return packed, from_stream, f"<{value}>" if from_stream else f"<{value}, {BOOLS[noise > 0]}>"
