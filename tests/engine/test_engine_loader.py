"""The private loader: which batches it hands out, when, and how it resumes."""

from __future__ import annotations

import math
from collections import Counter, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from dpkern.base.errors import InvalidInput, PrivacyError
from dpkern.base.rng import Key
from dpkern.engine import loader
from dpkern.engine.collating import TRIALS, check_collate
from dpkern.engine.empty import empty_batch
from dpkern.engine.loader import BatchMemoryManager, PrivateLoader
from dpkern.engine.provenance import YieldedBatch

ROWS = 40
Pair = namedtuple("Pair", "x y")


def records(rows: int = ROWS) -> TensorDataset:
    return TensorDataset(torch.arange(rows), torch.randn(rows, 3))


def private(*, batch_size: int = 10, seed: int | None = 1, **more: Any) -> PrivateLoader:
    options = {k: more.pop(k) for k in ("num_workers", "persistent_workers") if k in more}
    loader = DataLoader(more.pop("dataset", records()), batch_size=batch_size, **options)
    key = None if seed is None else Key.from_unsafe_seed(seed)
    return PrivateLoader(loader, key=key, **more)


def rows_of(loader: PrivateLoader, epochs: int = 1) -> list[tuple[int, ...]]:
    return [tuple(x.tolist()) for _ in range(epochs) for x, _ in loader]


class Heard:
    """What the loop was told with each batch."""

    def __init__(self, loader: PrivateLoader) -> None:
        self.parts: list[tuple[int, bool, bool]] = []
        loader.on_batch = self

    def __call__(self, batch: YieldedBatch) -> None:
        self.parts.append((batch.size, batch.first, batch.final))


def test_short_epochs_share_a_trial_of_their_collation(monkeypatch: pytest.MonkeyPatch) -> None:
    class Items(TensorDataset):
        """Records that are read one by one."""

    rows = Items(*records().tensors)
    loaders = [private(sampling="fixed", dataset=data) for data in (rows, records())]
    tried: list[tuple[int, int]] = []
    for private_loader in loaders:  # four batches an epoch
        monkeypatch.setattr(
            loader,
            "check_collate",
            lambda *_, trials, views, of=private_loader: tried.append((of.position, trials)),
        )
        rows_of(private_loader, 11)
    # Nothing collates rows of tensors, which are read at once.
    assert tried == [(0, TRIALS), (4, 1), (20, 1), (36, 1)]


@pytest.mark.parametrize("sampling", ["poisson", "fixed", "shuffled"])
def test_batches_are_the_samplers(sampling: str) -> None:
    loader = private(sampling=sampling)
    twin = private(sampling=sampling).batches
    expected = [tuple(b.tolist()) for b, _ in zip(twin, range(8), strict=False)]
    assert len(loader) == 4
    assert rows_of(loader, 2) == expected
    assert loader.position == 8
    assert (loader.sample_rate, loader.expected_batch_size) == (0.25, 10.0)
    assert (loader.sampling, loader.dataset_size) == (sampling, ROWS)
    assert rows_of(private(sampling=sampling, seed=None)) != expected[:4]


def test_epochs_of_the_original_loader() -> None:
    loader = DataLoader(records(), batch_size=16)
    assert len(PrivateLoader(loader)) == 3
    assert PrivateLoader(loader).sample_rate == 1 / 3
    assert len(PrivateLoader(loader, sampling="fixed")) == 3
    shuffled = PrivateLoader(loader, sampling="shuffled")
    assert len(shuffled) == 2
    assert all(n == 1 for n in Counter(sum(rows_of(shuffled), ())).values())
    whole = PrivateLoader(DataLoader(records(), batch_size=100))
    assert rows_of(whole) == [tuple(range(ROWS))]
    assert rows_of(PrivateLoader(DataLoader(records(), batch_size=100), sampling="fixed")) == [
        tuple(range(ROWS))
    ]


def test_nothing_is_handed_out_before_the_loop_receives_it() -> None:
    loader = private(num_workers=2)
    heard = Heard(loader)
    batches = iter(loader)
    assert heard.parts == []
    for count in range(1, 5):
        x, _ = next(batches)
        assert len(heard.parts) == loader.position == count
        assert heard.parts[-1] == (len(x), True, True)
    with pytest.raises(StopIteration):
        next(batches)


@pytest.mark.parametrize("workers", [0, 2])
def test_left_loops_never_reuse_a_mask(workers: int) -> None:
    options = {"persistent_workers": True} if workers else {}
    loader = private(num_workers=workers, **options)
    expected = rows_of(private(), 3)
    seen = []
    for x, _ in loader:
        seen.append(tuple(x.tolist()))
        if len(seen) == 2:
            break
    seen += rows_of(loader)
    assert seen == expected[:6]


@pytest.mark.parametrize("workers", [0, 2])
def test_logical_batches_are_split(workers: int) -> None:
    loader = private(num_workers=workers, max_physical_batch_size=4)
    heard = Heard(loader)
    parts = rows_of(loader, 2)
    whole = rows_of(private(), 2)
    assert max(map(len, parts)) <= 4
    rebuilt: list[tuple[int, ...]] = []
    for part, (size, first, _) in zip(parts, heard.parts, strict=True):
        assert len(part) == size
        if first:
            rebuilt.append(())
        rebuilt[-1] += part
    assert rebuilt == whole
    finals = [final for _, _, final in heard.parts]
    firsts = [first for _, first, _ in heard.parts]
    assert firsts == [True, *finals[:-1]]
    assert finals[-1]
    assert loader.position == 8


def test_memory_manager_splits_for_one_block() -> None:
    loader = private()
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=3, optimizer=None
    ) as smaller:
        assert max(len(x) for x, _ in smaller) <= 3
    assert loader.max_physical_batch_size is None
    assert rows_of(loader) == rows_of(private(), 2)[4:]
    with pytest.raises(InvalidInput, match="make_private"):
        BatchMemoryManager(data_loader=DataLoader(records()), max_physical_batch_size=3)
    with pytest.raises(InvalidInput, match="max_physical_batch_size"):
        BatchMemoryManager(data_loader=loader, max_physical_batch_size=0)


@pytest.mark.parametrize("workers", [0, 2])
def test_empty_draws_keep_the_structure(workers: int) -> None:
    # 5 records at rate 1/5: a third of the draws is empty.
    loader = private(batch_size=1, num_workers=workers, dataset=records(5))
    heard = Heard(loader)
    sizes = []
    for _ in range(4):
        for x, y in loader:
            assert x.shape[0] == y.shape[0]
            assert (x.dtype, y.dtype, y.shape[1:]) == (torch.int64, torch.float32, (3,))
            sizes.append(len(x))
    assert [size for size, _, _ in heard.parts] == sizes
    assert len(sizes) == 20
    assert 0 in sizes
    assert sizes == [len(x) for x in rows_of(private(batch_size=1, dataset=records(5)), 4)]


@dataclass
class Columns:
    x: torch.Tensor
    tag: str


class Structured(Dataset[Any]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, Any]:
        picture = torch.zeros(3, 2, 2)
        return {
            "x": torch.ones(4),
            "pair": Pair(torch.ones(2), 1.5),
            "name": f"record {index}",
            "nested": [picture, {"label": index}],
        }


def test_structures_are_emptied() -> None:
    got = empty_batch(Structured(), torch.utils.data.default_collate)
    assert got["x"].shape == (0, 4)
    assert type(got["pair"]) is Pair
    assert (got["pair"].x.shape, got["pair"].y.shape) == ((0, 2), (0,))
    assert got["pair"].y.dtype is torch.float64
    assert got["name"] == []
    assert got["nested"][0].shape == (0, 3, 2, 2)
    assert got["nested"][1]["label"].shape == (0,)

    def detection(rows: list[dict[str, Any]]) -> Any:
        return tuple(zip(*[(r["x"], {"boxes": r["x"]}) for r in rows], strict=True)), 7, "cpu"

    assert empty_batch(Structured(), detection) == (((), ()), 7, "cpu")

    def columns(rows: list[dict[str, Any]]) -> Columns:
        return Columns(torch.stack([r["x"] for r in rows]), "train")

    emptied = empty_batch(Structured(), columns)
    assert (emptied.x.shape, emptied.tag) == ((0, 4), "train")
    array = empty_batch(Structured(), lambda rows: np.zeros((len(rows), 2)))
    assert array.shape == (0, 2)
    constant = empty_batch(Structured(), lambda rows: torch.zeros(5))
    assert constant.shape == (5,)
    with pytest.raises(InvalidInput, match="collate_fn"):
        empty_batch(Structured(), lambda rows: object())


@pytest.mark.parametrize("sampling", ["poisson", "fixed", "shuffled"])
@pytest.mark.parametrize("stop", [0, 3, 4, 6])
def test_seeded_loaders_resume_identically(sampling: str, stop: int) -> None:
    whole = rows_of(private(sampling=sampling), 3)
    first = private(sampling=sampling)
    seen: list[tuple[int, ...]] = []
    while len(seen) < stop:
        for x, _ in first:
            seen.append(tuple(x.tolist()))
            if len(seen) == stop:
                state = first.state_dict()
                break
    state = first.state_dict()
    resumed = private(sampling=sampling)
    resumed.load_state_dict(state)
    rest = rows_of(resumed)
    assert len(rest) == 4 - stop % 4
    assert seen + rest == whole[: stop + len(rest)]
    following = whole[stop + len(rest) :][:4]
    assert rows_of(resumed)[: len(following)] == following


def test_no_state_inside_a_split_batch() -> None:
    loader = private(max_physical_batch_size=1)
    batches = iter(loader)
    next(batches)
    with pytest.raises(PrivacyError, match="split"):
        loader.state_dict()
    while not loader.final:
        next(batches)
    assert loader.state_dict()["batches"]["step"] == 1


def test_refused_states() -> None:
    state = private().state_dict()
    for other in (
        {},
        None,
        state | {"place": 4},
        state | {"steps": 5},
        private(sampling="fixed").state_dict(),
    ):
        loader = private()
        with pytest.raises(InvalidInput):
            loader.load_state_dict(other)
        assert rows_of(loader) == rows_of(private())
    used = private()
    next(iter(used))
    with pytest.raises(PrivacyError, match="yielded no batch"):
        used.load_state_dict(state)


def test_a_refused_hand_out_uses_no_mask() -> None:
    loader = private()

    def refuse(size: int, **_: bool) -> None:
        raise PrivacyError("data_loader", expected="a step", got="none", remedy="Step.")

    loader.on_batch = refuse
    with pytest.raises(PrivacyError):
        next(iter(loader))
    loader.on_batch = None
    assert rows_of(loader) == rows_of(private())


def test_one_iteration_at_a_time() -> None:
    loader = private()
    older, newer = iter(loader), iter(loader)
    next(older)
    next(newer)
    with pytest.raises(PrivacyError, match="replaced"):
        next(older)


def test_shards_are_disjoint_and_sampled_at_one_rate() -> None:
    loader = DataLoader(records(41), batch_size=10)
    shards = [PrivateLoader(loader, shard=(rank, 3), key=None) for rank in range(3)]
    for rank, shard in enumerate(shards):
        assert {row % 3 for batch in rows_of(shard, 5) for row in batch} == {rank}
        assert shard.sample_rate == 1 / 5
        assert shard.expected_batch_size == pytest.approx(41 / 5)
    assert [shard.batches.dataset_size for shard in shards] == [14, 14, 13]


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(10))


class NoLength(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: records(), "TensorDataset"),
        (lambda: private(), "PrivateLoader"),
        (lambda: DataLoader(Endless()), "Endless"),
        (lambda: DataLoader(NoLength(), sampler=[0, 1]), "NoLength"),
        (lambda: DataLoader(records(), batch_size=None), "NoneType"),
        (lambda: DataLoader(records(), sampler=SubsetRandomSampler([1, 2])), "Subset"),
        (lambda: DataLoader(records(), sampler=WeightedRandomSampler([1.0] * ROWS, 5)), "Weighted"),
        (lambda: DataLoader(records(), sampler=RandomSampler(records(), replacement=True)), "more"),
        (lambda: DataLoader(records(), batch_sampler=[[0, 1], [2]]), "list"),
        (lambda: DataLoader(records(), batch_size=99, drop_last=True), "none"),
    ],
    ids=[
        "dataset", "private", "iterable", "no length", "unbatched", "subset", "weighted",
        "replacement", "batch sampler", "no batches",
    ],
)  # fmt: skip
def test_refused_loaders(make: Any, says: str) -> None:
    with pytest.raises(InvalidInput, match=says) as raised:
        PrivateLoader(make())
    assert raised.value.name == "data_loader"


def test_plain_samplers_are_replaced() -> None:
    for options in (
        {"shuffle": True, "batch_size": 10},
        {"batch_sampler": BatchSampler(RandomSampler(records()), 10, drop_last=True)},
    ):
        loader = PrivateLoader(DataLoader(records(), **options), sampling="fixed")  # type: ignore[arg-type]
        assert (len(loader), loader.expected_batch_size) == (4, 10.0)
    with pytest.raises(InvalidInput, match="sampling"):
        private(sampling="bootstrap")
    with pytest.raises(InvalidInput, match="max_physical_batch_size"):
        private(max_physical_batch_size=0)
    assert math.isclose(private().sample_rate, 0.25)


def test_trying_the_collation_leaves_the_draws_of_devices_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    original = DataLoader(
        records(), batch_size=10, collate_fn=lambda rows: torch.stack([x for x, _ in rows])
    )
    loader = PrivateLoader(original, key=Key.from_unsafe_seed(1))
    next(iter(loader))
    assert not seeded


class AtOnce(Dataset[Any]):
    """Records that are read together, and what becomes of them.

    Args:
        change: called with all rows of a batch.
    """

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.change = change

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.__getitems__([index])[0]

    def __getitems__(self, numbers: list[int]) -> list[torch.Tensor]:
        return list(self.change(torch.tensor(numbers, dtype=torch.float32)[:, None]))


class Remembered:
    """Rows to which the mean of the last batch is added."""

    def __init__(self) -> None:
        self.mean = torch.zeros(1)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        before, self.mean = self.mean, rows.mean(0)
        return rows + before


def test_records_read_at_once_with_a_generator_of_their_own_are_accepted() -> None:
    own = np.random.default_rng(0)
    for change in (
        lambda rows: rows + torch.from_numpy(own.random((len(rows), 1))),
        lambda rows: rows + torch.rand(len(rows), 1),
    ):
        check_collate(AtOnce(change), default_collate, 10)
    assert own.random() == np.random.default_rng(0).random()  # the trial has moved nothing


def test_records_mixed_by_a_generator_of_their_own_are_refused() -> None:
    own = np.random.default_rng(0)

    def mixup(rows: torch.Tensor) -> torch.Tensor:
        share = float(own.beta(0.4, 0.4))
        return share * rows + (1 - share) * rows[torch.from_numpy(own.permutation(len(rows)))]

    with pytest.raises(InvalidInput, match="depend on one record each"):
        check_collate(AtOnce(mixup), default_collate, 10)


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows - rows.mean(0),
        lambda rows: rows + torch.rand(()) * rows.sum(),
        Remembered(),
    ],
    ids=["centred", "sum at random", "mean of the last batch"],
)
def test_records_that_mix_when_read_at_once_are_refused(
    change: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    with pytest.raises(InvalidInput, match="depend on one record each"):
        check_collate(AtOnce(change), default_collate, 10)
