"""Draws that kernels read from tables: the references' bits, the circuit's values, refusals."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from dpkern import InvalidInput, PrivacyError
from dpkern.base.laws import LAWS
from dpkern.base.rng import Purpose, Stream
from dpkern.ops import _cdt, _lattice, noise, testing, update
from dpkern.ops._draws import CdtDraws, SampleReads
from dpkern.ops.backends import cpu
from dpkern.step.noise_tables import Layout, SampleTable, TableShape
from dpkern.step.noise_tables._cdt_law import CdtLaw
from dpkern.step.noise_tables.sample import MASK, POINTER, table_of

# cumulative tables


def reader(table: torch.Tensor, word_bits: int) -> Callable[[int], int]:
    """Return k of an index by the packed table, as csrc/core/cdt.h says it is read."""
    words = [w & 0xFFFFFFFF for w in table.tolist()]
    n = _cdt.boundaries_in(table)
    guide, heads, tails = words[:4096], words[4096 : 4096 + n], words[4096 + n :]
    bounds = [
        (heads[i], tails[3 * i] | tails[3 * i + 1] << 32 | tails[3 * i + 2] << 64) for i in range(n)
    ]

    def magnitude(word: int) -> int:
        head, low = divmod(word << (128 - word_bits), 1 << 96)
        entry = guide[head >> 20]
        k, edge = (entry & 0x7FFFFFFF) >> 20, entry & 0xFFFFF
        if entry < 1 << 31 and edge != head & 0xFFFFF:
            return k + (head & 0xFFFFF > edge)
        while k < n and bounds[k] <= (head, low):
            k += 1
        return k

    return magnitude


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("word_bits", [8, 24, 32, 33, 63, 124])
def test_an_index_gives_the_magnitude_of_the_table(law: str, word_bits: int) -> None:
    made = CdtLaw(law, word_bits)
    table, magnitude = made.cumulative[:-1], reader(made.table, word_bits)
    edges = {edge + step for edge in table[:: max(1, len(table) // 60)] for step in (-1, 0, 1)}
    edges |= {(bucket << word_bits) >> 12 for bucket in (0, 1, 2047, 4095)}
    for word in sorted(word for word in edges if 0 <= word < 1 << word_bits):
        assert magnitude(word) == bisect_right(table, word)


@pytest.mark.parametrize("law", LAWS)
def test_the_indices_of_a_magnitude_are_as_many_as_the_declared_table_says(law: str) -> None:
    """All 2^w indices, looked up: the probabilities are those that the distance is made of."""
    made, words = CdtLaw(law, 14), range(1 << 14)
    found = Counter(map(reader(made.table, 14), words))
    assert [found[k] for k in range(len(made.masses))] == list(made.masses)
    moved = made.table.clone()
    moved[1000] += 1 << 20  # a guide that is one off must show
    assert Counter(map(reader(moved, 14), words)) != found


def on_every_isa(make: Any) -> list[torch.Tensor]:
    """Return what is made on every instruction set that is here, and by the reference."""
    before, results = cpu.isa(), [make("reference")]
    try:
        for name in cpu.ISAS[: cpu.ISAS.index(before) + 1]:
            cpu.use_isa(name)
            results.append(make("cpu"))
    finally:
        cpu.use_isa(before)
    return results


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("word_bits", [8, 32, 64, 124])
@pytest.mark.parametrize(("first", "count"), [(0, 40_000), (2**34 - 700, 1400), (5, 1), (9, 0)])
def test_kernels_look_up_what_the_reference_does(
    law: str, word_bits: int, first: int, count: int
) -> None:
    stream = testing.KEY.stream(Purpose.TABLES, 4)
    draws = CdtDraws(0, CdtLaw(law, word_bits).table, stream=stream, distribution=law)
    place = {"position": first, "count": count}
    wanted, *got = on_every_isa(lambda name: noise.source_draws(draws, **place, backend=name))
    assert all(torch.equal(one, wanted) for one in got)


def tied(stream: Stream, count: int = 1024) -> tuple[list[int], list[int], torch.Tensor]:
    """Return boundaries that are words of the stream, one more and one less in a word of the tail,
    where the lowest differs the other way; all words; rows."""
    rows = _lattice.tile_rows(stream, 0, 2, 4)
    heads = (rows[:, 1::2].reshape(-1).to(torch.int64) & 0xFFFFFFFF).tolist()
    at = torch.arange(count)
    blocks = _lattice.chacha_blocks(stream, at, tail=True)[:3].t().to(torch.int64) & 0xFFFFFFFF
    whole = [
        head << 96 | low[2] << 64 | low[1] << 32 | low[0]
        for head, low in zip(heads, blocks.tolist(), strict=True)
    ]
    places = [(i, (i // 8) % 3 - 1, 32 * (i // 24 % 3)) for i in range(0, count, 8)]
    bounds = (whole[i] + (step << word) - (step if word else 0) for i, step, word in places)
    return sorted(bounds), whole, rows


@pytest.mark.parametrize("law", LAWS)
def test_further_bits_decide_where_the_first_32_are_a_boundarys(law: str) -> None:
    stream, count = testing.KEY.stream(Purpose.TABLES, 5), 1024
    bounds, whole, rows = tied(stream)
    table = _cdt.packed(bounds, 128)
    draws = CdtDraws(0, table, stream=stream, distribution=law)
    made = on_every_isa(
        lambda name: noise.source_draws(draws, position=0, count=count, backend=name)
    )
    ties = range(0, count, 8)
    k = [bisect_right(bounds, whole[i]) for i in range(count)]
    below = [bisect_left([bound >> 96 for bound in bounds], whole[i] >> 96) for i in ties]
    assert 0 < sum(k[i] == low for i, low in zip(ties, below, strict=True)) < len(below)
    own = rows[:, 0::2].reshape(-1)
    first, second = own & 0x3FFF, (((own >> 16) & 0xFF) << 6) + 32
    offset = second if law == "gaussian" else torch.full_like(own, 1 << 13)
    for values in made:
        cells = (values - first - offset) >> 14
        assert torch.where((own >> 15) & 1 == 1, -1 - cells, cells).tolist() == k


# tables of samples

MANY_SHAPES = [
    TableShape(entries=k, stride=s % k or 1, base=o % k, word_bits=w, scrambled=x)
    for k, s, o, w, x in (
        (2, 1, 0, 16, False),
        (2, 1, 1, 8, True),
        (64, 37, 5, 16, False),
        (128, 96, 127, 12, False),
        (128, 64, 1, 16, True),
        (512, 511, 3, 21, False),
        (4096, 1, 0, 16, False),
        (4096, 2, 17, 21, True),
        (8192, 4097, 8191, 16, False),
        (8192, 24, 8000, 16, True),
    )
]


@pytest.mark.parametrize("shape", MANY_SHAPES, ids=str)
def test_reading_order_gives_the_literal_circuits_values(shape: TableShape) -> None:
    """index_i = (p + base + s i) mod K, read by read, over several steps and positions."""
    key, count = testing.KEY, 1300
    table = table_of(key, shape)
    word = noise.keystream(key.stream(Purpose.TABLES, 0, POINTER), first_block=0, blocks=1)[0]
    pointer = int(word) & (shape.entries - 1)
    with SampleTable(shape) as source:
        source.bind(key, Layout.of("laplace", (700,), (count,), "cpu", rounding=False))
        for step in (1, 2, 3):
            word = noise.keystream(key.stream(Purpose.TABLES, step, MASK), first_block=0, blocks=1)
            mask = int(word[0]) & (shape.entries - 1) if shape.scrambled else 0
            indices, pointer = shape.indices(pointer, count, mask)
            literal = (table[indices] << (20 - shape.fraction_bits)).to(torch.int32)
            draws = source.take(step)
            assert isinstance(draws, SampleReads)
            assert draws.values.dtype is (torch.int16 if shape.word_bits <= 16 else torch.int32)
            place = {"position": 700, "count": count}
            made = on_every_isa(
                lambda name, of=draws, at=place: noise.source_draws(of, **at, backend=name)
            )
            assert all(torch.equal(one, literal) for one in made)
            part = noise.source_draws(draws, position=1201, count=99)
            assert torch.equal(part, literal[501:600])


def test_a_table_goes_on_where_the_step_before_stopped_in_a_resumed_run_too() -> None:
    layout = Layout.of("laplace", (0,), (100,), "cpu", rounding=False)

    def taken(steps: tuple[int, ...]) -> torch.Tensor:
        with SampleTable(TableShape(entries=1024, stride=3)) as source:
            source.bind(testing.KEY, layout)
            return torch.stack([source.take(step).at(0, 100) for step in steps])[-1]

    assert torch.equal(taken((1, 2, 3)), taken((3,)))
    assert not torch.equal(taken((1,)), taken((2,)))


# refusals

SAMPLES = SampleReads(0, torch.zeros(8, dtype=torch.int16), cursor=1, shift=3)
LOOKED_UP = CdtDraws(
    0,
    CdtLaw("laplace", 16).table,
    stream=testing.KEY.stream(Purpose.TABLES, 1),
    distribution="laplace",
)
BAD_DRAWS: dict[str, tuple[update.Draws, str]] = {
    "taken back": (replace(SAMPLES, values=SAMPLES.values[:0]), r"draws\.values"),
    "guide alone": (replace(LOOKED_UP, values=LOOKED_UP.values[:4096]), r"draws\.values"),
    "broken": (replace(LOOKED_UP, values=LOOKED_UP.values[:-1]), r"draws\.values"),
    "dtype": (replace(SAMPLES, values=SAMPLES.values.long()), r"draws\.values"),
    "strides": (replace(SAMPLES, values=SAMPLES.values[::2]), r"draws\.values"),
    "cursor": (replace(SAMPLES, cursor=8), "cursor"),
    "shift": (replace(SAMPLES, shift=32), "shift"),
    "rounding": (replace(SAMPLES, rounding=SAMPLES.values), "rounding"),
    "no stream": (replace(LOOKED_UP, stream=None), "stream"),
    "another law": (LOOKED_UP, "distribution"),
}


@pytest.mark.parametrize("name", BAD_DRAWS)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_draws_of_no_use_are_refused(name: str, backend: str) -> None:
    draws, field = BAD_DRAWS[name]
    stream = testing.KEY.stream(Purpose.NOISE, 1)
    x = torch.zeros(5, dtype=torch.int32)
    with pytest.raises(InvalidInput, match=field):
        noise.add_noise(x, stream=stream, draws=draws, backend=backend)
    assert not x.any()


def test_no_word_both_looks_up_and_rounds() -> None:
    streams = {"stream": testing.KEY.stream(Purpose.NOISE, 1), "rounding": LOOKED_UP.stream}
    with pytest.raises(PrivacyError, match="a stream of its own"):
        noise.add_noise(
            torch.zeros(5), scale=1.0, distribution="laplace", draws=LOOKED_UP, **streams
        )
