"""Collations are tried before the first batch: mixing is found, and nothing is left of a trial."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from dpkern.base.errors import InvalidInput
from dpkern.engine.collating import check_collate
from dpkern.engine.loader import PrivateLoader

Records = list[tuple[Tensor, int]]

PYTHON = random.Random(1)
TORCH = torch.Generator().manual_seed(1)
NUMPY = np.random.default_rng(1)
LEGACY = np.random.RandomState(1)


class Noisy(Dataset[tuple[Tensor, int]]):
    """Records with random noise."""

    reads = 0

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.reads += 1
        noise = torch.rand(()) + random.random() + np.random.random()
        return torch.arange(4.0) + index + noise, index


NUMBERS: dict[str, Callable[[], float]] = {
    "Random": PYTHON.random,
    "torch": lambda: torch.rand((), generator=TORCH).item(),
    "Generator": lambda: float(NUMPY.random()),
    "RandomState": lambda: float(LEGACY.random_sample()),
}


def adds_noise(number: Callable[[], float]) -> Callable[[Records], Any]:
    def collate(records: Records) -> Any:
        return default_collate([(x + number(), y) for x, y in records])

    return collate


def mixes_now_and_then(number: Callable[[], float]) -> Callable[[Records], Any]:
    def collate(records: Records) -> Any:
        x, y = default_collate(records)
        return (x + x.roll(1, 0) if number() < 0.3 else x), y

    return collate


@pytest.mark.parametrize("kind", NUMBERS)
def test_noise_of_an_own_generator_is_no_mixing(kind: str) -> None:
    number = NUMBERS[kind]
    check_collate(Noisy(), adds_noise(number), 8)


@pytest.mark.parametrize("kind", NUMBERS)
def test_a_trial_leaves_an_own_generator_where_it_was(kind: str) -> None:
    number = NUMBERS[kind]
    generators = (PYTHON.getstate(), TORCH.get_state(), LEGACY.get_state(legacy=False))
    bits = NUMPY.bit_generator.state
    first = number()
    PYTHON.setstate(generators[0])
    TORCH.set_state(generators[1])
    LEGACY.set_state(generators[2])
    NUMPY.bit_generator.state = bits
    check_collate(Noisy(), adds_noise(number), 8)
    assert number() == first


@pytest.mark.parametrize("kind", NUMBERS)
def test_mixing_by_an_own_generator_is_found(kind: str) -> None:
    # All 32 trials miss it with probability 0.7^32 = 1e-5.
    with pytest.raises(InvalidInput, match="changed when one was replaced"):
        check_collate(Noisy(), mixes_now_and_then(NUMBERS[kind]), 8)


@pytest.mark.parametrize("forwards", [True, False])
def test_rows_that_follow_their_neighbours_are_mixed(forwards: bool) -> None:
    def collate(records: Records) -> Any:
        x, y = default_collate(records)
        return (x.cumsum(0) if forwards else x.flip(0).cumsum(0).flip(0)), y

    with pytest.raises(InvalidInput, match="changed when one was replaced"):
        check_collate(Noisy(), collate, 8)


def test_a_trial_is_not_counted() -> None:
    counts = {"batches": 0}

    def collate(records: Records) -> Any:
        counts["batches"] += 1
        return default_collate(records)

    check_collate(Noisy(), collate, 8)
    assert counts == {"batches": 0}


def test_later_epochs_read_few_records() -> None:
    data = Noisy()
    check_collate(data, lambda records: default_collate(records), 8, trials=1)
    assert data.reads == 9


def test_the_records_of_a_trial_draw_nothing_from_the_loops_generators() -> None:
    class OneByOne(PrivateLoader):
        """A loader whose trials are counted apart from its batches."""

        def check(self) -> None:
            self._check_collation(collates=True)

    loader = OneByOne(
        DataLoader(Noisy(), batch_size=10, collate_fn=lambda records: default_collate(records))
    )
    states = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)
    expected = torch.rand(()).item(), random.random(), np.random.random()
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])
    loader.check()
    assert (torch.rand(()).item(), random.random(), np.random.random()) == expected
