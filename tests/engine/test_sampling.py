"""Samplers: the law of the masks, their words, resuming, and what they refuse."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from fractions import Fraction
from itertools import islice, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binom, chi2

from dpkern.base.errors import DPKernError, InvalidInput
from dpkern.base.rng import Key, Purpose
from dpkern.engine import subsets
from dpkern.engine.sampling import (
    FixedSizeSampler,
    PoissonSampler,
    PrivateBatchSampler,
    ShuffledSampler,
    make_batches,
)
from dpkern.ops.noise import keystream

SAMPLERS = ("poisson", "fixed", "shuffled")
ALPHA = 1e-6
"""Level of every statistical test; keys are fixed, so an accepted law stays accepted."""


def seeded(seed: int = 1) -> Key:
    return Key.from_unsafe_seed(seed)


def poisson(rate: float, *, n: int = 1000, steps: int = 10, seed: int = 1) -> PoissonSampler:
    return PoissonSampler(dataset_size=n, sample_rate=rate, steps=steps, key=seeded(seed))


def uniformity(observed: torch.Tensor, draws: int, rate: float, *, fixed: bool = False) -> float:
    """p-value of the records' counts after ``draws`` that each hold a record at ``rate``.

    With a fixed number per draw the counts are tied by one sum and vary n / (n - 1) more.
    """
    n = len(observed)
    variance = draws * rate * (1 - rate) * (n / (n - 1) if fixed else 1)
    statistic = float(((observed - draws * rate) ** 2).sum()) / variance
    return float(chi2.sf(statistic, n - 1 if fixed else n))


def size_p_value(sizes: list[int], n: int, rate: float) -> float:
    """p-value of batch sizes against the binomial law, in about eight equally likely cells."""
    inner = {float(binom.ppf(k / 8, n, rate)) for k in range(1, 8)}
    edges = [-1.0, *sorted(inner), float(n)]
    cells = [sum(low < size <= high for size in sizes) for low, high in pairwise(edges)]
    wanted = (binom.cdf(edges[1:], n, rate) - binom.cdf(edges[:-1], n, rate)) * len(sizes)
    statistic = sum((cell - want) ** 2 / want for cell, want in zip(cells, wanted, strict=True))
    return float(chi2.sf(statistic, len(cells) - 1))


@pytest.mark.parametrize(("rate", "wrong"), [(0.01, 0.014), (0.3, 0.32)])
def test_poisson_law(rate: float, wrong: float) -> None:
    n, steps = 500, 2000
    batches = list(poisson(rate, n=n, steps=steps))
    sizes = [len(batch) for batch in batches]
    observed = torch.bincount(torch.cat(batches), minlength=n).double()
    assert size_p_value(sizes, n, rate) > ALPHA
    assert uniformity(observed, steps, rate) > ALPHA
    # The same tests notice another rate.
    assert size_p_value(sizes, n, wrong) < ALPHA
    assert uniformity(observed, steps, wrong) < ALPHA


def test_poisson_records_are_independent() -> None:
    """Pairs of neighbours and of successive steps join together at the rate q^2."""
    n, steps, rate = 400, 1000, 0.2
    masks = torch.zeros(steps, n)
    for row, batch in zip(masks, poisson(rate, n=n, steps=steps), strict=True):
        row[batch] = 1
    for pairs in (masks[:, :-1] * masks[:, 1:], masks[:-1] * masks[1:]):
        deviation = (float(pairs.mean()) - rate**2) / math.sqrt(rate**2 / pairs.numel())
        assert abs(deviation) < 5


@pytest.mark.parametrize("sampler", ["fixed", "shuffled"])
def test_full_batches_are_uniform(sampler: str) -> None:
    n, size, steps = 40, 7, 4000
    batches = make_batches(sampler, dataset_size=n, batch_size=size, steps=steps, key=seeded())
    drawn = list(batches)
    assert {len(batch) for batch in drawn} == {size}
    assert all(len(batch.unique()) == size for batch in drawn)
    per_draw = n // size if sampler == "shuffled" else 1
    draws, rate = steps // per_draw, size * per_draw / n
    observed = torch.bincount(torch.cat(drawn), minlength=n).double()
    assert ALPHA < uniformity(observed, draws, rate, fixed=True) < 1 - ALPHA
    observed[:4] *= 1.25
    assert uniformity(observed, draws, rate, fixed=True) < ALPHA


def test_fixed_subsets_are_equally_likely() -> None:
    n, size, steps = 5, 2, 5000
    batches = FixedSizeSampler(dataset_size=n, batch_size=size, steps=steps, key=seeded())
    subsets = [tuple(batch.tolist()) for batch in batches]
    assert all(first < second for first, second in subsets)
    tally = torch.tensor([float(subsets.count(subset)) for subset in sorted(set(subsets))])
    assert len(tally) == math.comb(n, size)
    expected = steps / len(tally)
    assert float(chi2.sf(float(((tally - expected) ** 2 / expected).sum()), 9)) > ALPHA


def test_permutations_are_equally_likely() -> None:
    batches = ShuffledSampler(dataset_size=4, batch_size=2, steps=10_000, key=seeded())
    halves = list(batches)
    orders = [
        (*first.tolist(), *second.tolist())
        for first, second in zip(halves[::2], halves[1::2], strict=True)
    ]
    tally = torch.tensor([float(orders.count(order)) for order in sorted(set(orders))])
    assert len(tally) == math.factorial(4)
    expected = len(orders) / 24
    assert float(chi2.sf(float(((tally - expected) ** 2 / expected).sum()), 23)) > ALPHA


@pytest.mark.parametrize("rate", [1e-12, 0.01, 0.1, 1 / 3, 1 - 2.0**-53])
def test_inclusion_probability_never_exceeds_the_rate(rate: float) -> None:
    threshold = poisson(rate)._threshold
    assert Fraction(threshold, 1 << 72) <= Fraction(rate) < Fraction(threshold + 1, 1 << 72)


def words_of(*numbers: int) -> Any:
    """Make a keystream whose 64-bit numbers are these, the last one again and again."""
    left = list(numbers)

    def fake(stream: Any, *, first_block: int, blocks: int) -> torch.Tensor:
        drawn = [left.pop(0) if len(left) > 1 else left[0] for _ in range(8 * blocks)]
        words = [part for number in drawn for part in (number & 0xFFFFFFFF, number >> 32)]
        return torch.tensor(words, dtype=torch.int64).to(torch.int32)

    return fake


EQUAL = 0x5555555555555555
"""Eight equal bytes; the threshold of the float 1/3 has the same down to its bit 18."""


@pytest.mark.parametrize(
    ("first", "second", "taken"),
    [
        (0, 2**64 - 1, True),
        (EQUAL - 0x0101010101010101, 2**64 - 1, True),
        (EQUAL, 0, True),
        (EQUAL, EQUAL - (1 << 18), True),
        (EQUAL, EQUAL, False),
        (EQUAL, 1 << 63, False),
        (EQUAL, 2**64 - 1, False),
        (EQUAL + 0x0101010101010101, 0, False),
        (2**64 - 1, 0, False),
    ],
)
def test_72_bits_are_compared_as_unsigned(
    first: int, second: int, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subsets, "keystream", words_of(*[first] * 8, second))
    (batch,) = poisson(1 / 3, n=3, steps=1)
    assert batch.tolist() == ([0, 1, 2] if taken else [])


@pytest.mark.parametrize("rate", [1 / 3, 0.25, 0.01, 1 / 256, 0.999])
def test_mask_comes_from_the_sampling_keystream(rate: float) -> None:
    n, key = 1000, seeded(9)
    threshold = math.floor(Fraction(rate) * (1 << 72))
    batches = PoissonSampler(dataset_size=n, sample_rate=rate, steps=3, key=key)
    for step, batch in enumerate(batches):
        stream = key.stream(Purpose.SAMPLING, step)
        words = keystream(stream, first_block=0, blocks=16 + 125).numpy().tobytes()
        first, rest = words[:n], words[16 * 64 :]
        wanted, place = [], 0
        for record, byte in enumerate(first):
            if byte <= threshold >> 64:
                fine = int.from_bytes(rest[8 * place : 8 * place + 8], "little")
                place += 1
                if byte << 64 | fine < threshold:
                    wanted.append(record)
        assert batch.tolist() == wanted


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_no_word_is_used_twice(sampler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[tuple[int, int, int]] = []

    def spy(stream: Any, *, first_block: int, blocks: int) -> torch.Tensor:
        used.extend((stream.n0, stream.n1, first_block + i) for i in range(blocks))
        return keystream(stream, first_block=first_block, blocks=blocks)

    monkeypatch.setattr(subsets, "keystream", spy)
    list(make_batches(sampler, dataset_size=100, batch_size=30, steps=10, key=seeded()))
    assert used
    assert len(used) == len(set(used))


def test_ties_are_drawn_again_from_new_words(monkeypatch: pytest.MonkeyPatch) -> None:
    first_blocks: list[int] = []

    def tied_at_first(stream: Any, *, first_block: int, blocks: int) -> torch.Tensor:
        first_blocks.append(first_block)
        words = keystream(stream, first_block=first_block, blocks=blocks)
        return torch.zeros_like(words) if first_block == 0 else words

    monkeypatch.setattr(subsets, "keystream", tied_at_first)
    (batch,) = make_batches("shuffled", dataset_size=20, batch_size=5, steps=1, key=seeded())
    assert first_blocks == [0, 3]
    assert len(batch.unique()) == 5


@pytest.mark.parametrize(("n", "listed", "third"), [(20, 2048, 9), (400, 2048, 9), (20, 0, 7)])
def test_a_record_drawn_twice_stays_and_another_one_follows(
    n: int, listed: int, third: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those drawn first are taken, whatever their numbers. With a mask each round takes blocks of
    its own."""
    monkeypatch.setattr(subsets, "_LISTED", listed)
    monkeypatch.setattr(subsets, "keystream", words_of(n + 3, 3, 4 * n + 5, 9, 2, *range(8)))
    words = subsets.Words(seeded().stream(Purpose.SAMPLING, 0))
    assert subsets.uniform_subset(words, n, 3).tolist() == [3, 5, third]


def test_more_records_are_drawn_until_enough_are_different(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[int] = []
    draw = subsets._draws

    def same(words: Any, records: int, most: int) -> Any:
        rounds.append(most)
        return draw(words, records, most) if len(rounds) == 3 else np.full(most, 7)

    monkeypatch.setattr(subsets, "_draws", same)
    words = subsets.Words(seeded().stream(Purpose.SAMPLING, 0))
    chosen = subsets.uniform_subset(words, 400, 5)
    assert len(set(chosen.tolist())) == 5
    assert 7 in chosen.tolist()
    assert rounds == [13, 12, 12]


def test_numbers_above_all_multiples_draw_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """2^63 mod 3 is 2: the two highest numbers would make records 0 and 1 likelier."""
    highest = (1 << 63) - 1
    monkeypatch.setattr(subsets, "keystream", words_of(highest, highest - 1, highest - 2, 4))
    words = subsets.Words(seeded().stream(Purpose.SAMPLING, 0))
    assert subsets._draws(words, 3, 4).tolist() == [2, 1]


@pytest.mark.parametrize(("n", "size"), [(200, 3), (200, 197), (40, 7), (40, 33), (64, 64)])
def test_subsets_of_every_way_are_uniform(n: int, size: int) -> None:
    """Lists, masks, and either of the records that are left out."""
    steps = 4000
    batches = FixedSizeSampler(dataset_size=n, batch_size=size, steps=steps, key=seeded())
    drawn = list(batches)
    assert all(len(batch) == size and bool((batch.diff() > 0).all()) for batch in drawn)
    observed = torch.bincount(torch.cat(drawn), minlength=n).double()
    if size == n:
        assert bool((observed == steps).all())
        return
    assert ALPHA < uniformity(observed, steps, size / n, fixed=True) < 1 - ALPHA
    # The same test notices subsets of which the least are kept after too many were drawn.
    words = subsets.Words(seeded().stream(Purpose.SAMPLING, 0))
    few = min(size, n - size)
    kept = [np.unique(subsets._draws(words, n, few + 1))[:few] for _ in range(steps)]
    biased = torch.bincount(torch.from_numpy(np.concatenate(kept)), minlength=n).double()
    assert uniformity(biased, steps, few / n, fixed=True) < ALPHA


def test_edges_of_poisson() -> None:
    everything = list(poisson(1.0, n=9, steps=2))
    assert [batch.tolist() for batch in everything] == [list(range(9))] * 2
    empty = list(poisson(1e-9, n=3, steps=5))
    assert [(batch.shape, batch.dtype) for batch in empty] == [((0,), torch.int64)] * 5


def test_shuffled_epochs_drop_the_rest() -> None:
    batches = ShuffledSampler(dataset_size=10, batch_size=3, steps=6, key=seeded())
    assert batches.steps_per_epoch == 3
    drawn = list(batches)
    first, second = torch.cat(drawn[:3]), torch.cat(drawn[3:])
    assert len(first.unique()) == len(second.unique()) == 9
    assert first.tolist() != second.tolist()


@pytest.mark.parametrize(
    ("sampler", "rate", "expected"),
    [("poisson", 0.3, 3.0), ("fixed", 0.3, 3.0), ("shuffled", 0.3, 3.0)],
)
def test_what_accounting_reads(sampler: str, rate: float, expected: float) -> None:
    batches = make_batches(sampler, dataset_size=10, batch_size=3, steps=4, key=seeded())
    assert batches.sampling == sampler
    assert batches.sample_rate == rate
    assert batches.expected_batch_size == pytest.approx(expected)
    assert len(batches) == 4


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_seeded_resume_is_identical(sampler: str) -> None:
    def fresh() -> PrivateBatchSampler:
        return make_batches(sampler, dataset_size=50, batch_size=8, steps=20, key=seeded(4))

    whole = [batch.tolist() for batch in fresh()]
    started, resumed = fresh(), fresh()
    head = [batch.tolist() for batch in islice(started, 9)]
    resumed.load_state_dict(json.loads(json.dumps(started.state_dict())))
    assert (resumed.step, len(resumed)) == (9, 11)
    assert head + [batch.tolist() for batch in resumed] == whole


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_unseeded_samplers_differ_and_resume_from_a_fresh_key(sampler: str) -> None:
    def fresh() -> PrivateBatchSampler:
        return make_batches(sampler, dataset_size=200, batch_size=50, steps=4)

    one, other = fresh(), fresh()
    state = one.state_dict()
    assert "key" not in json.dumps(state)
    first = [batch.tolist() for batch in one]
    other.load_state_dict(state)
    assert [batch.tolist() for batch in other] != first


BAD: list[tuple[str, Callable[[], Any], str]] = [
    ("empty dataset", lambda: poisson(0.1, n=0), "dataset_size"),
    ("rate 0", lambda: poisson(0.0), "sample_rate"),
    ("rate above 1", lambda: poisson(1.1), "sample_rate"),
    ("rate nan", lambda: poisson(math.nan), "sample_rate"),
    ("negative steps", lambda: poisson(0.1, steps=-1), "steps"),
    ("steps beyond the nonce", lambda: poisson(0.1, steps=2**32 + 1), "steps"),
    (
        "no key",
        lambda: PoissonSampler(dataset_size=3, sample_rate=0.1, steps=1, key=b"0" * 32),  # type: ignore[arg-type]
        "key",
    ),
    (
        "batch above dataset",
        lambda: FixedSizeSampler(dataset_size=3, batch_size=4, steps=1),
        "batch_size",
    ),
    ("batch 0", lambda: ShuffledSampler(dataset_size=3, batch_size=0, steps=1), "batch_size"),
    (
        "unknown sampling",
        lambda: make_batches("uniform", dataset_size=3, batch_size=1, steps=1),
        "sampling",
    ),
    (
        "poisson batch above dataset",
        lambda: make_batches("poisson", dataset_size=3, batch_size=4, steps=1),
        "batch_size",
    ),
    ("no state", lambda: poisson(0.1).load_state_dict({}), "state"),
    (
        "another rate",
        lambda: poisson(0.1).load_state_dict(poisson(0.2).state_dict()),
        "state",
    ),
    (
        "past the end",
        lambda: poisson(0.1).load_state_dict({**poisson(0.1).state_dict(), "step": 11}),
        "step",
    ),
]


@pytest.mark.parametrize(("call", "name"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_refuses_bad_input(call: Callable[[], Any], name: str) -> None:
    with pytest.raises(DPKernError) as raised:
        call()
    assert type(raised.value) is InvalidInput
    assert raised.value.name == name
