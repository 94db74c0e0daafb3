"""What the caller vouches for, and what the certificate says of it."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, DataLoader, Subset

from dpkern import PrivacyEngine
from dpkern.base.errors import InvalidInput, PrivacyError
from dpkern.engine.batch_order import DROPPED
from dpkern.engine.make_parts import OWN_BATCHES
from dpkern.engine.padding import MASKED
from dpkern.engine.privacy_engine import ADOPTED
from dpkern.engine.provenance.wrappers import remedy_of_wrapper
from dpkern.nn.losses import per_sample_cross_entropy, per_sample_mean
from tests.engine.engine_run import DELTA, Run, data


def notes(run: Run) -> list[str]:
    return run.engine.report(DELTA)["certificate"]["notes"]


def step(run: Run, x: Tensor, y: Tensor) -> None:
    run.optimizer.zero_grad()
    F.cross_entropy(run.module(x), y).backward()
    run.optimizer.step()


def test_adopted_rows_are_a_condition() -> None:
    run = Run(unsafe_seed=None)
    x, y = next(iter(run.loader))
    made = torch.from_numpy(x.numpy())
    with pytest.raises(PrivacyError, match="adopt"):
        run.module(made)
    step(run, run.engine.adopt(made), y)
    assert f"holds if {ADOPTED}" in notes(run)
    with pytest.raises(InvalidInput, match="rows"):
        run.engine.adopt(torch.ones(len(x) + 1, 4))
    with pytest.raises(InvalidInput, match="records"):
        run.engine.adopt(made, records=[len(x)] * len(x))


def test_adopted_rows_may_repeat_records() -> None:
    run = Run(noise_multiplier=0.0, max_grad_norm=1e6)
    twin = Run(noise_multiplier=0.0, max_grad_norm=1e6)
    x, y = next(iter(run.loader))
    both = run.engine.adopt(torch.from_numpy(x.repeat(2, 1).numpy()), records=[*range(len(x))] * 2)
    step(run, both, torch.cat([y, y]))
    step(twin, *next(iter(twin.loader)))
    torch.testing.assert_close(run.values(), twin.values())


def test_batches_of_the_caller_are_a_condition_and_count_every_record() -> None:
    run = Run(unsafe_seed=None)
    x, y = next(iter(run.loader))
    step(run, x, y)
    assert f"holds if {OWN_BATCHES}" not in notes(run)
    amplified = run.engine.get_epsilon(DELTA)
    run.engine.new_samples()
    run.optimizer.zero_grad()
    F.cross_entropy(run.module(torch.randn(8, 4)), torch.ones(8, dtype=torch.long)).backward()
    run.optimizer.step()
    assert f"holds if {OWN_BATCHES}" in notes(run)
    assert run.engine.get_epsilon(DELTA) > 2 * amplified
    assert run.engine.step.sampling["sample_rate"] == 1.0
    run.engine.new_samples(sample_rate=0.1)
    assert run.engine.step.sampling["sample_rate"] == 0.1
    with pytest.raises(InvalidInput):
        run.engine.new_samples(sample_rate=2.0)
    assert run.engine.step.sampling["sample_rate"] == 0.1


def test_a_dropped_batch_is_a_condition() -> None:
    run = Run(unsafe_seed=None)
    batches = iter(run.loader)
    x, y = next(batches)
    F.cross_entropy(run.module(x), y).backward()
    run.engine.drop()
    step(run, *next(batches))
    assert f"holds if {DROPPED}" in notes(run)


def test_a_batch_that_is_passed_over_is_a_condition() -> None:
    run = Run(unsafe_seed=None)
    batches = iter(run.loader)
    step(run, *next(batches))
    assert f"holds if {DROPPED}" not in notes(run)
    next(batches)
    step(run, *next(batches))
    assert f"holds if {DROPPED}" in notes(run)


def test_conditions_survive_a_checkpoint() -> None:
    run, later = Run(unsafe_seed=None), Run(unsafe_seed=None)
    x, y = next(iter(run.loader))
    step(run, run.engine.adopt(torch.from_numpy(x.numpy())), y)
    later.engine.load_state_dict(run.engine.state_dict())
    assert f"holds if {ADOPTED}" in notes(later)


def test_views_without_a_loader_are_summed_before_the_clip() -> None:
    runs = []
    for views in (1, 2):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = PrivacyEngine()
        engine.make_private(
            module=model, optimizer=optimizer, data_loader=None, noise_multiplier=0.0,
            max_grad_norm=1e-3, sample_rate=0.5, expected_batch_size=4, views=views,
        )  # fmt: skip
        before = model.weight.detach().clone()
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
        model(torch.cat([x] * 2)).square().sum(1).mean().backward()
        optimizer.step()
        runs.append(float((model.weight.detach() - before).norm()))
    assert runs[0] == pytest.approx(2 * runs[1], rel=1e-3)  # eight records clipped, or four


class Lengths(torch.utils.data.Dataset[Tensor]):
    """Texts of several lengths."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> Tensor:
        return torch.full((2 + i % 3,), 1 + i % 5)


def padded(records: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(records, batch_first=True)


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(6, 4, padding_idx=0), nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        mask = (ids != 0).unsqueeze(-1)
        return self.head((self.words(ids) * mask).sum(1) / mask.sum(1).clamp(min=1))


@pytest.mark.parametrize("said", [False, True])
def test_padding_to_the_longest_record_must_be_said_to_be_masked(said: bool) -> None:
    run = Run(
        module=Reader(),
        data_loader=DataLoader(Lengths(), batch_size=8, collate_fn=padded),
        masked_padding=said,
        unsafe_seed=None,
    )
    if not said:
        with pytest.raises(PrivacyError, match="masked_padding=True"):
            next(iter(run.loader))
        return
    for ids in run.loader:
        step(run, ids, ids[:, 0] % 2)
    assert f"holds if {MASKED}" in notes(run)


def test_records_listed_again_are_refused_wherever_they_are() -> None:
    records = data()
    for repeated in (
        Subset(records, [1, 2, 2]),
        ConcatDataset([records, records]),
        ConcatDataset([Subset(records, [1, 2]), Subset(records, [5, 2])]),
        Subset(ConcatDataset([records, records]), [3, 3 + len(records)]),
        Subset(Subset(records, [4, 4, 5]), [0, 1]),
    ):
        with pytest.raises(InvalidInput, match="listed"):
            Run(data_loader=DataLoader(repeated, batch_size=2))
    Run(data_loader=DataLoader(ConcatDataset([records, data()]), batch_size=2))
    Run(data_loader=DataLoader(Subset(Subset(records, [4, 4, 5]), [0, 2]), batch_size=1))


def test_an_empty_draw_is_one_row_without_weight() -> None:
    run = Run(data_loader=DataLoader(data(6), batch_size=1), noise_multiplier=0.0)
    run.loader.batches._draw = lambda step: torch.empty(0, dtype=torch.int64)
    before = run.values().clone()
    x, y = next(iter(run.loader))
    assert len(x) == 1
    step(run, x, y)
    assert run.engine.step.steps == 1
    assert torch.equal(run.values(), before)


def test_wrappers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "accelerate", raising=False)
    assert remedy_of_wrapper() == ""
    monkeypatch.setitem(sys.modules, "accelerate", types.ModuleType("accelerate"))
    assert "accelerator.prepare" in remedy_of_wrapper()
    scope: dict[str, Any] = {"__name__": "transformers.trainer", "ask": remedy_of_wrapper}
    exec("def train(): return ask()", scope)
    assert "get_train_dataloader" in scope["train"]()


def test_each_sample_has_its_own_divisor() -> None:
    terms = torch.tensor([[1.0, 2.0, 9.0], [4.0, 8.0, 8.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert per_sample_mean(terms, mask).tolist() == [1.5, 4.0]
    assert per_sample_mean(terms, torch.zeros_like(mask)).tolist() == [0.0, 0.0]
    assert per_sample_mean(terms).tolist() == [4.0, pytest.approx(20 / 3)]
    logits, target = torch.randn(2, 3, 5), torch.tensor([[1, 2, -100], [0, -100, -100]])
    each = per_sample_cross_entropy(logits, target)
    for row in range(2):
        alone = F.cross_entropy(logits[row], target[row])
        torch.testing.assert_close(each[row], alone)
    with pytest.raises(InvalidInput):
        per_sample_mean(terms, mask[:, :2])
    with pytest.raises(InvalidInput):
        per_sample_cross_entropy(logits, target[:, :2])
