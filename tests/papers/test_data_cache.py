"""Data sets are read once for all cells, and finished trainings know their rows by content."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpkern.base.errors import InvalidInput
from dpkern.papers import ItemRequest, data_cache, everything
from dpkern.papers.adlm.setup import MNIST, world
from dpkern.papers.adlm.training import beside
from dpkern.papers.gredp import cells as gredp_cells
from dpkern.papers.pieces import CachedRun, ResultCache
from dpkern.papers.seeded import SeededRuns
from dpkern.train import formats

MNIST_FOLDER = Path(__file__).parents[3] / "shared" / "data" / "mnist"
pytestmark = pytest.mark.usefixtures("one_thread")


def write(path: Path, value: float) -> str:
    rng = np.random.default_rng(0)
    x = rng.random((60, 1, 28, 28)).astype(np.float32)
    x[:, 0, 0, 0] = value
    np.savez(path, x=x, y=np.arange(60) % 10)
    # Two writes within one tick of the clock have the same time.
    os.utime(path, ns=(0, int(1e9 * (1 + value))))
    return str(path)


def test_a_data_set_is_read_once_until_its_file_changes(tmp_path: Path) -> None:
    source = write(tmp_path / "rows.npz", 0.25)
    first = data_cache.load(source)
    assert data_cache.load(source) is first
    write(tmp_path / "rows.npz", 0.75)
    again = data_cache.load(source)
    assert again is not first
    assert float(again.x_train.max()) <= 1
    one, other = (data_cache.digest(each.x_train, each.x_test) for each in (first, again))
    assert one != other
    assert one == data_cache.digest(first.x_train.clone(), first.x_test)
    assert data_cache.digest(torch.zeros(2, 3)) != data_cache.digest(torch.zeros(3, 2))


def test_the_cells_of_a_table_share_one_copy_of_the_rows() -> None:
    request = ItemRequest(quick=True)
    first, second = (request.dataset("digits") for _ in range(2))
    assert first.x_train.data_ptr() == second.x_train.data_ptr()


@pytest.mark.parametrize(
    ("paper", "item"),
    [
        ("objective-release", ""),
        ("ldp", "labels"),
        ("adlm", "released"),
        ("adlm", "fig1"),
        ("gredp", "table1"),
    ],
)
def test_resuming_with_other_rows_computes_anew(paper: str, item: str, tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    file = tmp_path / "rows.npz"

    def pieces(value: float) -> list[CachedRun]:
        data = write(file, value)
        request = ItemRequest(quick=True, data=data)
        (planned,) = everything.plan([(paper, item)], lambda *_: request)
        return list(planned.pieces)

    before, after = pieces(0.25), pieces(0.75)
    assert len(before) == len(after) > 0
    kept = ResultCache(folder=tmp_path / "out", resume=True)
    numbers: dict[str, Any] = {"x": 1}
    for one in before:
        kept.keep(one, numbers)
    assert all(kept.find(one) == numbers for one in pieces(0.25))
    assert all(kept.find(one) is None for one in after)


def test_rows_of_the_same_shape_are_not_the_sources_data(tmp_path: Path) -> None:
    request = ItemRequest(quick=False, data=write(tmp_path / "rows.npz", 0.25), rows=60)
    assert not request.genuine("mnist")
    assert not ItemRequest(data=str(tmp_path / "nowhere")).genuine("mnist")
    here = world(MNIST, request)
    assert not here.genuine
    assert not here.same_data
    assert beside(here, 93.66) == "93.66 on other data (mnist)"
    assert beside(here, None) is None
    cell = gredp_cells.AccuracyCell(
        name="LeNet-5", method="GReDP", epsilon=1.0, what="", printed=96.5
    )
    made = gredp_cells._seeded(cell, request)
    runs = SeededRuns(
        cell=made, accuracy=((1.0,),), claimed=1.0, certified=1.0, relation="", ms_per_step=1.0,
        collapsed=0,
    )  # fmt: skip
    row = gredp_cells._trained_cell("table1", cell, replace(request, rows=None), runs)
    assert row.row.published == "96.5 on other data (mnist)"
    assert "not on all of mnist" in row.hindrance


def test_a_folder_of_another_data_set_is_no_mnist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = ItemRequest(quick=True, data=write(tmp_path / "rows.npz", 0.25))
    assert not world(MNIST, request).genuine
    monkeypatch.setattr(formats, "kind_of", lambda folder: "svhn")
    with pytest.raises(InvalidInput, match=r"expected mnist, rows of .*rows\.npz: svhn"):
        world(MNIST, request)


@pytest.mark.skipif(not MNIST_FOLDER.is_dir(), reason="the folder of MNIST's files is not here")
def test_mnists_own_files_are_the_sources_data() -> None:
    request = ItemRequest(quick=False, data=f"mnist={MNIST_FOLDER}", rows=600)
    assert request.genuine("mnist")
    assert not request.genuine("svhn")
    here = world(MNIST, request)
    assert (here.genuine, here.same_data) == (True, False)
    assert world(MNIST, replace(request, rows=None)).same_data
