"""Streams become data sets that are drawn by index; samplers with weights are refused."""

from __future__ import annotations

import pickle
import re
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
)

from dpkern.base.errors import InvalidInput
from dpkern.engine.loader import check_loader
from dpkern.integrations import IndexedShards

PAGE = Path(__file__).parents[2] / "docs" / "streams.md"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def stream(count: int = 10) -> Any:
    return ({"x": torch.arange(i + 1), "text": "é" * i, "y": i} for i in range(count))


@pytest.mark.parametrize("size", [1, 3, 10, 100])
def test_records_come_back_in_order_whatever_the_shards(tmp_path: Path, size: int) -> None:
    records = IndexedShards.write(stream(), tmp_path / "s", records_per_shard=size)
    assert len(records) == 10
    assert len(list((tmp_path / "s").glob("*.records"))) == -(-10 // size)
    for again in (records, IndexedShards(tmp_path / "s"), pickle.loads(pickle.dumps(records))):
        for i, expected in enumerate(stream()):
            assert torch.equal(again[i]["x"], expected["x"])
            assert (again[i]["text"], again[i]["y"]) == (expected["text"], i)
    with pytest.raises(IndexError):
        records[10]


def test_workers_read_the_same(tmp_path: Path) -> None:
    records = IndexedShards.write(((i, -i) for i in range(8)), tmp_path, records_per_shard=3)
    found = [list(map(int, batch[0])) for batch in DataLoader(records, 2, num_workers=2)]
    assert found == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("damage", ["cut", "index", "missing", "none"])
def test_a_damaged_folder_is_refused(tmp_path: Path, damage: str) -> None:
    IndexedShards.write(stream(), tmp_path / "s", records_per_shard=4)
    shard = tmp_path / "s" / "000001.records"
    if damage == "cut":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif damage == "missing":
        shard.unlink()
    elif damage == "index":
        np.save(tmp_path / "s" / "index.npy", np.zeros(3))
    folder = tmp_path / ("elsewhere" if damage == "none" else "s")
    with pytest.raises(InvalidInput, match=r"IndexedShards\.write"):
        IndexedShards(folder)


def test_changed_bytes_are_refused(tmp_path: Path) -> None:
    records = IndexedShards.write(stream(), tmp_path / "s")
    shard = tmp_path / "s" / "000000.records"
    shard.write_bytes(b"\0" * shard.stat().st_size)
    with pytest.raises(InvalidInput, match="record 3"):
        records[3]


def test_what_cannot_be_written_is_refused_and_leaves_no_index(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"records\[1\]"):
        IndexedShards.write([1, object()], tmp_path / "a")
    with pytest.raises(InvalidInput, match="empty stream"):
        IndexedShards.write([], tmp_path / "b")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "file").touch()
    with pytest.raises(InvalidInput, match="empty folder"):
        IndexedShards.write([1], tmp_path / "c")
    assert not list(tmp_path.rglob("index.npy"))


def test_a_stream_is_refused_with_the_way_to_train_on_it() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(3))

    with pytest.raises(InvalidInput, match=r"IndexedShards\.write"):
        check_loader(DataLoader(Stream(), batch_size=2))


def test_weighted_sampling_is_refused_with_the_reason() -> None:
    for sampler in (
        WeightedRandomSampler([0.1, 0.9, 0.5], 3),
        RandomSampler(range(3), replacement=True),
    ):
        with pytest.raises(InvalidInput, match="larger epsilon than is certified"):
            check_loader(DataLoader(range(3), batch_size=2, sampler=sampler))  # type: ignore[arg-type]


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile("\n".join(BLOCK.findall(PAGE.read_text())), PAGE.name, "exec"), names)
    assert len(list((tmp_path / "shards").iterdir())) == 4
    assert 2.9 < names["worst"] <= 3 < names["engine"].get_epsilon(1e-4)


def test_a_record_that_looks_into_a_large_tensor_is_written_alone(tmp_path: Path) -> None:
    whole = torch.randn(200, 50)
    records = IndexedShards.write(({"x": [row]} for row in whole), tmp_path / "shards")
    assert torch.equal(records[7]["x"][0], whole[7])
    size = sum(path.stat().st_size for path in (tmp_path / "shards").iterdir())
    assert size / len(whole) < whole.nbytes / 10


def test_there_may_be_more_shards_than_open_files(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    records = IndexedShards.write(range(80), tmp_path, records_per_shard=1)
    used = len(list(Path("/proc/self/fd").iterdir()))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 40, before[1]))
        assert [records[i] for i in range(80)] == list(range(80))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_folder_stays_known_and_its_loss_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    records = IndexedShards.write(range(3), "shards")
    monkeypatch.chdir("/")
    assert records[2] == 2
    (tmp_path / "shards" / "000000.records").unlink()
    with pytest.raises(InvalidInput, match="record 2: FileNotFoundError"):
        records[2]
