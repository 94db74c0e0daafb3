"""Loaders with plans of their own, and loops that wrap, skip, repeat or look ahead."""

from __future__ import annotations

import copy
import itertools
import queue
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
    random_split,
)

from dpkern.base.errors import InvalidInput, PrivacyError
from tests.engine.guards import texts
from tests.engine.guards.kit import Table, World
from tests.engine.guards.models import cross_entropy, fit, mlp
from tests.engine.guards.records import RECORDS

TABLE = Table("sampling")

FORGOTTEN = ""


@TABLE.refused(InvalidInput, texts.DRAWN_MORE_OFTEN)
def weighted_sampler(w: World) -> None:
    sampler = WeightedRandomSampler([1.0] * RECORDS, RECORDS)
    fit(w, mlp(), loader=DataLoader(w.data, batch_size=4, sampler=sampler))


@TABLE.refused(InvalidInput, texts.DRAWN_MORE_OFTEN)
def sampler_with_replacement(w: World) -> None:
    sampler = RandomSampler(w.data, replacement=True)
    fit(w, mlp(), loader=DataLoader(w.data, batch_size=4, sampler=sampler))


@TABLE.refused(InvalidInput, texts.OWN_PLAN)
def sampler_of_some_records(w: World) -> None:
    sampler = RandomSampler(w.data, num_samples=6)
    fit(w, mlp(), loader=DataLoader(w.data, batch_size=4, sampler=sampler))


@TABLE.refused(InvalidInput, texts.OWN_PLAN)
def distributed_sampler_on_one_process(w: World) -> None:
    sampler = DistributedSampler(w.data, num_replicas=2, rank=0)
    fit(w, mlp(), loader=DataLoader(w.data, batch_size=4, sampler=sampler))


class BySize(Sampler[list[int]]):
    """Batches of neighbours in size."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1, 2], [3, 4, 5]])

    def __len__(self) -> int:
        return 2


@TABLE.refused(InvalidInput, texts.OWN_PLAN)
def batches_of_equal_length(w: World) -> None:
    fit(w, mlp(), loader=DataLoader(w.data, batch_sampler=BySize()))


@TABLE.refused(InvalidInput, texts.OWN_PLAN)
def curriculum(w: World) -> None:
    """Easy records first: a batch sampler over an order of the user's own."""

    class Order(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(RECORDS))

        def __len__(self) -> int:
            return RECORDS

    sampler = BatchSampler(Order(), 4, drop_last=False)
    fit(w, mlp(), loader=DataLoader(w.data, batch_sampler=sampler))


@TABLE.refused(InvalidInput, "map-style")
def stream(w: World) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(w.data.records)

    fit(w, mlp(), loader=DataLoader(Stream(), batch_size=4))


@TABLE.refused(InvalidInput, "torch DataLoader")
def list_of_batches(w: World) -> None:
    fit(w, mlp(), loader=list(w.loader()))  # type: ignore[arg-type]


@TABLE.refused(InvalidInput, "not private yet")
def loader_of_another_run(w: World) -> None:
    _, _, loader = w.private(mlp())
    w.engine = type(w.engine)()
    w.private(mlp(), loader=loader)


def _train(model: Any, optimizer: Any, batches: Any) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()


class Ahead:
    """A prefetcher: the next batch is on its way while this one is used."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        following = next(batches, None)
        while following is not None:
            batch, following = following, next(batches, None)
            yield batch


@TABLE.right()
def prefetcher(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    _train(model, optimizer, Ahead(loader))


@TABLE.right()
def prefetcher_in_a_thread(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    waiting: queue.Queue[Any] = queue.Queue()

    def fill() -> None:
        try:
            for batch in loader:
                waiting.put(batch)
        finally:
            waiting.put(None)

    thread = threading.Thread(target=fill)
    thread.start()
    thread.join()
    _train(model, optimizer, iter(waiting.get, None))


@TABLE.right()
def list_of_all_batches(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    _train(model, optimizer, list(loader))


@TABLE.refused(PrivacyError, texts.EARLIER_BATCH, after=3)
def endless_loader_by_cycle(w: World) -> None:
    """``itertools.cycle`` repeats the batches of the first epoch."""
    model, optimizer, loader = w.private(mlp())
    _train(model, optimizer, itertools.islice(itertools.cycle(loader), 6))


@TABLE.refused(PrivacyError, texts.SECOND_STEP, after=1)
def every_batch_twice(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    _train(model, optimizer, (batch for batch in loader for _ in range(2)))


@TABLE.refused(PrivacyError, texts.STILL_WAITING)
def two_batches_for_one_step(w: World) -> None:
    """Accumulation over batches."""
    model, optimizer, loader = w.private(mlp())
    for step, (x, y) in enumerate(loader):
        (0.5 * cross_entropy(model, x, y)).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()


@TABLE.refused(PrivacyError, texts.LEFT_OUT)
def batches_of_high_loss_left_out(w: World) -> None:
    """Whether there is a step depends on the records."""
    model, optimizer, loader = w.private(mlp())
    for x, y in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model, x, y)
        if loss.item() > 1.0:
            continue
        loss.backward()
        optimizer.step()


@TABLE.refused(PrivacyError, texts.LEFT_OUT)
def losses_that_overflow_left_out(w: World) -> None:
    """Loss scaling by hand."""
    model, optimizer, loader = w.private(mlp())
    for x, y in loader:
        optimizer.zero_grad()
        loss = (65536 * cross_entropy(model, x, y)).half()
        if not torch.isfinite(loss):
            continue
        loss.backward()
        optimizer.step()


@TABLE.refused(PrivacyError, FORGOTTEN, after=2)
def last_batch_left_out_by_its_loss(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = cross_entropy(model, x, y)
        if step == 2 and loss.item() > 1.0:
            continue
        loss.backward()
        optimizer.step()
    w.engine.get_epsilon(1e-5)


@TABLE.refused(PrivacyError, texts.ONE_ITERATION, after=1)
def two_iterations_at_once(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    _train(model, optimizer, (a for a, _ in zip(loader, loader, strict=False)))


@TABLE.refused(PrivacyError, texts.COPIED)
def copied_loader(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    twin = copy.copy(loader)
    batches = zip(loader, twin, strict=False)
    _train(model, optimizer, (b for _, b in batches))


@TABLE.right()
def loader_in_a_wrapper_of_ones_own(w: World) -> None:
    class Wrapper:
        def __init__(self, loader: Any) -> None:
            self.loader = loader

        def __len__(self) -> int:
            return len(self.loader)

        def __iter__(self) -> Iterator[Any]:
            for x, y in self.loader:
                yield {"x": x.to("cpu", non_blocking=True), "y": y}

    model, optimizer, loader = w.private(mlp())
    _train(model, optimizer, ((b["x"], b["y"]) for b in Wrapper(loader)))


@TABLE.right()
def enumerated_and_cut_off(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    for step, (x, y) in enumerate(loader):
        _train(model, optimizer, [(x, y)])
        if step == 1:
            break


@TABLE.right()
def steps_counted_over_epochs(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    batches = itertools.chain.from_iterable(loader for _ in range(2))
    _train(model, optimizer, itertools.islice(batches, 5))


@TABLE.right()
def next_by_hand(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    batches = iter(loader)
    for _ in range(5):
        try:
            x, y = next(batches)
        except StopIteration:
            batches = iter(loader)
            x, y = next(batches)
        _train(model, optimizer, [(x, y)])


@TABLE.right()
def random_part_of_the_data(w: World) -> None:
    part, _ = random_split(w.data, [11, 1], generator=torch.Generator().manual_seed(0))
    w.owner = dict(enumerate(part.indices))
    place = part.indices.index(10) if 10 in part.indices else 0
    others = [i for i in range(11) if i != place and part.indices[i] != 11]
    draws = [(*others[:3], place), others[3:6], (others[6], place, others[7])]
    fit(w, mlp(), loader=w.loader(part), draws=draws)


@TABLE.right()
def workers(w: World) -> None:
    fit(w, mlp(), loader=w.loader(num_workers=1))


@TABLE.right()
def incomplete_batches_dropped(w: World) -> None:
    fit(w, mlp(), loader=w.loader(batch_size=5, drop_last=True), draws=[(0, 1, 10), (2, 3)])
