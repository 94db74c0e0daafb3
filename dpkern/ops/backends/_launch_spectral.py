"""Norms and sums in the frequency domain on device kernels.

Maps are transformed on the chip; grids that a block cannot hold (``_spectral_blocks``) take the
forms of ``_device_spectral``, which are the platform's transforms.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ...base import layouts
from ..ghost._bounds import of_sums
from ..ghost._conv_geometry import Size
from ..spectral import bins
from ..spectral._band import Band
from ..spectral._lines import LongLine
from ..spectral._plan import LongPlaces, Places, retained, sides_of, sums_error, tables_of
from ..spectral._sizes import Axes, ConvolutionGrid, axes, corner
from ..spectral._spectra import Grid, of_one_sample, on
from ..spectral._whitened_plan import whitened_plan
from ..spectral.whitened_bins import PlanArguments, plan_arguments
from . import _device, _device_spectral, _tables
from . import _kernels as table
from . import _spectral_blocks as blocks
from ._launch_noise import FLOATS
from ._start import Device, Rows, refuse_first


@dataclass(frozen=True)
class Operand:
    """One operand of a layer on the device, with what its transforms read and write.

    Attributes:
        kernel: what transforms them.
        maps: ``SpectralMaps``.
        by: how blocks do so: ``SpectralBlocks``, ``SpectralLong`` or ``SpectralVolume``.
        places: how many places its frequencies have.
        parts: numbers of a place.
        sizes: ``[B, 2]``, the largest entry and the sum of squares of each sample.
        kept: what the tables in ``maps`` and ``by`` belong to.
    """

    kernel: table.CudaKernel
    maps: _tables.Table
    by: _tables.Table
    places: int
    parts: int
    sizes: Tensor
    kept: tuple[Tensor, ...]

    @property
    def splits(self) -> int:
        """Number of parts that the channels of a group are split into."""
        return int(self.maps["splits"])


def _blocks(side: Places, like: Tensor) -> tuple[_tables.Table, int, tuple[Tensor, ...]]:
    """Return ``SpectralBlocks``, how many places there are, and the tables."""
    rows = on(like.device, blocks.row_turns, side.columns, like.dtype)
    columns = on(like.device, blocks.column_turns, side.rows, like.dtype)
    shape = blocks.block_shape(side, like.dtype)
    turns = {"row_turns": rows.data_ptr(), "column_turns": columns.data_ptr()}
    by = _tables.one(layouts.SPECTRAL_BLOCKS, **turns, **shape)
    return by, shape["across"] * shape["down"], (rows, columns)


def _line(line: LongLine, like: Tensor) -> tuple[_tables.Table, tuple[Tensor, ...]]:
    """Return ``SpectralLine`` and its tables."""
    names = ("first", "phases", "second")
    kept = [on(like.device, blocks.level_turns, line, name, like.dtype) for name in names]
    addresses = {name: table.data_ptr() for name, table in zip(names, kept, strict=True)}
    sizes = {"n1": line.first, "n2": line.second, "count": line.count}
    return _tables.one(layouts.SPECTRAL_LINE, **addresses, **sizes), tuple(kept)


def _long(
    side: LongPlaces, channels: int, like: Tensor
) -> tuple[_tables.Table, int, tuple[Tensor, ...]]:
    """Return ``SpectralLong``, how many places there are, and the tables."""
    shape = blocks.long_shape(side, min(channels, blocks.CHANNELS), like.dtype)
    assert shape is not None
    across, down = (_line(line, like) for line in (side.columns, side.rows))
    by = _tables.one(layouts.SPECTRAL_LONG, across=across[0], down=down[0], **shape)
    return by, side.count, (*across[1], *down[1])


def _volumes(side: LongPlaces, like: Tensor) -> tuple[_tables.Table, int, tuple[Tensor, ...]]:
    """Return ``SpectralVolume``, how many places there are, and the tables."""
    shape = blocks.volume_shape(side, like.dtype)
    assert shape is not None
    each = zip(side.lines, ("deep", "down", "across"), strict=True)
    depth, columns, rows = (
        on(like.device, blocks.whole_turns, line, shape[name], like.dtype) for line, name in each
    )
    named = {"row_turns": rows, "column_turns": columns, "depth_turns": depth}
    addresses = {name: turns.data_ptr() for name, turns in named.items()}
    by = _tables.one(layouts.SPECTRAL_VOLUMES, **addresses, **shape)
    return by, side.count, (rows, columns, depth)


def _operand(
    start: Device, cuda: int, operand: Tensor, side: Places | LongPlaces, groups: int
) -> Operand:
    """Lay an operand out, and measure it."""
    device, dtype = operand.device, operand.dtype
    batch, channels = operand.shape[:2]
    rows = side.rows.count
    if isinstance(side, Places):
        kernel, (by, count, kept) = table.SPECTRAL_POWERS, _blocks(side, operand)
    elif len(side.lines) == 2:
        kernel, (by, count, kept) = table.SPECTRAL_LONG, _long(side, channels // groups, operand)
    else:
        kernel, (by, count, kept) = table.SPECTRAL_VOLUMES, _volumes(side, operand)
        # The planes that are used, one behind another: a map of more rows.
        used = corner([line.count for line in side.lines])
        operand = operand[used].contiguous().flatten(2, 3)
        rows = operand.shape[2]
    height, width = (1, *operand.shape[2:])[-2:]
    maps = _tables.one(
        layouts.SPECTRAL_MAPS,
        data=operand.data_ptr(),
        batch=batch,
        channels=channels,
        groups=groups,
        splits=max(1, -(-channels // groups // blocks.CHANNELS)),
        height=height,
        width=width,
        rows=rows,
        columns=side.columns.count,
    )
    sizes = torch.empty(batch, 2, dtype=torch.float64, device=device)
    start.start(table.SPECTRAL_SIZES, (FLOATS[dtype],), cuda, maps=maps, sizes=sizes)
    return Operand(kernel, maps, by, count, side.parts, sizes, (operand, *kept))


def _transform(
    start: Device,
    cuda: int,
    operand: Operand,
    *,
    powers: Tensor | None = None,
    kept: tuple[Tensor, Tensor, Tensor] | None = None,
    out: Tensor | None = None,
) -> None:
    """Write the powers of an operand's maps, or retained bins, or both."""
    packed = _tables.one(layouts.SPECTRAL_KEPT)
    if kept is not None and out is not None:
        names = ("first", "which", "turns", "out")
        addresses = (tensor.data_ptr() for tensor in (*kept, out))
        packed = _tables.one(layouts.SPECTRAL_KEPT, **dict(zip(names, addresses, strict=True)))
    value = FLOATS[operand.kept[0].dtype]
    given = {"maps": operand.maps, "kept": packed, "sizes": operand.sizes, "powers": powers}
    start.start(operand.kernel, (value,), cuda, by=operand.by, **given)


def _kept_part(grid: Grid, band: Band, which: int, part: int, dtype: torch.dtype) -> Tensor:
    return _kept_tables(grid, band, which, dtype)[part]


@lru_cache(maxsize=256)
def _kept_tables(
    grid: Grid, band: Band, which: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``first``, ``which`` and ``turns`` of ``SpectralKept``, for x (0) or g (1)."""
    made = retained(grid, band, shared=False)[which]
    flat = made.places.flatten()
    at = torch.empty(made.count, dtype=torch.int64, device="cpu")
    at[flat[flat >= 0]] = (flat >= 0).nonzero().flatten()
    stands = at[made.source]
    order = stands.argsort(stable=True)
    edges = torch.arange(len(flat) + 1, device="cpu")
    first = torch.searchsorted(stands[order].contiguous(), edges)
    return first.int(), order.int(), made.turn[order].to(dtype).contiguous()


def _kept(grid: Grid, band: Band, which: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    first, numbers, turns = (
        on(like.device, _kept_part, grid, band, which, part, like.dtype) for part in range(3)
    )
    return first, numbers, turns


def _errors(grid: Grid, dtype: torch.dtype) -> tuple[float, float]:
    """Return the errors of the transforms of x and of g, relative to the norms of their maps."""
    wide = int(dtype is torch.float64)
    x_error, g_error = tables_of(grid, shared=False).errors.view(2, 2)[wide].tolist()
    return x_error, g_error


def _norm_table(grid: Grid, name: str) -> Tensor:
    found: Tensor = getattr(tables_of(grid, shared=False), name)
    return found


def _bare(grid: Grid) -> Grid:
    """Return the grid without its band, which no error of a transform depends on."""
    return Grid(grid.layer, grid.size, None)


def _squares(
    start: Device,
    cuda: int,
    grid: Grid,
    x: Operand,
    g: Operand,
    powers: tuple[Tensor, Tensor],
) -> Tensor:
    """Return squared norms of correlation maps, from above."""
    device, dtype = powers[0].device, powers[0].dtype
    geometry, tables = grid.layer.geometry, tables_of(grid, shared=False)
    names = ("index", "weights", "x_weights", "g_weights")
    alone = of_one_sample(grid)
    kept = {name: on(device, _norm_table, alone, name) for name in names}
    x_error, g_error = _errors(_bare(grid), dtype)
    channels = (geometry.in_channels + geometry.out_channels) // geometry.groups
    call = _tables.one(
        layouts.SPECTRAL_PRODUCT,
        **{name: tensor.data_ptr() for name, tensor in kept.items()},
        groups=geometry.groups,
        x_places=x.places,
        g_places=g.places,
        x_splits=x.splits,
        g_splits=g.splits,
        parts=x.parts,
        x_error=x_error,
        g_error=g_error,
        sums_error=sums_error(grid, tables, dtype, blocks.CHANNELS),
        share=tables.share,
        lost=16 * channels * torch.finfo(dtype).smallest_normal,
    )
    squares = torch.empty(geometry.batch, dtype=torch.float64, device=device)
    start.start(
        table.SPECTRAL_NORM,
        (FLOATS[dtype],),
        cuda,
        call=call,
        x_powers=powers[0],
        g_powers=powers[1],
        x_sizes=x.sizes,
        g_sizes=g.sizes,
        squares=squares,
    )
    return squares


def _room(operand: Operand) -> Tensor:
    """Allocate the powers of an operand's splits."""
    like, maps = operand.kept[0], operand.maps
    sets = int(maps["batch"] * maps["groups"] * maps["splits"])
    return like.new_empty(sets, operand.places, operand.parts)


def _operands(
    start: Device, cuda: int, x: Tensor, g: Tensor, grid: Grid
) -> tuple[Operand, Operand]:
    kind, groups = of_sums(x.dtype), grid.layer.geometry.groups
    sides: tuple[Places | LongPlaces, ...] = sides_of(grid, shared=False)
    first, second = (
        _operand(start, cuda, t.to(kind), side, groups)
        for t, side in zip((x, g), sides, strict=True)
    )
    return first, second


@torch.no_grad()
def conv_norm(
    start: Device, x: Tensor, g: Tensor, *, band: Band | None, plan: ConvolutionGrid, **sizes: Any
) -> Tensor:
    grid = Grid.of(plan, band)
    if not blocks.reaches(grid, of_sums(x.dtype)):
        return _device_spectral.conv_norm(x, g, band=band, plan=plan, **sizes)
    with _device.guard(x.device) as cuda:
        both = _operands(start, cuda, x, g, grid)
        powers = _room(both[0]), _room(both[1])
        for operand, room in zip(both, powers, strict=True):
            _transform(start, cuda, operand, powers=room)
        return _squares(start, cuda, grid, *both, powers)


@torch.no_grad()
def conv_bins(
    start: Device, x: Tensor, g: Tensor, *, band: Band, plan: ConvolutionGrid, **sizes: Any
) -> tuple[Tensor, Tensor, Tensor]:
    grid = Grid(plan, plan.size, None)
    if not blocks.reaches(grid, of_sums(x.dtype)):
        return _device_spectral.conv_bins(x, g, band=band, plan=plan, **sizes)
    with _device.guard(x.device) as cuda:
        both = _operands(start, cuda, x, g, grid)
        powers = _room(both[0]), _room(both[1])
        x_bins, g_bins = _written(start, cuda, grid, band, both, powers)
        return x_bins, g_bins, _squares(start, cuda, grid, *both, powers)


def _written(
    start: Device,
    cuda: int,
    grid: Grid,
    band: Band,
    both: tuple[Operand, Operand],
    powers: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor]:
    """Return the retained bins of both operands; write their powers as well, if there is room."""
    count, found = len(bins.kept_bins(band)), []
    for which, (operand, room) in enumerate(zip(both, powers, strict=True)):
        like = operand.kept[0]
        out = like.new_empty(count, len(like), 2, like.shape[1])
        kept = _kept(of_one_sample(grid), band, which, like)
        _transform(start, cuda, operand, powers=room, kept=kept, out=out)
        found.append(out)
    return found[0], found[1]


def _whitened_table(name: str, dtype: torch.dtype, arguments: PlanArguments) -> Tensor:
    """Return a table of a ``WhitenedPlan``: rows as ``[tiles, K, SPECTRAL_ROWS]``, with zeros."""
    found: Tensor = getattr(whitened_plan(*arguments), name)
    if name in ("even", "odd"):
        size = int(layouts.SPECTRAL_ROWS)
        tiles = -(-len(found) // size)
        rows = found.new_zeros(tiles * size, found.shape[1])
        rows[: len(found)] = found
        found = rows.view(tiles, size, found.shape[1]).mT
    return found.to(dtype).contiguous()


@torch.no_grad()
def whitened_bins(
    start: Device,
    x: Tensor,
    g: Tensor,
    matrix: Tensor,
    *,
    band: Band,
    plan: ConvolutionGrid,
    **sizes: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    grid, geometry = Grid(plan, plan.size, None), plan.geometry
    if not blocks.reaches(grid, of_sums(x.dtype)):
        return _device_spectral.whitened_bins(x, g, matrix, band=band, plan=plan, **sizes)
    kind, device = of_sums(x.dtype), x.device
    arguments = plan_arguments(plan, matrix, band, kind, _errors(grid, kind))
    made = whitened_plan(*arguments)
    even, odd, turns = (
        on(device, _whitened_table, name, kind, arguments) for name in ("even", "odd", "turns")
    )
    weights = on(device, _whitened_table, "weights", torch.float64, arguments)
    odd_from = len(even) if made.odd_from else 0
    groups, ins, outs = geometry.groups, geometry.in_channels, geometry.out_channels
    pieces = table.pair_pieces(ins // groups, outs // groups)
    narrow, rows = kind is torch.float32, len(made.even) + len(made.odd)
    call = _tables.one(
        layouts.SPECTRAL_PAIRS_OF,
        even=even.data_ptr(),
        odd=odd.data_ptr(),
        turns=turns.data_ptr(),
        batch=len(x),
        ins=ins,
        outs=outs,
        groups=groups,
        bins=len(made.weights),
        pieces=pieces,
        tiles=max(len(even), odd_from + len(odd)),
        even_tiles=len(even),
        odd_from=odd_from,
    )
    # What underflows in products and sums of float32 between these norms, as on the CPU.
    lost = 8 * len(made.weights) * (rows * ins * outs) ** 0.5 * 2.0**-125
    bound = _tables.one(
        layouts.SPECTRAL_BOUND,
        weights=weights.data_ptr(),
        stretch=made.stretch,
        product_error=made.product_error,
        x_error=made.x_error,
        g_error=made.g_error,
        share=made.share,
        lost=lost if narrow else 0.0,
        least=2.0**-80 if narrow else 2.0**-400,
        most=2.0**100 if narrow else 2.0**400,
        terms=float(rows * (ins // groups) * outs + 64),
    )
    with _device.guard(device) as cuda:
        both = _operands(start, cuda, x, g, grid)
        x_bins, g_bins = _written(start, cuda, grid, band, both)
        sums = torch.empty(len(x), groups * pieces, dtype=torch.float64, device=device)
        squares = torch.empty(len(x), dtype=torch.float64, device=device)
        given = {"call": call, "x_bins": x_bins, "g_bins": g_bins, "sums": sums}
        value = (FLOATS[kind],)
        start.start(table.SPECTRAL_PAIRS, value, cuda, **given)
        found = {"x_sizes": both[0].sizes, "g_sizes": both[1].sizes, "squares": squares}
        start.start(table.SPECTRAL_WHITENED, value, cuda, bound=bound, **given, **found)
    return x_bins, g_bins, squares


def _tap_turns(band: Band, kernel: Axes, dilation: Axes, dtype: torch.dtype) -> Tensor:
    """Return ``[K, taps, 2]``, what Re S and Im S of a bin add to the taps."""
    turns = torch.stack(bins.crop_matrix(band, kernel, dilation))
    return turns.permute(2, 1, 0).to(dtype).contiguous()


@torch.no_grad()
def bins_sum(
    start: Device,
    x_bins: Tensor,
    g_bins: Tensor,
    factors: Tensor,
    out: Tensor,
    *,
    dilation: Size = 1,
    groups: int = 1,
    band: Band,
) -> None:
    kind, device = out.dtype, out.device
    kernel, between = axes(out.shape[2:]), bins.taps_apart(out, dilation)
    turns = on(device, _tap_turns, band, kernel, between, kind)
    call = _tables.one(
        layouts.SPECTRAL_TAPS,
        turns=turns.data_ptr(),
        batch=x_bins.shape[1],
        ins=x_bins.shape[3],
        outs=g_bins.shape[3],
        groups=groups,
        bins=len(x_bins),
        taps=turns.shape[1],
    )
    grid = table.bins_sum_grid(call)
    if not isinstance(grid, tuple):
        return
    with _device.guard(device) as cuda:
        partial = torch.empty(grid[1], out.numel(), dtype=kind, device=device)
        value, given = (FLOATS[kind],), {"x_bins": x_bins, "g_bins": g_bins}
        start.start(
            table.SPECTRAL_BINS_SUM,
            value,
            cuda,
            call=call,
            factors=factors,
            partial=partial,
            **given,
        )
        numbers = out.numel()
        start.start(
            table.SPECTRAL_ADD,
            value,
            cuda,
            splits=grid[1],
            numbers=numbers,
            partial=partial,
            out=out,
        )
    increment_version(out)


KERNELS: Rows = (
    ("spectral.conv_norm", conv_norm, refuse_first),
    ("spectral.conv_bins", conv_bins, refuse_first),
    ("spectral.whitened_bins", whitened_bins, refuse_first),
    ("spectral.bins_sum", bins_sum, refuse_first),
)
"""``(op, run, refuse)``."""
