"""Two processes train together (``distributed_worker.py``): one spawn serves all tests here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dpkern.audit.subjects.ranks import Rank, judged
from dpkern.base.errors import InvalidInput
from dpkern.base.rng import Key
from dpkern.engine import PrivateLoader, distributed
from dpkern.engine.sharded import is_sharded
from tests.engine.distributed_worker import (
    KINDS,
    ROWS,
    WORLD,
    attention,
    data,
    images,
    model,
    spectral,
    train,
)

HERE = Path(__file__).resolve().parent
SECONDS = 240
"""After which the processes are killed: more than the slowest machine needs."""

TOGETHER = [[slice(0, 4), slice(4, 8)]]
"""What one process trains on where two train on a half each."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the checks returned on each rank."""
    folder = tmp_path_factory.mktemp("ranks")
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE)])
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, str(HERE / "distributed_worker.py"), str(folder)]
    with subprocess.Popen(
        command,
        env=env,
        cwd=HERE.parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as running:
        try:
            said = running.communicate(timeout=SECONDS)[0]
        finally:
            with suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
    assert running.returncode == 0, said
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


def of(ranks: list[dict[str, Any]], check: str) -> list[dict[str, Any]]:
    """What one check returned on both ranks."""
    return [results[check] for results in ranks]


def same(results: list[dict[str, Any]], name: str) -> Tensor:
    """The replicas' parameters, which are equal bit for bit."""
    first, second = (result[name] for result in results)
    assert torch.equal(first, second)
    return first  # type: ignore[no-any-return]


@pytest.mark.parametrize("check", ["alike", "sharded"])
@pytest.mark.parametrize("tier", ["exact", "float"])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_one_process(ranks: list[dict[str, Any]], kind: str, tier: str, check: str) -> None:
    trained = same(of(ranks, check), f"{kind} {tier}")
    alone = train(model(), TOGETHER, kind=kind, arithmetic=tier)
    if tier == "exact":
        assert torch.equal(trained, alone)
    torch.testing.assert_close(trained, alone, rtol=1e-4, atol=1e-5)
    seed = train(model(), TOGETHER, kind=kind, arithmetic=tier, unsafe_seed=4)
    assert not torch.allclose(trained, seed, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("check", ["alike", "sharded"])
def test_clip_groups(ranks: list[dict[str, Any]], check: str) -> None:
    trained = same(of(ranks, check), "per_layer")
    alone = train(model(), TOGETHER, clipping="per_layer")
    torch.testing.assert_close(trained, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tier", ["exact", "float"])
def test_release_coordinates(ranks: list[dict[str, Any]], tier: str) -> None:
    trained = same(of(ranks, "released"), tier)
    given = {"noise_multiplier": None, "max_grad_norm": None, "mechanism": spectral(tier)}
    alone = train(images(), TOGETHER, **given)
    assert tier == "float" or torch.equal(trained, alone)
    torch.testing.assert_close(trained, alone, rtol=1e-4, atol=1e-5)
    seed = train(images(), TOGETHER, **given, unsafe_seed=4)
    assert not torch.allclose(trained, seed, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tier", ["exact", "float"])
def test_draws_made_ahead_change_no_bit_on_any_rank(ranks: list[dict[str, Any]], tier: str) -> None:
    results = of(ranks, "ahead")
    for kind in ("SGD", "RMSprop"):
        inline = same(of(ranks, "alike"), f"{kind} {tier}")
        assert torch.equal(same(results, f"{kind} {tier}"), inline)
        words, others = (result[f"words {kind} {tier}"] for result in results)
        assert words["consumed"] == others["consumed"] > 0
    assert torch.equal(same(results, tier), same(of(ranks, "released"), tier))


@pytest.mark.parametrize("tier", ["exact", "float"])
def test_empty_ranks_and_other_numbers_of_parts(ranks: list[dict[str, Any]], tier: str) -> None:
    trained = same(of(ranks, "uneven"), tier)
    parts = [[slice(0, 4), slice(4, 6), slice(6, 8)]]
    alone = train(model(), parts, arithmetic=tier)
    assert tier == "float" or torch.equal(trained, alone)
    torch.testing.assert_close(trained, alone, rtol=1e-4, atol=1e-5)


def test_sharded_expressions_and_empty_ranks(ranks: list[dict[str, Any]]) -> None:
    results = of(ranks, "sharded")
    low_rank = train(model(low_rank=True), TOGETHER, arithmetic="exact")
    assert torch.equal(same(results, "low rank"), low_rank)
    whole = train(model(), [[slice(0, 8)]], arithmetic="exact")
    assert torch.equal(same(results, "empty"), whole)


def test_sharded_attention_checkpoints_and_tied_weights(ranks: list[dict[str, Any]]) -> None:
    alone = train(attention(), TOGETHER, arithmetic="exact")
    assert torch.equal(same(of(ranks, "sharded"), "attention"), alone)


def test_sharded_mixed_precision(ranks: list[dict[str, Any]]) -> None:
    trained = same(of(ranks, "sharded"), "bfloat16")
    alone = train(model(), TOGETHER)
    assert not torch.equal(trained, alone)
    torch.testing.assert_close(trained, alone, rtol=0, atol=5e-3)


def test_sharded_ranks_take_equally_many_parts(ranks: list[dict[str, Any]]) -> None:
    results = of(ranks, "sharded_loader")
    assert torch.equal(same(results, "values"), same(results, "plain"))
    first, second = (result["taken"] for result in results)
    assert len(first) == len(second)
    full = [[bool(part) for part in taken] for taken in (first, second)]
    assert full[0] != full[1]  # empty parts have evened them


def test_sampling_by_shards(ranks: list[dict[str, Any]]) -> None:
    results = of(ranks, "sampling")
    assert same(results, "values").isfinite().all()
    for rank, result in enumerate(results):
        taken = {i for batch in result["taken"] for i in batch}
        assert taken
        assert all(i % WORLD == rank for i in taken)
        # 19 records per rank in batches of 6, and 37 in batches of 12: 4 steps each.
        assert (result["rate"], result["expected"], result["global"]) == (0.25, ROWS / 4, ROWS / 4)
        assert result["start"] == "same object"
    assert results[0]["ledger"] == results[1]["ledger"]
    assert results[0]["noise key"] == results[1]["noise key"]
    assert len({r[name] for r in results for name in ("noise key", "sampling key")}) == 3


def test_fresh_noise_is_the_groups_and_the_mask_each_ones_own(ranks: list[dict[str, Any]]) -> None:
    assert judged([Rank(**drawn) for drawn in of(ranks, "fresh")]).passed


def test_resume(ranks: list[dict[str, Any]]) -> None:
    results = of(ranks, "resume")
    assert results[0]["state"] == results[1]["state"]
    runs = [run for result in results for run in result["runs"]]
    assert all(torch.equal(run, runs[0]) for run in runs)


def test_public_gradients_are_averaged(ranks: list[dict[str, Any]]) -> None:
    results = of(ranks, "public")
    same(results, "values")
    assert all(result["moved"] for result in results)
    everywhere = same(results, "everywhere")
    assert not torch.allclose(everywhere, results[0]["values"])
    torch.testing.assert_close(same(results, "sharded"), everywhere)


def test_reduction(ranks: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(of(ranks, "reduction")):
        assert len(result) == 8
        for name, sums in result.items():
            if name.startswith("shares"):
                expected = ([[0, 3, 6, 9], [2, 2], [2]], [[12, 15, 18], [2], []])[rank]
                assert [share.tolist() for share in sums] == expected
                continue
            if name.startswith("wide"):
                assert sums[0].tolist() == [2**32 - 3] * 4  # beyond int32 together only
                assert sums[1].tolist() == [-(2**41)] * 2
                continue
            dtype = torch.int64 if "int64" in name else torch.float64
            for n, total in zip((3, 0, 40, 5, 1), sums, strict=False):
                assert torch.equal(total, torch.arange(n).to(dtype) * 3)
            assert torch.equal(sums[-1], torch.full((2, 3), 3.0))


REFUSED = {
    "one_source": "InvalidInput settings",
    "sharded_source": "InvalidInput noise_source",
    "one_sharded_source": "InvalidInput settings",
    "other_start": "InvalidInput parameters",
    "other_rate": "InvalidInput settings",
    "other_noise": "PrivacyError optimizer.step",
    "other_key": "PrivacyError optimizer.step",
    "wrapper": "PrivacyError module",
    "other_sampler": "InvalidInput data_loader",
    "fixed": "InvalidInput sampling",
    "columns": "UnsupportedModule weight",
    "partly": "UnsupportedModule 1.weight",
    "hybrid": "UnsupportedModule weight",
    "offloaded": "UnsupportedModule weight",
    "twice": "PrivacyError module",
    "coordinates": "InvalidInput mechanism",
}


@pytest.mark.parametrize("check", REFUSED)
def test_refused_on_every_rank(ranks: list[dict[str, Any]], check: str) -> None:
    assert [result[check] for result in of(ranks, "refused")] == [REFUSED[check]] * WORLD


def test_one_process_is_not_distributed() -> None:
    assert distributed.processes_of(nn.Linear(2, 2)) is None
    assert not distributed.in_use()
    assert not is_sharded(nn.Linear(2, 2))
    assert isinstance(distributed.unwrapped(model()), nn.Sequential)


def loader(rank: int, ranks: int, key: Key) -> PrivateLoader:
    return PrivateLoader(DataLoader(data(), batch_size=6), key=key, shard=(rank, ranks))


def test_loader_state_is_every_ranks() -> None:
    key = Key.from_unsafe_seed(1)
    states = [loader(rank, 3, key).state_dict() for rank in range(3)]
    assert states[0] == states[1] == states[2]
    other = loader(2, 3, key)
    other.load_state_dict(states[0])
    assert other.batches.dataset_size == ROWS // 3


def test_seeded_state_of_another_number_of_processes() -> None:
    state = loader(0, 2, Key.fresh()).state_dict()
    state["batches"]["step"] = 3
    elastic = loader(0, 3, Key.fresh())
    elastic.load_state_dict(state)
    assert elastic.position == 3
    with pytest.raises(InvalidInput, match="on 3 processes"):
        loader(0, 3, Key.from_unsafe_seed(1)).load_state_dict(state)


def test_shards_cover_the_records_once() -> None:
    seen = []
    for rank in range(3):
        everything = PrivateLoader(DataLoader(data(), batch_size=ROWS), shard=(rank, 3))
        seen += [i for _, index in everything for i in index.tolist()]
    assert sorted(seen) == list(range(ROWS))
