"""Calls of ops that between them launch every Triton kernel in the forms that training meets.

Triton makes a kernel of its own for each type, for pointers and sizes that are multiples of 16, and
for sizes that are 1. So the calls differ in these and not in how large they are: a width of 1025
stands for a vocabulary of 50257, which is filled up like it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from dpkern.base.laws import LAWS
from dpkern.base.rng import Purpose
from dpkern.ops import _cdt, ghost, noise, spectral, symbols, update
from dpkern.ops._draws import CdtDraws, Draws, SampleReads
from dpkern.ops.clip import GRAD_DTYPES
from dpkern.ops.ghost._bounds import FLOATS, OPERANDS, of_sums
from dpkern.ops.spectral.bins import kept_bins
from dpkern.ops.testing import KEY
from dpkern.privacy.mechanisms import RandomizedResponse
from tests.ops.small_cases import SMALL_CASES, SmallCase

ON: dict[str, Any] = {"backend": "triton"}
Calls = Iterator[tuple[str, Callable[[], Any]]]

LINEAR = {
    "wide": (2, 1024, 768, 3072),
    "vocabulary": (2, 1024, 768, 1025),
    "narrow": (2, 1024, 64, 10),
    "vit": (8, 197, 768, 3072),
    "odd": (3, 77, 33, 20),
    "short": (3, 8, 64, 64),
    "pair": (3, 2, 64, 64),
    "one": (3, 1, 64, 10),
}
"""Batch, positions, input and output features."""
TIED = ("vocabulary", "odd")
"""Those whose weight is an embedding table as well."""
CONVOLUTIONS: dict[str, tuple[tuple[int, ...], int, dict[str, int]]] = {
    "block": ((2, 64, 32, 32), 64, {"kernel_size": 3, "padding": 1}),
    "last": ((2, 512, 4, 4), 512, {"kernel_size": 3, "padding": 1}),
    "down": ((2, 64, 32, 32), 128, {"kernel_size": 3, "stride": 2, "padding": 1}),
    "stem": ((2, 3, 224, 224), 64, {"kernel_size": 7, "stride": 2, "padding": 3}),
    "patches": ((2, 3, 224, 224), 768, {"kernel_size": 16, "stride": 16}),
    "dense": ((2, 256, 14, 14), 64, {"kernel_size": 1}),
    "shortcut": ((2, 64, 32, 32), 128, {"kernel_size": 1, "stride": 2}),
    "depthwise": ((2, 32, 16, 16), 32, {"kernel_size": 3, "padding": 1, "groups": 32}),
    "line": ((3, 5, 40), 17, {"kernel_size": 3, "stride": 2, "dilation": 2}),
    "volume": ((2, 8, 8, 8, 8), 16, {"kernel_size": 3, "groups": 2}),
}
"""Shape of the input, output channels, arguments."""
CIRCULANT = {
    "layer": (256, 1, 49, 32, 16),
    "wide": (64, 1, 64, 64, 64),
    "large": (16, 1, 4, 4, 512),
    "tiny": (64, 1, 20, 10, 2),
    "odd": (4, 3, 5, 3, 7),
    "positions": (8, 32, 64, 64, 64),
    "grams": (8, 4, 64, 64, 64),
}
"""Samples, positions, blocks of the input and of the output, and their size."""
GRIDS: dict[str, tuple[tuple[int, ...], int, dict[str, int], int]] = {
    "block": ((8, 16, 32, 32), 16, {"kernel_size": 3, "padding": 1}, 34),
    "stem": ((8, 1, 28, 28), 6, {"kernel_size": 5, "padding": 2}, 32),
    "down": ((8, 32, 16, 16), 64, {"kernel_size": 3, "padding": 1, "stride": 2}, 18),
    "large": ((4, 8, 60, 60), 8, {"kernel_size": 3, "padding": 2, "groups": 2}, 64),
    "line": ((3, 5, 40), 17, {"kernel_size": 3}, 41),
}
"""Shape of the input, output channels, arguments, and values on an axis of the transforms' grid."""
USUAL = ("wide", "block")
"""Those that are called with float16 as well; else bfloat16 stands for it."""


def calls() -> Calls:
    """Names and calls, on the backend ``triton``."""
    for dtype in OPERANDS:
        for name in LINEAR:
            if dtype is not torch.float16 or name in USUAL:
                yield from _linear(name, dtype)
        for name in CONVOLUTIONS:
            if dtype is not torch.float16 or name in USUAL:
                yield from _convolution(name, dtype)
    for dtype in FLOATS:
        yield from _layers(dtype)
        for name in CIRCULANT:
            yield from _circulant(name, dtype)
        for name in GRIDS:
            yield from _spectral(name, dtype)
    yield from _spectral("block", torch.bfloat16)
    for dtype in GRAD_DTYPES:
        yield from _gradients(dtype)
    for case in SMALL_CASES:
        yield case.name, partial(_launch, case)
    yield from _draws()


def _launch(case: SmallCase) -> None:
    """Make a case's launches; where they only compile, its comparison fails."""
    with suppress(AssertionError):
        case.verify("triton")


def _name(op: str, name: str, dtype: torch.dtype) -> str:
    return f"{op}-{name}-{str(dtype).removeprefix('torch.')}"


def _linear(name: str, dtype: torch.dtype) -> Calls:
    batch, positions, d, p = LINEAR[name]
    a, g = (torch.zeros(batch, positions, n, dtype=dtype) for n in (d, p))
    factors, out = (torch.zeros(*shape, dtype=of_sums(dtype)) for shape in ((batch,), (p, d)))
    for route in ("direct", "gram") if positions > 1 else ("auto",):
        norm = partial(ghost.linear_norm, a, g, route=route, backend="triton")
        yield _name("linear_norm", f"{name}-{route}", dtype), norm
    given = {"backend": "triton"}
    norms = partial(ghost.linear_norms, [a, a], [g, g], **given)
    yield _name("linear_norms", name, dtype), norms
    yield _name("linear_gradient", name, dtype), partial(ghost.linear_gradient, a, g, **given)
    yield _name("rounded_gradient", name, dtype), partial(ghost.rounded_gradient, a, g, **given)
    rounded = torch.zeros(batch, p, d, dtype=dtype)
    total = partial(ghost.rounded_sum, [rounded], factors, [out], **given)
    yield _name("rounded_sum", name, dtype), total
    yield _name("linear_sum", name, dtype), partial(ghost.linear_sum, a, g, factors, out, **given)
    yield _name("linear_sum_error", name, dtype), partial(ghost.linear_sum_error, a, g, **given)
    whole = partial(ghost.linear_integer_sum, a, g, factors, out.int(), **given)
    for rounding in ("truncate", "factors")[: 2 if positions == 1 else 1]:
        called = partial(whole, rounding=rounding)
        yield _name("linear_integer_sum", f"{name}-{rounding}", dtype), called
    if name in TIED:
        ids, e = torch.zeros(batch, positions, dtype=torch.int64), a.to(factors.dtype)
        tied = partial(ghost.tied_integer_sum, ids, a, g, e, factors, out.int(), **given)
        yield _name("tied_integer_sum", name, dtype), tied
        error = partial(ghost.tied_sum_error, ids, a, g, e, **given)
        yield _name("tied_sum_error", name, dtype), error


def _convolution(name: str, dtype: torch.dtype) -> Calls:
    shape, channels, arguments = CONVOLUTIONS[name]
    own = dict(arguments)
    kernel = (own.pop("kernel_size"),) * (len(shape) - 2)
    weight = (channels, shape[1] // own.get("groups", 1), *kernel)
    convolution = getattr(torch.nn.functional, f"conv{len(kernel)}d")
    meta = (torch.empty(shape, device="meta"), torch.empty(weight, device="meta"))
    x = torch.zeros(shape, dtype=dtype)
    g = torch.zeros(convolution(*meta, **own).shape, dtype=dtype)
    factors, out = (torch.zeros(s, dtype=of_sums(dtype)) for s in (shape[:1], weight))
    given = {**arguments, "backend": "triton"}
    yield _name("conv_norm", name, dtype), partial(ghost.conv_norm, x, g, **given)
    yield _name("conv_gradient", name, dtype), partial(ghost.conv_gradient, x, g, **given)
    yield _name("conv_sum", name, dtype), partial(ghost.conv_sum, x, g, factors, out, **given)
    whole = partial(ghost.conv_integer_sum, x, g, factors, out.int(), **given)
    yield _name("conv_integer_sum", name, dtype), whole
    yield _name("conv_sum_error", name, dtype), partial(ghost.conv_sum_error, x, g, **given)
    if name == "block" and dtype is torch.float32:
        yield _name("conv_gradient", "strict", dtype), partial(_strict, x, g, given)


def _strict(x: torch.Tensor, g: torch.Tensor, given: dict[str, Any]) -> None:
    """Call it where torch may not round operands to TF32."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        ghost.conv_gradient(x, g, **given)


def _circulant(name: str, dtype: torch.dtype) -> Calls:
    batch, positions, ins, outs, block = CIRCULANT[name]
    x, g = (torch.zeros(batch, positions, n, block, dtype=dtype) for n in (ins, outs))
    factors, out = torch.ones(batch, dtype=dtype), torch.zeros(outs, ins, block, dtype=dtype)
    yield _name("circulant_norm", name, dtype), partial(spectral.circulant_norm, x, g, **ON)
    if block > 128:  # larger products are the library's
        return
    total = partial(spectral.circulant_sum, x, g, factors, out, **ON)
    yield _name("circulant_sum", name, dtype), total
    yield _name("circulant_gradient", name, dtype), partial(spectral.circulant_gradient, x, g, **ON)
    for convention in ("row", "column"):
        multiplied = partial(spectral.circulant_product, x[:, 0].clone(), out, **ON)
        given = f"{name}-{convention}"
        yield _name("circulant_product", given, dtype), partial(multiplied, convention=convention)


def _spectral(name: str, dtype: torch.dtype) -> Calls:
    shape, channels, own, side = GRIDS[name]
    size = (side,) * (len(shape) - 2)
    kernel = (own["kernel_size"],) * len(size)
    between = own.get("stride", 1), 2 * own.get("padding", 0) - own["kernel_size"]
    places = [(n + between[1]) // between[0] + 1 for n in shape[2:]]
    x, g = torch.zeros(shape, dtype=dtype), torch.zeros(shape[0], channels, *places, dtype=dtype)
    norm = partial(spectral.conv_norm, x, g, **own, size=size, **ON)
    yield _name("spectral_norm", name, dtype), norm
    band = spectral.Band(size, "shells", 0.25)
    yield (
        _name("spectral_bins", name, dtype),
        partial(spectral.conv_bins, x, g, **own, band=band, **ON),
    )
    taps = math.prod(kernel)
    matrix = torch.eye(taps, dtype=torch.float64)
    white = partial(spectral.whitened_bins, x, g, matrix, **own, band=band, **ON)
    yield _name("spectral_whitened", name, dtype), white
    count, total, groups = len(kept_bins(band)), of_sums(dtype), own.get("groups", 1)
    bins = [torch.zeros(count, shape[0], 2, n, dtype=total) for n in (shape[1], channels)]
    factors = torch.ones(shape[0], dtype=total)
    out = torch.zeros(channels, shape[1] // groups, *kernel, dtype=total)
    given = *bins, factors, out
    added = partial(spectral.bins_sum, *given, groups=groups, band=band, **ON)
    yield _name("spectral_sum", name, dtype), added


def _layers(dtype: torch.dtype) -> Calls:
    """Normalisation and embedding."""
    given: dict[str, Any] = {"backend": "triton"}

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    for weight in (None, zeros(48)):
        name = "weighted" if weight is not None else "plain"
        g, x, one = zeros(3, 7, 48), zeros(3, 7, 48), zeros(3, 7)
        layer = partial(ghost.layer_norm_backward, g, x, one, one, weight, **given)
        yield _name("layer_norm", name, dtype), layer
        yield (
            _name("rms_norm", name, dtype),
            partial(ghost.rms_norm_backward, g, x, one, weight, **given),
        )
        g, x, one = zeros(3, 48, 9), zeros(3, 48, 9), zeros(3, 4)
        group = partial(ghost.group_norm_backward, g, x, one, one, weight, **given)
        yield _name("group_norm", name, dtype), group
    ids, g, table = torch.zeros(3, 100, dtype=torch.int64), zeros(3, 100, 48), zeros(11, 48)
    norm = partial(ghost.embedding_norm, ids, g, **given)
    yield _name("embedding_norm", "table", dtype), norm
    total = partial(ghost.embedding_sum, ids, g, zeros(3), table, **given)
    yield _name("embedding_sum", "table", dtype), total
    whole = partial(ghost.embedding_integer_sum, ids, g, zeros(3), table.int(), **given)
    yield _name("embedding_integer_sum", "table", dtype), whole
    cross = partial(ghost.tied_cross, ids, g, zeros(3, 50, 48), zeros(3, 50, 11), **given)
    yield _name("tied_cross", "table", dtype), cross


def _gradients(dtype: torch.dtype) -> Calls:
    """Per-sample gradients that exist anyway."""
    if dtype not in FLOATS:
        return
    grads, given = [torch.zeros(3, 48, dtype=dtype), torch.zeros(3, 7, dtype=dtype)], {}
    given = {"backend": "triton"}
    yield _name("explicit_norm", "two", dtype), partial(ghost.explicit_norm, grads, **given)
    outs, factors = [grad[0].clone() for grad in grads], grads[0][:, 0].clone()
    yield (
        _name("contract", "two", dtype),
        partial(ghost.contract, grads, factors, outs, **given),
    )
    whole = partial(ghost.explicit_integer_sum, grads, factors, [out.int() for out in outs])
    yield _name("explicit_integer_sum", "two", dtype), partial(whole, **given)
    squares = [torch.ones(3, dtype=torch.float64)]
    for automatic in (False, True):
        clipped = partial(ghost.clip_factors, squares, 1.0, dtype=dtype, automatic=automatic)
        yield _name("clip_factors", str(automatic), dtype), partial(clipped, **given)


def _updated(dtype: torch.dtype, total: torch.dtype, draws: Draws) -> None:
    params, rule = [torch.zeros(48, dtype=dtype)], update.SGD(lr=0.1)
    stream = KEY.stream(Purpose.NOISE, 1)
    given = update.Noise(
        distribution="gaussian",
        scales=(1.0,),
        stream=stream,
        positions=(0,),
        rounding=KEY.stream(Purpose.ROUNDING, 1),
        draws=draws,
    )
    sums = [torch.zeros(48, dtype=total)]
    update.step(params, sums, rule=rule, state=rule.init(params), noise=given, **ON)


def _mapped(dtype: torch.dtype, total: torch.dtype, *, signal: bool) -> None:
    back = torch.zeros(9, 5, dtype=torch.float64)
    one = update.PairMap(signal=back.T.contiguous() if signal else None, back=back)
    params, rule = [torch.zeros(4, 9, dtype=dtype)], update.AdamW(lr=0.1)
    given = update.Noise(
        distribution="gaussian",
        scales=(1.0,),
        stream=KEY.stream(Purpose.NOISE, 1),
        positions=(0,),
        rounding=KEY.stream(Purpose.ROUNDING, 1),
    )
    sums = [torch.zeros(4, 9 if signal else 5, dtype=total)]
    maps = update.PairMaps((one,))
    update.step(params, sums, rule=rule, state=rule.init(params), noise=given, maps=maps, **ON)


def _draws() -> Calls:
    """Noise by itself, and symbols."""
    stream = KEY.stream(Purpose.NOISE, 1)
    yield "keystream", partial(noise.keystream, stream, first_block=0, blocks=300, backend="triton")
    words, tables = _cdt.packed([1 << 31, 3 << 30], 32), {}
    for law in LAWS:
        drawn = partial(noise.lattice_draws, stream, position=7, count=3000, distribution=law)
        yield f"lattice_draws-{law}", partial(drawn, backend="triton")
        tables[law] = CdtDraws(0, words, stream=stream, distribution=law)
        read = partial(noise.source_draws, tables[law], position=7, count=3000)
        yield f"source_draws-{law}", partial(read, backend="triton")
    for dtype in (torch.int16, torch.int32):
        read = partial(noise.source_draws, SampleReads(0, torch.zeros(9, dtype=dtype)))
        yield _name("source_draws", "samples", dtype), partial(read, position=7, count=3000, **ON)
    ring = Draws(0, torch.zeros(48, dtype=torch.int32), torch.zeros(48, dtype=torch.int16))
    for dtype in (*noise.FLOATS, *noise.INTEGERS):
        given: dict[str, Any] = {"scale": 1.0} if dtype in noise.FLOATS else {}
        released = partial(noise.add_noise, torch.zeros(48, dtype=dtype), stream=stream, draws=ring)
        yield _name("add_noise", "drawn", dtype), partial(released, **given, **ON)
    for dtype in noise.FLOATS:
        for total in (dtype, *noise.INTEGERS):
            yield _name("update", f"drawn-{total}", dtype), partial(_updated, dtype, total, ring)
            mapped = partial(_mapped, dtype, total, signal=total is dtype)
            yield _name("update", f"mapped-{total}", dtype), mapped
    sources = {
        "cdt": tables["gaussian"],
        "samples": SampleReads(0, torch.zeros(9, dtype=torch.int16)),
    }
    for source, draws in sources.items():
        given = {"scale": 1.0, "stream": stream, "rounding": KEY.stream(Purpose.ROUNDING, 1)}
        released = partial(noise.add_noise, torch.zeros(48), draws=draws, **given, **ON)
        yield _name("add_noise", source, torch.float32), released
        updated = partial(_updated, torch.float32, torch.float32, draws)
        yield _name("update", source, torch.float32), updated
    keep = RandomizedResponse(epsilon=1.0, categories=10).keep
    for dtype in symbols.DTYPES:
        x = torch.zeros(300, dtype=dtype)
        source = KEY.stream(Purpose.SYMBOLS, 1)
        moved = partial(symbols.randomize, x, stream=source, keep=keep, categories=10)
        yield _name("randomize", "ten", dtype), partial(moved, backend="triton")
