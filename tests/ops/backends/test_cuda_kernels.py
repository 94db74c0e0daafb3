"""The device kernels, emulated, against the CPU's: where tiles, chunks, packs and blocks end.

Noise, updates, symbols and sums of integers bit for bit, norms and float sums up to rounding; with
the threads of a block in both orders, and with tensors that begin at no multiple of 16 bytes and
end where their memory does. ``make sanitize`` runs this file on kernels compiled with sanitizers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from dpkern.base.rng import Key, Purpose, Stream
from dpkern.ops import _lattice, clip, noise, symbols, testing, update
from dpkern.ops._draws import CdtDraws, SampleReads
from dpkern.ops.backends import _kernels, cuda
from dpkern.ops.ghost import explicit
from dpkern.step.noise_tables._cdt_law import CdtLaw

FLOATS = (torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)
BITS = {torch.float32: torch.int32, torch.float64: torch.int64}
KEY = Key.from_unsafe_seed(3)
ROUNDING = KEY.stream(Purpose.ROUNDING, 7)
CARRY = 2**32 // 48 * 512
"""In this tile the counters of the cipher pass 2^32."""
WINDOWS = (
    *((0, 0), (0, 1), (511, 2), (3, 509), (512, 512), (100, 1100), (1657, 1), (27100, 200)),
    *((CARRY - 5, 1200), (2**41 + 17, 700), (77, 20000)),
)
INFINITY, NAN = float("inf"), float("nan")


def drawn(law: str) -> Stream:
    """A law's keystream."""
    return KEY.stream(Purpose.NOISE if law == "gaussian" else Purpose.LAPLACE, 7)


@pytest.fixture(params=[False, True], ids=["forward", "reverse"])
def emulator(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The emulated kernels, with the threads of a block run in this order."""
    module = cuda._emulated()
    if isinstance(module, str):
        pytest.skip(f"cuda {module}")
    with testing.emulated("cuda"):
        module.order(reverse=request.param)
        yield module
    module.order(reverse=False)


def shifted(x: torch.Tensor, by: int = 1) -> torch.Tensor:
    """The same values from entry ``by`` of their memory on, to its end."""
    made = torch.empty(x.numel() + by, dtype=x.dtype)[by:].view(x.shape)
    return made.copy_(x)


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Bit for bit, signs of zero and NaN included."""
    as_bits = BITS.get(got.dtype, got.dtype)
    return got.dtype is want.dtype and torch.equal(got.view(as_bits), want.view(as_bits))


@pytest.mark.parametrize("rounds", [20, 12, 8])
def test_keystream(emulator: ModuleType, rounds: int) -> None:
    stream = Key.from_unsafe_seed(0, rounds=rounds).stream(Purpose.NOISE, 5)
    for blocks in (0, 1, 7, 3000):
        place = {"first_block": 2**32 - 3, "blocks": blocks}
        got, want = (noise.keystream(stream, backend=b, **place) for b in ("cuda", "cpu"))
        assert torch.equal(got, want), blocks


@pytest.mark.parametrize("law", ["gaussian", "laplace"])
def test_draws_and_rounding_bits(emulator: ModuleType, law: str) -> None:
    for position, n in WINDOWS:
        place: dict[str, Any] = {"position": position, "count": n}
        for make, given in (
            (noise.lattice_draws, {"stream": drawn(law), "distribution": law}),
            (noise.rounding_bits, {"stream": ROUNDING}),
        ):
            got, want = (make(backend=b, **given, **place) for b in ("cuda", "cpu"))
            assert torch.equal(got, want), (make.name, position)


@pytest.mark.parametrize("law", ["gaussian", "laplace"])
@pytest.mark.parametrize("word_bits", [8, 64])
def test_draws_of_a_cumulative_table(emulator: ModuleType, law: str, word_bits: int) -> None:
    stream = KEY.stream(Purpose.TABLES, 7)
    draws = CdtDraws(0, CdtLaw(law, word_bits).table, stream=stream, distribution=law)
    for position, n in WINDOWS:
        place: dict[str, Any] = {"position": position, "count": n}
        got, want = (noise.source_draws(draws, backend=b, **place) for b in ("cuda", "cpu"))
        assert torch.equal(got, want), position


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
def test_draws_of_a_table_of_samples(emulator: ModuleType, dtype: torch.dtype) -> None:
    for entries, (position, n) in product((1, 3, 255, 257, 4096), WINDOWS):
        table = (torch.arange(entries) * 7919 % 65536 - 32768).to(dtype)
        draws = SampleReads(min(position, 5), table, cursor=entries // 2, shift=10)
        place: dict[str, Any] = {"position": position, "count": n}
        got, want = (noise.source_draws(draws, backend=b, **place) for b in ("cuda", "cpu"))
        assert torch.equal(got, want), (entries, position)


@pytest.mark.parametrize("law", ["gaussian", "laplace"])
@pytest.mark.parametrize("dtype", INTEGERS)
def test_noise_on_integers(emulator: ModuleType, dtype: torch.dtype, law: str) -> None:
    limits = torch.iinfo(dtype)
    generator = torch.Generator().manual_seed(7)
    for position, n in WINDOWS:
        x = torch.randint(limits.min, limits.max, (n,), generator=generator, dtype=dtype)
        edges = torch.tensor([0, -1, limits.max, limits.min], dtype=dtype)
        x[: len(edges)] = edges[:n]
        given: dict[str, Any] = {"stream": drawn(law), "distribution": law, "position": position}
        got, want = shifted(x), x.clone()
        for tensor, backend in ((got, "cuda"), (want, "cpu")):
            noise.add_noise(tensor, backend=backend, **given)
        assert torch.equal(got, want), position


def at_cell_edges(stream: Stream, law: str, position: int, n: int) -> torch.Tensor:
    """Sums of scale 3 for which the rounding bits decide between two cells."""
    draws = noise.lattice_draws(stream, position=position, count=n, distribution=law, backend="cpu")
    units = (-draws.double()) % 2.0**14 + 2.0**14 * (draws % 7) - 0.5
    return units * (3.0 / _lattice.SCALE_UNITS)


@pytest.mark.parametrize("law", ["gaussian", "laplace"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_noise_on_floats(emulator: ModuleType, dtype: torch.dtype, law: str) -> None:
    limits = torch.finfo(dtype)
    special = [INFINITY, -INFINITY, NAN, limits.max, 0.0, -0.0, -limits.tiny, limits.tiny / 4]
    generator = torch.Generator().manual_seed(11)
    for position, n in WINDOWS:
        x = (5 * torch.randn(n, generator=generator)).to(dtype)
        x[1::2] = at_cell_edges(drawn(law), law, position, n).to(dtype)[1::2]
        x[: len(special)] = torch.tensor(special, dtype=dtype)[:n]
        given: dict[str, Any] = {"stream": drawn(law), "distribution": law, "position": position}
        got, want = shifted(x), x.clone()
        for tensor, backend in ((got, "cuda"), (want, "cpu")):
            noise.add_noise(tensor, rounding=ROUNDING, scale=3.0, backend=backend, **given)
        assert same(got, want), position


@pytest.mark.parametrize(
    ("dtype", "categories", "keep"),
    [
        (torch.uint8, 2, 2**63),
        (torch.uint8, 3, (2**64 - 1) // 3 + 1),  # the most words for each lie of three
        (torch.int32, 10, 2**63 + 12345),
        (torch.int64, 2**30, 2**64 - (2**30 - 1)),  # and the fewest of many
    ],
)
def test_symbols(emulator: ModuleType, dtype: torch.dtype, categories: int, keep: int) -> None:
    for n, position in product((0, 1, 7, 2048, 5001), (0, 5, 2**35 - 3)):
        x = shifted((torch.arange(n) * 2654435761 % categories).to(dtype))
        given: dict[str, Any] = {"keep": keep, "categories": categories, "position": position}
        got, want = (
            symbols.randomize(x, stream=ROUNDING, backend=b, **given) for b in ("cuda", "cpu")
        )
        assert torch.equal(got, want), (n, position)


RULES = {
    "sgd": update.SGD(lr=0.1, weight_decay=0.01),
    "momentum": update.SGD(lr=0.1, weight_decay=0.01, momentum=0.9, dampening=0.1),
    "nesterov": update.SGD(lr=0.1, weight_decay=0.01, momentum=0.9, nesterov=True),
    "adam": update.Adam(lr=0.1, weight_decay=0.01),
    "adamw": update.AdamW(lr=0.1, weight_decay=0.01),
}
ADVANCERS = {"cuda": "cuda", "cpu": "reference"}
SIZES = ((1, 0), (511, 0, 2, 513), (0, 2100, 7, 0))


def released(sizes: Sequence[int], first: int, law: str, source: str) -> update.Noise | None:
    """The noise of tensors of these sizes, each from a tile of its own on."""
    if source == "none":
        return None
    positions = [first]
    for size in sizes[:-1]:
        positions.append(positions[-1] + -(-size // 512) * 512)
    made = update.Noise(
        distribution=law,
        scales=(3.0,) * len(sizes),
        stream=drawn(law),
        positions=tuple(positions),
        rounding=ROUNDING,
    )
    if source == "stream":
        return made
    place = {"position": first, "count": positions[-1] + sizes[-1] - first}
    values = noise.lattice_draws(made.stream, distribution=law, backend="cpu", **place)
    bits = noise.rounding_bits(ROUNDING, backend="cpu", **place)
    return replace(made, draws=update.Draws(first, values, bits))


def sums_of(
    sizes: Sequence[int], given: update.Noise | None, law: str, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Sums, of floats where the rounding bits decide, one of them infinite."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for i, size in enumerate(sizes):
        x = 1e6 * torch.randn(size, generator=generator)
        if dtype.is_floating_point and given is not None:
            x = at_cell_edges(drawn(law), law, given.positions[i], size)
            x[2:3] = INFINITY
            # The first groups of a tile inside of a tensor hold sums of every size.
            x[600:606] = torch.tensor([3e38, -3e38, NAN, 2.0**30, -(2.0**25), 1e-40])[: size - 600]
        made.append(x.to(dtype))
    return made


def test_a_quotient_of_floats_is_a_product_in_double() -> None:
    """What devices make of a root over ``root2``, near the turning points of rounding."""
    generator = np.random.default_rng(3)
    root2 = (1 - generator.random(1 << 18) ** 4).astype(np.float32)
    middle = 1 + (2 * generator.integers(1 << 23, size=root2.size) + 1) / 2.0**24
    for turn in (middle, 2 * middle, middle * 2.0**-70, middle * 2.0**60):
        x = (turn * root2).astype(np.float32)  # so that x / root2 is close to it
        exact = x.astype(np.longdouble) / root2
        assert np.median(np.abs(exact / turn - 1)) < 2.0**-24
        product = x.astype(np.float64) * (1 / root2.astype(np.float64))
        assert np.array_equal(product.astype(np.float32), x / root2)


@pytest.mark.parametrize("source", ["none", "stream", "draws", "step_counter"])
@pytest.mark.parametrize("rule", RULES)
def test_updates(emulator: ModuleType, rule: str, source: str) -> None:
    law = "laplace" if rule.startswith("adam") else "gaussian"
    for dtype, sizes, skip in product(FLOATS, SIZES, (0, 1)):
        for total in (dtype,) if source in ("none", "step_counter") else (dtype, *INTEGERS):
            how = "stream" if source == "step_counter" else source
            given = released(sizes, 5 * skip, law, how)
            results = []
            for backend in ("cuda", "cpu"):
                generator = torch.Generator().manual_seed(1)
                params = [
                    shifted(torch.randn(n, generator=generator, dtype=dtype), skip) for n in sizes
                ]
                sums = [shifted(x, skip) for x in sums_of(sizes, given, law, total)]
                state = RULES[rule].init(params)
                at = given
                if source == "step_counter":
                    assert given is not None
                    at = replace(given, step_counter=update.step_counter(RULES[rule], 0, "cpu"))
                bad = []
                for _ in range(2):
                    found = update.step(
                        params,
                        sums,
                        rule=RULES[rule],
                        state=state,
                        gradient_scale=1 / 64,
                        noise=at,
                        backend=backend,
                    )
                    bad.append(int(found))
                    if at is not None and at.step_counter is not None:
                        update.advance(
                            at.step_counter, rule=RULES[rule], backend=ADVANCERS[backend]
                        )
                buffers = [b for group in state.buffers.values() for b in group]
                results.append((params, buffers, bad))
            (got, kept, found), (want, wanted, expected) = results
            where = dtype, total, sizes, skip
            assert all(same(a, b) for a, b in zip(got, want, strict=True)), where
            assert all(same(a, b) for a, b in zip(kept, wanted, strict=True)), where
            assert found == expected, where


def rows_of(batch: int, columns: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
    """Rows of every kind: ordinary, zero, NaN, infinite, huge, denormal, equal entries, small."""
    generator = torch.Generator().manual_seed(3)
    factors = torch.tensor([1, 0, 1, 1, 1e37, 1e-40, 0, 1e-3, 1], dtype=torch.float64)
    made = []
    for n in columns:
        x = torch.randn(batch, n, generator=generator, dtype=torch.float64)
        kind = torch.arange(batch) % 9
        x *= factors[kind, None]
        x[kind == 6] = 0.1
        x[kind == 2, :1], x[kind == 3, :1] = NAN, -INFINITY
        made.append(shifted(x.to(dtype), len(made) + 1))
    return made


def near(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Up to rounding, and not finite alike."""
    tolerance = {"rtol": 1e-5, "atol": 1e-4} if got.dtype is torch.float32 else {"rtol": 1e-11}
    return torch.allclose(got, want, equal_nan=True, **{"atol": 1e-10, **tolerance})


SHAPES: tuple[tuple[int, tuple[int, ...]], ...] = (
    *((0, (7,)), (1, (0, 1)), (10, (7, 1, 33)), (9, (0, 4100, 2)), (70, (40,))),
)


@pytest.mark.parametrize("style", clip.STYLES)
@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_read_once(
    emulator: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    p: int,
    style: str,
) -> None:
    """One chunk and several, parts of one and whole ones, empty tensors, any alignment."""
    monkeypatch.setattr(_kernels, "HELD_BATCH", 40)
    start, started = cuda.ModuleLauncher.start, []

    def counted(self: Any, kernel: _kernels.CudaKernel, *arguments: Any) -> int:
        started.append(kernel.name)
        return start(self, kernel, *arguments)

    monkeypatch.setattr(cuda.ModuleLauncher, "start", counted)
    shapes = (40, (4096,)), (69, (1, 0, 33, 4099)), (41, (7, 1, 0, 300, 20)), (41, (1,) * 5)
    for batch, columns in shapes:
        grads = rows_of(batch, columns, dtype)
        bounds = [1.5 + i for i in range(len(columns))] if style == "per_layer" else 1.5
        given: dict[str, Any] = {"max_grad_norm": bounds, "p": p, "style": style}
        started.clear()
        got = clipped(grads, torch.float32, backend="cuda", **given)
        assert ("clip_held_kernel" in started) == (len(columns) < 5 or 0 in columns)
        assert ("power_kernel" in started) == (len(columns) == 5 and 0 not in columns)
        wide = [g.double() for g in grads]
        want = clipped(wide, torch.float64, backend="reference", **given)
        assert near(got.norms, want.norms), (batch, columns)
        assert int(got.nonfinite) == int(want.nonfinite) > 0
        for a, b in zip(got.sums, want.sums, strict=True):
            assert near(a, b.float()), (batch, columns)


def clipped(grads: list[torch.Tensor], total: torch.dtype, **given: Any) -> clip.ClipResult:
    """Clipped and added to sums of this type that are not zero."""
    outs = [torch.full(part.shape[1:], 5, dtype=total) for part in grads]
    return clip.clip_sum(grads, out=outs, **given)


@pytest.mark.parametrize("style", clip.STYLES)
@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("dtype", clip.GRAD_DTYPES)
def test_clipping(
    emulator: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    p: int,
    style: str,
) -> None:
    # M is a little less than C / u = 5000: clipped samples exceed it at first and must be repaired.
    of = clip._checked_bounds

    def tighter(*arguments: Any) -> Any:
        made = of(*arguments)
        return replace(made, unit_bounds=tuple(max(0, bound - 2) for bound in made.unit_bounds))

    monkeypatch.setattr(clip, "_checked_bounds", tighter)
    monkeypatch.setattr(clip, "_known_bounds", tighter)
    for batch, columns in SHAPES:
        grads = rows_of(batch, columns, dtype)
        bounds = [1.5 + i for i in range(len(columns))] if style == "per_layer" else 1.5
        units = torch.tensor(bounds, dtype=torch.float64) / 5000
        unit = units.tolist() if style == "per_layer" else float(units)
        for total in (clip.sum_dtype(dtype), *INTEGERS):
            given: dict[str, Any] = {"max_grad_norm": bounds, "p": p, "style": style}
            if not total.is_floating_point:
                given.update(arithmetic="exact", unit=unit)
            got, want = (clipped(grads, total, backend=b, **given) for b in ("cuda", "cpu"))
            where = batch, columns, total
            assert near(got.norms, want.norms), where
            for a, b in zip(got.sums, want.sums, strict=True):
                assert near(a, b) if total.is_floating_point else torch.equal(a, b), where
            aligned = clipped([g.clone() for g in grads], total, backend="cuda", **given)
            assert same(aligned.norms, got.norms), where
            assert all(same(a, b) for a, b in zip(aligned.sums, got.sums, strict=True)), where
            if batch > 1:  # a row lies elsewhere, and its norm is the same
                rest = clipped([g[1:].clone() for g in grads], total, backend="cuda", **given)
                assert same(rest.norms, got.norms[1:]), where


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("batch", [0, 1, 11, 100])
def test_explicit_gradients(emulator: ModuleType, batch: int, dtype: torch.dtype) -> None:
    for columns in ((0,), (5, 0, 4099), (64, 3)):
        grads = rows_of(batch, columns, dtype)
        got, want = (explicit.explicit_norm(grads, backend=b) for b in ("cuda", "cpu"))
        assert near(got, want), columns
        kind = torch.arange(batch)
        factors = 0.25 + 0.01 * (kind % 7).to(dtype)
        factors[(kind % 9 >= 2) & (kind % 9 <= 4)] = 0  # rows that are not finite, or huge
        outs = [[torch.full((n,), 2, dtype=dtype) for n in columns] for _ in range(2)]
        for each, backend in zip(outs, ("cuda", "cpu"), strict=True):
            explicit.contract(grads, factors, each, backend=backend)
        assert all(near(a, b) for a, b in zip(*outs, strict=True)), columns


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("bound", "scale", "automatic"),
    [(1.5, 1.0, False), (2.0**-96, 1.0, False), (1.5, 64.0, True), (INFINITY, 0.5, False)],
)
def test_clip_factors(
    emulator: ModuleType, bound: float, scale: float, automatic: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(9)
    squares = [
        torch.exp(20 * torch.randn(301, generator=generator, dtype=torch.float64)) for _ in range(3)
    ]
    squares[0][1], squares[1][2] = INFINITY, NAN
    for part in squares:
        part[3] = 0
    given: dict[str, Any] = {"dtype": dtype, "scale": scale, "automatic": automatic}
    got, want = (explicit.clip_factors(squares, bound, backend=b, **given) for b in ("cuda", "cpu"))
    assert all(same(a, b) for a, b in zip(got, want, strict=True))
