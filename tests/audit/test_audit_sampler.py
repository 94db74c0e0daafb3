"""Batches against their declared law: ours pass, and every other way of drawing is told apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from dpkern.audit.findings import Check
from dpkern.audit.sampler import checks, log_chance, of_loader
from dpkern.base.errors import InvalidInput
from dpkern.base.rng import Key
from dpkern.engine.sampling import FixedSizeSampler, PoissonSampler, ShuffledSampler

N, B, EPOCHS = 400, 20, 5
STEPS = EPOCHS * N // B
Rows = list[list[int]]


def failed(found: Iterable[Check]) -> set[str]:
    return {check.name.removeprefix("sampler: ") for check in found if check.passed is False}


def asked(rows: Iterable[Iterable[int]], law: str, **changes: float) -> tuple[Check, ...]:
    return checks(rows, law=law, **{"records": N, "sample_rate": B / N, **changes})  # type: ignore[arg-type]


def key(seed: int) -> Key:
    return Key.from_unsafe_seed(seed)


def ours(law: str, seed: int, steps: int = STEPS) -> Iterable[torch.Tensor]:
    common = {"dataset_size": N, "steps": steps, "key": key(seed)}
    if law == "poisson":
        return PoissonSampler(sample_rate=B / N, **common)  # type: ignore[arg-type]
    kind = FixedSizeSampler if law == "fixed" else ShuffledSampler
    return kind(batch_size=B, **common)  # type: ignore[arg-type]


@pytest.mark.parametrize("law", ["poisson", "fixed", "shuffled"])
def test_ours_pass(law: str) -> None:
    """Seeds are fixed; the bounds alone accuse a sound sampler once in 1000."""
    for seed in range(8):
        found = asked(ours(law, seed), law)
        assert not failed(found), [check.text for check in found]
        assert all(check.passed for check in found)


def test_ours_pass_in_less_than_an_epoch() -> None:
    """Nothing is accused for want of batches, and what cannot be asked says so."""
    for law in ("poisson", "fixed", "shuffled"):
        for steps in (1, 2, 3):
            assert not failed(asked(ours(law, 1, steps), law))
    single = {c.name: c.passed for c in asked(ours("poisson", 1, 1), "poisson")}
    assert single["sampler: coverage"] is None
    assert single["sampler: independent batches"] is None


def draws(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def shuffled() -> Rows:
    rng = draws()
    return [row for _ in range(EPOCHS) for row in rng.permutation(N).reshape(-1, B).tolist()]


def fixed() -> Rows:
    rng = draws()
    return [rng.choice(N, B, replace=False).tolist() for _ in range(STEPS)]


def with_replacement() -> Rows:
    return draws().integers(N, size=(STEPS, B)).tolist()


def bernoulli(rates: Sequence[float] | float) -> Rows:
    hits = draws().random((STEPS, N)) < rates
    return [np.flatnonzero(row).tolist() for row in hits]


def favoured() -> Rows:
    """One record in almost every batch."""
    return bernoulli(np.where(np.arange(N) == 7, 0.9, B / N).tolist())


def never() -> Rows:
    """A tenth of the records never."""
    return bernoulli(np.where(np.arange(N) < N // 10, 0.0, B / N / 0.9).tolist())


def families() -> Rows:
    """Records of one family of 20 come together."""
    hits = draws().random((STEPS, N // 20)) < B / N
    return [np.flatnonzero(np.repeat(row, 20)).tolist() for row in hits]


def each_twice() -> Rows:
    """Every batch comes twice in a row."""
    return [row for row in bernoulli(B / N)[: STEPS // 2] for _ in range(2)]


def same_every_epoch() -> Rows:
    """The masks of the first epoch again and again: a seed that is used anew."""
    return bernoulli(B / N)[: N // B] * EPOCHS


def fixed_again() -> Rows:
    return fixed()[: STEPS // 2] * 2


def overlapping() -> Rows:
    """A window over the records: each of fixed size, each like the one before."""
    return [[(7 * t + i) % N for i in range(B)] for t in range(STEPS)]


def in_order() -> Rows:
    return np.arange(N).reshape(-1, B).tolist() * EPOCHS


def ragged() -> Rows:
    return [row[: B - 1] if t == 3 else row for t, row in enumerate(shuffled())]


def one_twice() -> Rows:
    """A single record comes back in its epoch."""
    rows = shuffled()
    rows[5][0] = rows[2][0]
    return rows


BROKEN: dict[str, tuple[str, Callable[[], Rows], set[str]]] = {
    "shuffled as poisson": (
        "poisson",
        shuffled,
        {"batch sizes", "coverage", "independent batches"},
    ),
    "in order as poisson": ("poisson", in_order, {"coverage", "independent batches"}),
    "fixed as poisson": ("poisson", fixed, {"batch sizes"}),
    "with replacement as poisson": (
        "poisson",
        with_replacement,
        {"once in a batch", "batch sizes"},
    ),
    "half the rate": ("poisson", lambda: bernoulli(B / N / 2), {"rate"}),
    "one record favoured": ("poisson", favoured, {"each record"}),
    "records left out": ("poisson", never, {"counts"}),
    "families": ("poisson", families, {"batch sizes"}),
    "each batch twice": ("poisson", each_twice, {"independent batches"}),
    "same masks every epoch": ("poisson", same_every_epoch, {"independent batches"}),
    "shuffled as fixed": ("fixed", shuffled, {"independent batches"}),
    "poisson as fixed": ("fixed", lambda: bernoulli(B / N), {"size"}),
    "with replacement as fixed": ("fixed", with_replacement, {"once in a batch"}),
    "a window as fixed": ("fixed", overlapping, {"independent batches"}),
    "subsets again": ("fixed", fixed_again, {"repeats"}),
    "fixed as shuffled": ("shuffled", fixed, {"once in an epoch"}),
    "one record twice as shuffled": ("shuffled", one_twice, {"once in an epoch"}),
    "ragged as shuffled": ("shuffled", ragged, {"size"}),
    "strange index": ("shuffled", lambda: [[0, N]], {"indices"}),
}


@pytest.mark.parametrize("name", BROKEN)
def test_another_law_is_told_apart(name: str) -> None:
    law, rows, expected = BROKEN[name]
    found = asked(rows(), law)
    assert expected <= failed(found), [(c.name, c.text) for c in found]


def test_our_own_shuffling_is_not_poisson() -> None:
    assert "coverage" in failed(asked(ours("shuffled", 0), "poisson"))
    assert "batch sizes" in failed(asked(ours("fixed", 0), "poisson"))


def test_false_alarms_are_rarer_than_said() -> None:
    """At confidence 1/2, where alarms can be counted: at most half of 60 sound runs, by far."""
    rng = draws(1)
    alarms = 0
    for _ in range(60):
        hits = rng.random((40, 200)) < 0.1
        rows = [np.flatnonzero(row).tolist() for row in hits]
        found = checks(rows, law="poisson", records=200, sample_rate=0.1, confidence=0.5)
        alarms += bool(failed(found))
    assert alarms <= 30


@pytest.mark.parametrize(("n", "p"), [(10, 0.3), (200, 0.01), (50, 0.9)])
def test_chances_bound_binomial_tails(n: int, p: float) -> None:
    masses = [math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)]
    for k in range(n + 1):
        tail = sum(masses[k:]) if k >= n * p else sum(masses[: k + 1])
        assert tail <= math.exp(log_chance(k, n, p)) * (1 + 1e-9)
    assert log_chance(0, n, 0.0) == 0
    assert log_chance(1, n, 0.0) == -math.inf


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_batches_of_a_loader(shuffle: bool) -> None:
    """Torch's own loader is what it is, and not what is often said of it."""
    data = TensorDataset(torch.zeros(N, 1))
    generator = torch.Generator().manual_seed(0)
    loader = DataLoader(data, batch_size=B, shuffle=shuffle, generator=generator)
    rows = of_loader(loader, EPOCHS)
    assert len(rows) == STEPS
    assert not failed(asked(rows, "shuffled"))
    assert "coverage" in failed(asked(rows, "poisson"))


def test_what_cannot_be_asked() -> None:
    with pytest.raises(InvalidInput, match="batches: expected at least one"):
        asked([], "poisson")
    with pytest.raises(InvalidInput, match="law: expected one of"):
        asked([[0]], "random")
    with pytest.raises(InvalidInput, match="sample_rate"):
        asked([[0]], "poisson", sample_rate=0.0)
    with pytest.raises(InvalidInput, match="confidence"):
        asked([[0]], "poisson", confidence=1.0)
    with pytest.raises(InvalidInput, match="loader: expected a DataLoader"):
        of_loader([1, 2], 1)


def test_a_fixed_size_that_is_no_whole_number_is_refused() -> None:
    """2 of 10 records are a larger rate than 0.15: what is accounted would be too little."""
    with pytest.raises(InvalidInput, match="whole batch size"):
        checks([[0, 1], [2, 3]], law="fixed", records=10, sample_rate=0.15)
