"""Loops that train on other samples than those that the private loader drew."""

from __future__ import annotations

import random

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

import dpkern
from dpkern.base.errors import PrivacyError, UnsupportedModule
from tests.engine.guards import texts
from tests.engine.guards.kit import Table, World
from tests.engine.guards.models import mlp

TABLE = Table("whose samples")


def _steps(w: World, batches: object, model: object, optimizer: object) -> None:
    for x, y in batches:  # type: ignore[attr-defined]
        optimizer.zero_grad()  # type: ignore[attr-defined]
        F.cross_entropy(model(x), y).backward()  # type: ignore[operator]
        optimizer.step()  # type: ignore[attr-defined]


@TABLE.refused(PrivacyError, texts.NOT_YIELDED)
def loop_over_the_original_loader(w: World) -> None:
    original = w.loader()
    model, optimizer, _ = w.private(mlp(), loader=original)
    _steps(w, original, model, optimizer)


@TABLE.refused(PrivacyError, texts.NOT_YIELDED)
def loop_over_the_original_loader_in_order(w: World) -> None:
    original = w.loader(shuffle=False)
    model, optimizer, _ = w.private(mlp(), loader=original)
    _steps(w, original, model, optimizer)


@TABLE.refused(PrivacyError, texts.NOT_YIELDED)
def second_loader_over_the_same_data(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    _steps(w, DataLoader(loader.dataset, batch_size=4, shuffle=True), model, optimizer)


@TABLE.refused(PrivacyError, texts.REMADE)
def loader_made_anew_from_the_private_ones_parts(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    again = DataLoader(
        loader.dataset, batch_sampler=loader.batch_sampler, collate_fn=loader.collate_fn
    )
    _steps(w, again, model, optimizer)


@TABLE.refused(PrivacyError, texts.NOT_YIELDED)
def original_batches_beside_private_ones(w: World) -> None:
    """The private loader is iterated, so its position advances; its samples are not used."""
    original = w.loader()
    model, optimizer, loader = w.private(mlp(), loader=original)
    _steps(w, (other for _, other in zip(loader, original, strict=False)), model, optimizer)


@TABLE.refused(PrivacyError, texts.NOT_YIELDED)
def whole_data_set_at_every_step(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    x, y = next(iter(DataLoader(w.data, batch_size=len(w.data))))
    _steps(w, ((x, y) for _ in loader), model, optimizer)


@TABLE.refused(PrivacyError, texts.NOT_YIELDED)
def records_picked_by_hand(w: World) -> None:
    model, optimizer, _ = w.private(mlp())
    for _ in range(3):
        picked = [w.data[i] for i in random.sample(range(len(w.data)), 4)]
        x, y = torch.utils.data.default_collate(picked)
        _steps(w, [(x, y)], model, optimizer)


@TABLE.right(random=True)
def new_samples_beside_a_loader(w: World) -> None:
    """The certificate then takes every record to be in every step."""
    original = w.loader()
    model, optimizer, _ = w.private(mlp(), loader=original)
    for x, y in original:
        w.engine.new_samples()
        _steps(w, [(x, y)], model, optimizer)


@TABLE.refused(PrivacyError, texts.NOT_YIELDED)
def validation_batches_that_train_too(w: World) -> None:
    held_out = w.loader(batch_size=2)
    model, optimizer, loader = w.private(mlp())
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for u, v in held_out:
            F.cross_entropy(model(u), v).backward()
        optimizer.step()


@TABLE.refused(PrivacyError, texts.NO_RECORD)
def rows_of_another_set_appended(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    extra, labels = next(iter(DataLoader(w.data, batch_size=12)))
    batches = ((torch.cat([x, extra]), torch.cat([y, labels])) for x, y in loader)
    _steps(w, batches, model, optimizer)


@TABLE.refused(PrivacyError, texts.NO_RECORD)
def fakes_appended(w: World) -> None:
    model, optimizer, loader = w.private(mlp(2))
    for x, _ in loader:
        optimizer.zero_grad()
        both = torch.cat([x, torch.randn(len(x), x.shape[1])])
        real = torch.cat([torch.ones(len(x)), torch.zeros(len(x))]).long()
        F.cross_entropy(model(both), real).backward()
        optimizer.step()


@TABLE.refused(PrivacyError, texts.NOT_YIELDED)
def synthetic_batches_without_public(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        F.cross_entropy(model(torch.randn(x.shape)), y).backward()
        optimizer.step()


@TABLE.refused(PrivacyError, texts.STILL_WAITING, after=1)
def replay_of_the_batch_before(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    seen: list[tuple[Tensor, Tensor]] = []
    for batch in loader:
        seen.append(batch)
        x, y = seen[max(len(seen) - 2, 0)]
        _steps(w, [(x, y)], model, optimizer)


@TABLE.refused(UnsupportedModule, "got cat", after=1)
def memory_of_all_batches(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    seen: list[tuple[Tensor, Tensor]] = []
    for batch in loader:
        seen.append(batch)
        x = torch.cat([x for x, _ in seen])
        y = torch.cat([y for _, y in seen])
        _steps(w, [(x, y)], model, optimizer)


@TABLE.refused(PrivacyError, texts.STILL_WAITING, after=1)
def one_batch_for_all_steps(w: World) -> None:
    """To see whether the model can learn at all."""
    model, optimizer, loader = w.private(mlp())
    kept = next(iter(loader))
    _steps(w, (kept for _ in loader), model, optimizer)


@TABLE.refused(PrivacyError, texts.EARLIER_BATCH)
def batches_of_another_engine(w: World) -> None:
    other = dpkern.PrivacyEngine()
    twin = mlp()
    _, _, foreign = other.make_private(
        module=twin,
        optimizer=torch.optim.SGD(twin.parameters(), lr=0.0),
        data_loader=w.loader(),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    w.draw(foreign, [(0, 1, 11), (2, 10, 3), (11, 10, 4)])
    model, optimizer, loader = w.private(mlp())
    _steps(w, (theirs for _, theirs in zip(loader, foreign, strict=False)), model, optimizer)


@TABLE.refused(PrivacyError, texts.NOT_YIELDED)
def numpy_round_trip(w: World) -> None:
    """Nobody can see whose rows they are: ``engine.adopt`` says it."""
    model, optimizer, loader = w.private(mlp())
    batches = ((torch.from_numpy(x.numpy() * 2.0), y) for x, y in loader)
    _steps(w, batches, model, optimizer)


@TABLE.refused(PrivacyError, texts.NOT_YIELDED)
def list_round_trip(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    batches = ((torch.tensor(x.tolist()), y) for x, y in loader)
    _steps(w, batches, model, optimizer)


@TABLE.refused(PrivacyError, texts.NOT_YIELDED)
def features_looked_up_elsewhere(w: World) -> None:
    """The loader's batch only says how many; the features come from the first records."""
    model, optimizer, loader = w.private(mlp())
    table = torch.stack([x for x, _ in w.data.records])
    batches = ((table[torch.arange(len(y))], y) for _, y in loader)
    _steps(w, batches, model, optimizer)
