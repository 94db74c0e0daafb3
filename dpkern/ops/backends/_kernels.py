"""The launch table: every device kernel with its instances, parameters, block and grid.

Grids depend on sizes alone, never on the device, so that results do not either. A grid of no blocks
means that there is nothing to do. The build compiles exactly the instances that are listed here.

Only the standard library is used: the build runs this file before anything is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from ...base import codes, layouts
from ...base.struct_types import F32, F64, I32, I64, U64, Struct, Type, pointer

Grid = int | tuple[int, int]
"""Blocks, or columns and rows of blocks."""
Instance = tuple[str, ...]
Parameters = Mapping[str, Type | Struct]

FLOATS = ("float", "double")
INTEGERS = ("std::int32_t", "std::int64_t")
BOOLS = ("false", "true")
SYMBOL_TYPES = ("std::uint8_t", *INTEGERS)
SOURCE = "Source"
DRAWN = (*(law.capitalize() for law in codes.DISTRIBUTIONS.words), SOURCE)
"""Origins of a tile of draws: a law, or whatever source the ``Draws`` name."""
COEF_DRAWN = ("Laplace", SOURCE)
GRADS = (("float", "float"), ("double", "double"), ("Bfloat16", "float"))
"""Types of gradients, each with that of its factors and float sums."""
HELD = ("1", "4")
"""Chunks of a row that a block holds in registers."""
HELD_BATCH = 2048
"""Rows from which on blocks hold them: fewer would not fill a device."""

FIRST = Type("", "", 0)
"""The type of a parameter that is a kernel's first template argument."""
_BYTES = {"float": 4, "double": 8}
MAX_BLOCKS = 2**31 - 1
"""The largest grid. A larger one fails at its launch."""


@dataclass(frozen=True, eq=False)
class CudaKernel:
    """A kernel of ``csrc/cuda``.

    Attributes:
        source: the file that defines it, without its ending.
        name: the function.
        threads: of a block.
        parameters: types by name, in order.
        grid: blocks for a call with these arguments, by name.
        instances: template arguments of every instance.
    """

    source: str
    name: str
    threads: int
    parameters: Parameters
    grid: Callable[..., Grid]
    instances: tuple[Instance, ...] = ((),)

    def types(self, instance: Instance) -> tuple[Type | Struct, ...]:
        """Return the types of an instance's parameters."""
        first = {"float": F32, "double": F64}.get(instance[0] if instance else "", FIRST)
        return tuple(first if type_ is FIRST else type_ for type_ in self.parameters.values())

    def symbol(self, instance: Instance) -> str:
        """Return an instance as C++ spells it inside the namespace of the kernels."""
        assert instance in self.instances, (self.name, instance)
        return f"{self.name}<{', '.join(instance)}>" if instance else self.name


def blocks_of(n: int, per_block: int = 1) -> int:
    """Return how many blocks hold n."""
    return min(-(-n // per_block), MAX_BLOCKS + 1)


def tile_blocks(first: int, n: int) -> int:
    """Return how many blocks make the noise of n positions from ``first`` on."""
    skipped = first % layouts.TILE
    return blocks_of(skipped + n, layouts.TILE * layouts.TILES_PER_BLOCK) if n else 0


def splits(rows: int, count: int, columns: int) -> int:
    """Return into how many parts rows are split, so that a batch of short ones fills a device."""
    wanted = 1024 // (columns // layouts.BLOCK_COLUMNS + count)
    return max(1, min(wanted, rows // 32))


def _all(*choices: Iterable[str]) -> tuple[Instance, ...]:
    return tuple(product(*choices))


def _sums(value: str) -> tuple[str, ...]:
    return (value, *INTEGERS)


def _pointers(*names: str) -> dict[str, Type]:
    return {name: pointer("void") for name in names}


# noise

KEYSTREAM = CudaKernel(
    "noise",
    "keystream_kernel",
    layouts.CIPHER_THREADS,
    {"stream": layouts.STREAM, "first_block": U64, "blocks": I64, **_pointers("out")},
    lambda *, blocks, **_: blocks_of(blocks, layouts.CIPHER_THREADS),
)
DRAWS = CudaKernel(
    "noise",
    "draws_kernel",
    layouts.TILE_THREADS,
    {"draws": layouts.DRAWS, "first": U64, "n": I64, **_pointers("x")},
    lambda *, first, n, **_: tile_blocks(first, n),
    _all(DRAWN),
)
ROUNDING = CudaKernel(
    "noise",
    "rounding_kernel",
    layouts.TILE_THREADS,
    {"rounding": layouts.STREAM, "first": U64, "n": I64, **_pointers("bits")},
    lambda *, first, n, **_: tile_blocks(first, n),
)
ADD_NOISE_INTEGER = CudaKernel(
    "noise",
    "add_noise_integer_kernel",
    layouts.TILE_THREADS,
    {"draws": layouts.DRAWS, "first": U64, "n": I64, **_pointers("x")},
    lambda *, first, n, **_: tile_blocks(first, n),
    _all(INTEGERS, DRAWN),
)
ADD_NOISE_FLOAT = CudaKernel(
    "noise",
    "add_noise_float_kernel",
    layouts.TILE_THREADS,
    {
        "draws": layouts.DRAWS,
        "rounding": layouts.STREAM,
        "first": U64,
        "n": I64,
        "per_unit": FIRST,
        "cell": FIRST,
        **_pointers("x", "nonfinite"),
    },
    lambda *, first, n, **_: tile_blocks(first, n),
    _all(FLOATS, DRAWN),
)

ADD_NOISE_SCALED = CudaKernel(
    "noise",
    "add_noise_scaled_kernel",
    layouts.TILE_THREADS,
    {
        "draws": layouts.DRAWS,
        "rounding": layouts.STREAM,
        "first": U64,
        "n": I64,
        **_pointers("scales", "x", "nonfinite"),
    },
    lambda *, first, n, **_: tile_blocks(first, n),
    _all(FLOATS, DRAWN),
)

# symbols

RANDOMIZE = CudaKernel(
    "symbols",
    "symbols_kernel",
    layouts.CIPHER_THREADS,
    {
        "stream": layouts.STREAM,
        "first": U64,
        "response": layouts.RESPONSE_PARAMS,
        **_pointers("x"),
        "n": I64,
        **_pointers("out"),
    },
    lambda *, first, n, **_: symbol_blocks(first, n),
    _all(SYMBOL_TYPES),
)


def symbol_blocks(first: int, n: int) -> int:
    """Return how many blocks answer n symbols from position ``first`` on."""
    skipped = first % layouts.SYMBOLS_PER_CIPHER_BLOCK
    each = layouts.CIPHER_THREADS * layouts.SYMBOLS_PER_CIPHER_BLOCK
    return blocks_of(skipped + n, each) if n else 0


# coefficients of polynomial losses

_COEF_PERTURB: Parameters = {
    "plan": layouts.COEF_PLAN,
    **_pointers("targets", "linear", "quadratic"),
}
PERTURB_TILE = CudaKernel(
    "coef",
    "perturb_tile_kernel",
    layouts.TILE_THREADS,
    _COEF_PERTURB,
    # Row 0 of the grid makes the linear coefficients, row 1 the quadratic ones.
    lambda *, plan, **_: (tile_blocks(int(plan["linear"]), _coefficients(plan)), 2),
    _all(FLOATS, COEF_DRAWN),
)
PERTURB_FLAT = CudaKernel(
    "coef",
    "perturb_flat_kernel",
    layouts.FLAT_THREADS,
    _COEF_PERTURB,
    lambda *, plan, **_: blocks_of(_coefficients(plan), layouts.COEF_PIECE),
    _all(FLOATS, BOOLS),
)
_COEF_LOSS: Parameters = {
    "plan": layouts.COEF_PLAN,
    **_pointers("z", "targets", "shift", "loss", "dz"),
}
QUADRATIC_TILE = CudaKernel(
    "coef",
    "quadratic_tile_kernel",
    layouts.TILE_THREADS,
    _COEF_LOSS,
    lambda *, plan, **_: loss_blocks(plan),
    _all(FLOATS, COEF_DRAWN),
)
QUADRATIC_FLAT = CudaKernel(
    "coef",
    "quadratic_flat_kernel",
    layouts.TILE_THREADS,
    _COEF_LOSS,
    lambda *, plan, **_: loss_blocks(plan),
    _all(FLOATS, BOOLS),
)
_FEATURES = {
    "plan": layouts.COEF_PLAN,
    "sizes": layouts.FEATURE_SIZES,
    "of": layouts.FEATURE_ARRAYS,
    "sums": layouts.FEATURE_SUMS,
}
FEATURES_TILE = CudaKernel(
    "coef_features",
    "features_tile_kernel",
    layouts.TILE_THREADS,
    _FEATURES,
    lambda *, plan, sizes, **_: feature_blocks(plan, sizes),
    _all(FLOATS, COEF_DRAWN),
)
FEATURES_FLAT = CudaKernel(
    "coef_features",
    "features_flat_kernel",
    layouts.TILE_THREADS,
    _FEATURES,
    lambda *, plan, sizes, **_: feature_blocks(plan, sizes),
    _all(FLOATS, BOOLS),
)
FEATURES_SUM = CudaKernel(
    "coef_features",
    "features_sum_kernel",
    layouts.FLAT_THREADS,
    {"records": I64, "numbers": I64, **_pointers("of_records", "dweights")},
    lambda *, records, numbers, **_: blocks_of(numbers if records else 0, layouts.FLAT_THREADS),
    _all(FLOATS),
)
DESCENT_ROOMS = {"float": ((8, 1), (16, 2)), "double": ((8, 1), (16, 1))}
"""Units of the code, and sixteens of features, that a thread has registers for."""
DESCENT_USERS = layouts.DESCENT_THREADS // layouts.LANES
DESCEND = CudaKernel(
    "coef_descend",
    "descend_kernel",
    layouts.DESCENT_THREADS,
    {"call": layouts.DESCENT},
    lambda *, call, **_: blocks_of(descending_runs(call)),
    tuple((v, *map(str, room)) for v, rooms in DESCENT_ROOMS.items() for room in rooms),
)


def descent_room(value: str, features: int, units: int) -> tuple[int, int] | None:
    """Return the smallest room for such an autoencoder of this type, or None."""
    rooms = DESCENT_ROOMS[value]
    return next((r for r in rooms if units <= r[0] and features <= layouts.LANES * r[1]), None)


def descending_runs(call: Any) -> int:
    """Return the runs with something to do."""
    work = int(call["users"]) * int(call["features"]) * int(call["units"]) * int(call["steps"])
    return int(call["runs"]) if work else 0


def _coefficients(plan: Any) -> int:
    return int(plan["rows"]) * int(plan["columns"])


def loss_blocks(plan: Any) -> int:
    """Return how many blocks take whole rows that fit a window, or one row that does not."""
    rows, columns = int(plan["rows"]), int(plan["columns"])
    return blocks_of(rows, max(1, layouts.WINDOW // columns)) if columns else 0


def feature_blocks(plan: Any, sizes: Any) -> int:
    """Return a block for each record, or none if there are no coefficients."""
    empty = not int(sizes["classes"]) * int(sizes["width"])
    return 0 if empty else blocks_of(int(plan["rows"]))


# update

_UPDATE: Parameters = {"plan": layouts.UPDATE_PLAN, **_pointers("tasks", "nonfinite")}
UPDATE_TILE = CudaKernel(
    "update",
    "update_tile_kernel",
    layouts.TILE_THREADS,
    _UPDATE,
    lambda *, plan, **_: blocks_of(int(plan["pieces"]), layouts.TILES_PER_BLOCK),
    tuple((t, s, drawn) for t in FLOATS for s in _sums(t) for drawn in DRAWN),
)
UPDATE_MAPPED = CudaKernel(
    "update_mapped",
    "update_mapped_kernel",
    layouts.TILE_THREADS,
    {"plan": layouts.UPDATE_PLAN, **_pointers("tasks", "maps", "nonfinite")},
    lambda *, plan, **_: blocks_of(int(plan["pieces"]), layouts.TILES_PER_BLOCK),
    UPDATE_TILE.instances,
)
UPDATE_FLAT = CudaKernel(
    "update",
    "update_flat_kernel",
    layouts.FLAT_THREADS,
    _UPDATE,
    lambda *, plan, **_: blocks_of(int(plan["pieces"])),
    (*((t, t, "false") for t in FLOATS), *((t, s, "true") for t in FLOATS for s in _sums(t))),
)
ADVANCE = CudaKernel(
    "update",
    "advance_kernel",
    1,
    {**_pointers("step_counter"), "beta1": F64, "beta2": F64},
    lambda **_: 1,
)

# rows of gradients

POWER = CudaKernel(
    "clip",
    "power_kernel",
    layouts.ROW_THREADS,
    {"all": layouts.ROWS, "p": I32, **_pointers("partial")},
    lambda *, all, **_: blocks_of(int(all["rows"]) * int(all["chunks"])),
    _all(g for g, _ in GRADS),
)
MAPPED_POWER = CudaKernel(
    "clip",
    "mapped_power_kernel",
    layouts.ROW_THREADS,
    {"all": layouts.ROWS, **_pointers("maps"), "p": I32, **_pointers("partial")},
    lambda *, all, **_: blocks_of(int(all["rows"]) * int(all["chunks"])),
    _all(g for g, _ in GRADS),
)
FACTOR = CudaKernel(
    "clip",
    "factor_kernel",
    layouts.FACTOR_THREADS,
    {"all": layouts.ROWS, "clip": layouts.CLIP, **_pointers("partial")},
    lambda *, all, **_: warp_blocks(int(all["rows"]) if all["count"] else 0),
    _all(FLOATS),
)
SUM = CudaKernel(
    "clip",
    "sum_kernel",
    layouts.ROW_THREADS,
    {
        "all": layouts.ROWS,
        "factors": layouts.FACTORS,
        **_pointers("partial"),
        "powers": layouts.POWERS,
    },
    lambda *, all, **_: sum_grid(all),
    tuple((g, s, v) for g, v in GRADS for s in _sums(v)),
)
COMBINE = CudaKernel(
    "clip",
    "combine_kernel",
    layouts.ROW_THREADS,
    {"all": layouts.ROWS, "splits": I64, **_pointers("partial")},
    lambda *, all, splits, **_: combine_blocks(all) if splits > 1 else 0,
    _all(FLOATS),
)
CLIP_HELD = CudaKernel(
    "clip",
    "clip_held_kernel",
    layouts.ROW_THREADS,
    {"all": layouts.ROWS, "clip": layouts.CLIP, **_pointers("partial")},
    lambda *, all, **_: held_splits(all),
    tuple(
        (g, v, chunks, squares)
        for g, v in GRADS
        if v == "float"
        for chunks, squares in product(HELD, BOOLS)
    ),
)
REPAIR = CudaKernel(
    "clip",
    "repair_kernel",
    layouts.ROW_THREADS,
    {"all": layouts.ROWS, "clip": layouts.CLIP},
    lambda *, all, **_: blocks_of(int(all["rows"]) if all["chunks"] else 0),
    tuple((g, s, v) for g, v in GRADS for s in INTEGERS),
)
SQUARE = CudaKernel(
    "explicit",
    "square_kernel",
    layouts.FACTOR_THREADS,
    {**_pointers("partial"), "chunks": I64, "batch": I64, **_pointers("squares")},
    lambda *, batch, **_: warp_blocks(batch),
)
CLIP_FACTORS = CudaKernel(
    "explicit",
    "clip_factors_kernel",
    layouts.FACTOR_THREADS,
    {
        **_pointers("squares"),
        "count": I64,
        "batch": I64,
        "rule": layouts.CLIP_RULE,
        **_pointers("norms", "factors"),
    },
    lambda *, batch, **_: blocks_of(batch, layouts.FACTOR_THREADS),
    _all(FLOATS),
)


def warp_blocks(rows: int) -> int:
    """Return how many blocks take a row with each warp."""
    return blocks_of(rows, layouts.FACTOR_THREADS // layouts.WARP)


def sum_grid(rows: Any) -> tuple[int, int]:
    """Return blocks for the columns, and splits of the rows."""
    n, count, chunks, columns = (int(rows[name]) for name in ("rows", "count", "chunks", "columns"))
    if not n or not chunks:
        return 0, 1
    return blocks_of(chunks * (layouts.CHUNK // layouts.BLOCK_COLUMNS)), splits(n, count, columns)


def combine_blocks(rows: Any) -> int:
    """Return a block for every 32 columns of a chunk."""
    return blocks_of(int(rows["chunks"]) * (layouts.CHUNK // layouts.WARP))


def held(rows: Any, arithmetic: codes.Arithmetic, grad: str) -> str | None:
    """Return how many chunks a block holds in registers, if rows are to be read once."""
    chunks, batch = int(rows["chunks"]), int(rows["rows"])
    floats = arithmetic is codes.Arithmetic.float and dict(GRADS)[grad] == "float"
    fits = [n for n in HELD if 0 < chunks <= int(n)]
    return fits[0] if fits and floats and batch >= HELD_BATCH else None


def held_splits(rows: Any) -> int:
    """Return the parts of the rows, whose sums are a sixteenth of what is read, or less."""
    return min(int(rows["rows"]) // 16, 512)


def clip_rooms(rows: Any, arithmetic: codes.Arithmetic, grad: str) -> dict[str, int]:
    """Return the bytes of a call's intermediate arrays; ``grad``: the type of its gradients."""
    value = dict(GRADS)[grad]
    size = _BYTES[value]
    batch, count, chunks = (int(rows[name]) for name in ("rows", "count", "chunks"))
    floats = arithmetic is codes.Arithmetic.float
    has_sums = arithmetic is not codes.Arithmetic.norm_only
    once = held(rows, arithmetic, grad) is not None
    sums = size * held_splits(rows) * int(rows["columns"]) if once else partial_sums(rows, value)
    return {
        "partial": 0 if once else 8 * batch * chunks,
        "factors": size * batch * count if has_sums else 0,
        "powers": 8 * batch * count if has_sums and not floats else 0,
        "sums": sums if floats else 0,
    }


def partial_sums(rows: Any, value: str) -> int:
    """Return the bytes of the float sums of several splits."""
    parts = sum_grid(rows)[1]
    return _BYTES[value] * parts * int(rows["columns"]) if parts > 1 else 0


def feature_rooms(records: int, classes: int, width: int) -> dict[str, int]:
    """Return the bytes of ``FeatureSums``."""
    matrix, vector = 8 * records * classes * width, 8 * records * classes
    return {"linear": matrix, "columns": matrix, "terms": vector, "slopes": vector}


# norms and sums in the frequency domain

SPECTRAL_SIZES = CudaKernel(
    "spectral",
    "spectral_sizes_kernel",
    layouts.SPECTRAL_THREADS,
    {"maps": layouts.SPECTRAL_MAPS, **_pointers("sizes")},
    lambda *, maps, **_: blocks_of(int(maps["batch"])),
    _all(FLOATS),
)
SPECTRAL_POWERS = CudaKernel(
    "spectral",
    "spectral_powers_kernel",
    layouts.SPECTRAL_THREADS,
    {
        "maps": layouts.SPECTRAL_MAPS,
        "by": layouts.SPECTRAL_BLOCKS,
        "kept": layouts.SPECTRAL_KEPT,
        **_pointers("sizes", "powers"),
    },
    lambda *, maps, by, **_: spectral_blocks(maps, by),
    _all(FLOATS),
)
SPECTRAL_LONG = CudaKernel(
    "spectral_long",
    "spectral_long_kernel",
    layouts.SPECTRAL_LONG_THREADS,
    {
        "maps": layouts.SPECTRAL_MAPS,
        "by": layouts.SPECTRAL_LONG,
        "kept": layouts.SPECTRAL_KEPT,
        **_pointers("sizes", "powers"),
    },
    lambda *, maps, by, **_: long_blocks(maps, by),
    _all(FLOATS),
)
SPECTRAL_VOLUMES = CudaKernel(
    "spectral_volume",
    "spectral_volume_kernel",
    layouts.SPECTRAL_VOLUME_THREADS,
    {
        "maps": layouts.SPECTRAL_MAPS,
        "by": layouts.SPECTRAL_VOLUMES,
        "kept": layouts.SPECTRAL_KEPT,
        **_pointers("sizes", "powers"),
    },
    lambda *, maps, by, **_: spectral_blocks(maps, by),
    _all(FLOATS),
)
SPECTRAL_NORM = CudaKernel(
    "spectral_norm",
    "spectral_product_kernel",
    layouts.SPECTRAL_THREADS,
    {
        "call": layouts.SPECTRAL_PRODUCT,
        **_pointers("x_powers", "g_powers", "x_sizes", "g_sizes", "squares"),
    },
    lambda *, squares, **_: blocks_of(len(squares)),
    _all(FLOATS),
)
SPECTRAL_PAIRS = CudaKernel(
    "spectral_whitened",
    "spectral_pairs_kernel",
    layouts.PAIR_THREADS,
    {"call": layouts.SPECTRAL_PAIRS_OF, **_pointers("x_bins", "g_bins", "sums")},
    lambda *, call, **_: blocks_of(int(call["batch"] * call["groups"] * call["pieces"])),
    _all(FLOATS),
)
SPECTRAL_WHITENED = CudaKernel(
    "spectral_whitened",
    "spectral_whitened_kernel",
    layouts.PAIR_THREADS,
    {
        "call": layouts.SPECTRAL_PAIRS_OF,
        "bound": layouts.SPECTRAL_BOUND,
        **_pointers("x_bins", "g_bins", "sums", "x_sizes", "g_sizes", "squares"),
    },
    lambda *, call, **_: blocks_of(int(call["batch"])),
    _all(FLOATS),
)
SPECTRAL_BINS_SUM = CudaKernel(
    "spectral_sum",
    "spectral_bins_sum_kernel",
    layouts.PAIR_THREADS,
    {"call": layouts.SPECTRAL_TAPS, **_pointers("x_bins", "g_bins", "factors", "partial")},
    lambda *, call, **_: bins_sum_grid(call),
    _all(FLOATS),
)
SPECTRAL_ADD = CudaKernel(
    "spectral_sum",
    "spectral_add_kernel",
    layouts.FLAT_THREADS,
    {"splits": I64, "numbers": I64, **_pointers("partial", "out")},
    lambda *, numbers, **_: blocks_of(numbers, layouts.FLAT_THREADS),
    _all(FLOATS),
)


CIRCULANT_NORM = CudaKernel(
    "circulant",
    "circulant_norm_kernel",
    layouts.CIRCULANT_NORM_THREADS,
    {"call": layouts.CIRCULANT_NORM, **_pointers("x", "g", "squares")},
    lambda *, squares, **_: blocks_of(len(squares)),
    _all(FLOATS),
)
CIRCULANT_POSITIONS = CudaKernel(
    "circulant",
    "circulant_positions_kernel",
    layouts.CIRCULANT_THREADS,
    {"call": layouts.CIRCULANT_POSITIONS, **_pointers("x", "g", "partial")},
    lambda *, partial, **_: blocks_of(partial.numel()),
    _all(FLOATS),
)
CIRCULANT_ABOVE = CudaKernel(
    "circulant",
    "circulant_above_kernel",
    layouts.CIRCULANT_NORM_THREADS,
    {"call": layouts.CIRCULANT_POSITIONS, **_pointers("x", "g", "partial", "squares")},
    lambda *, squares, **_: blocks_of(len(squares)),
    _all(FLOATS),
)
CIRCULANT_PAIRS = CudaKernel(
    "circulant",
    "circulant_pairs_kernel",
    layouts.CIRCULANT_THREADS,
    {"call": layouts.CIRCULANT_PAIRS, **_pointers("a", "b", "factors", "out")},
    lambda *, call, **_: (circulant_tiles(call), circulant_splits(call)),
    _all(FLOATS),
)


def circulant_tiles(call: Any) -> int:
    """Return blocks of rows and columns of products of circulant blocks."""
    rows, columns = (blocks_of(int(call[n]), layouts.CIRCULANT_TILE) for n in ("rows", "columns"))
    return rows * columns


def circulant_splits(call: Any) -> int:
    """Return parts of the terms, so that few rows and columns fill a device; one of a product."""
    if not int(call["split_stride"]):
        return 1
    most = int(call["terms"]) // (8 * layouts.CIRCULANT_STEP)
    return max(1, min(most, 512 // max(1, circulant_tiles(call))))


def spectral_blocks(maps: Any, by: Any) -> int:
    """Return a block for some kx of a part of a group's maps of a sample."""
    chunks = -(-int(by["across"]) // int(by["together"]))
    return blocks_of(int(maps["batch"] * maps["groups"] * maps["splits"]) * chunks)


def long_blocks(maps: Any, by: Any) -> int:
    """Return the same where lines have two levels."""
    half, lines = int(by["across"]["n1"]) // 2 + 1, int(by["lines"])
    chunks = -(-half // lines) * int(by["parts"])
    return blocks_of(int(maps["batch"] * maps["groups"] * maps["splits"]) * chunks)


def pair_pieces(ins: int, outs: int) -> int:
    """Return how many blocks have the channel pairs of a group of a sample."""
    return blocks_of(ins * -(-outs // layouts.SPECTRAL_PAIRS), layouts.PAIR_THREADS)


def bins_sum_grid(call: Any) -> Grid:
    """Return blocks of channel pairs, and parts of the bins so that few pairs fill a device."""
    groups, bins = int(call["groups"]), int(call["bins"])
    ins, outs = (int(call[name]) // groups for name in ("ins", "outs"))
    blocks = groups * blocks_of(-(-ins // 2) * -(-outs // 2), layouts.PAIR_THREADS)
    if not blocks or not bins:
        return 0
    return blocks, max(1, min(-(-bins // layouts.SPECTRAL_TOGETHER), 512 // blocks))


KERNELS = tuple(value for value in list(globals().values()) if isinstance(value, CudaKernel))
"""Every kernel."""


def signatures() -> dict[str, str]:
    """Return the parameters of every instance, as a compiled module tells them: "s44 i8 p8"."""
    return {
        kernel.symbol(instance): " ".join(type_.signature for type_ in kernel.types(instance))
        for kernel in KERNELS
        for instance in kernel.instances
    }
