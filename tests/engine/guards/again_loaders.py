"""Loaders and hand-outs once more: data sets, collations and iterations written otherwise."""

from __future__ import annotations

import copy
import itertools
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    Subset,
    TensorDataset,
    default_collate,
)

from dpkern.base.errors import InvalidInput, PrivacyError, UnsupportedModule
from tests.engine.guards import texts
from tests.engine.guards.kit import Table, World
from tests.engine.guards.models import cross_entropy, fit, mlp
from tests.engine.guards.records import CLASSES, RECORDS, TARGET

TABLE = Table("loaders once more")

EACH = ((0, 1, TARGET), (4, TARGET, 5, 6), (8, TARGET, 9))
"""Draws for loops that leave batches out: the target is in each."""


def _train(model: Any, optimizer: Any, batches: Any) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()


def _mixed(records: list[Any]) -> Any:
    x, y = default_collate(records)
    return 0.5 * x + 0.5 * x.flip(0), y


@TABLE.refused(InvalidInput, texts.COLLATED_VALUES)
def collate_that_mixes_now_and_then(w: World) -> None:
    """As timm's Mixup with a probability, drawn from torch's generator."""

    def collate(records: list[Any]) -> Any:
        return _mixed(records) if torch.rand(1) < 0.5 else default_collate(records)

    fit(w, mlp(), loader=w.loader(collate_fn=collate))


@TABLE.refused(InvalidInput, texts.COLLATED_VALUES)
def collate_that_mixes_rarely(w: World) -> None:
    def collate(records: list[Any]) -> Any:
        return _mixed(records) if random.random() < 0.3 else default_collate(records)

    fit(w, mlp(), loader=w.loader(collate_fn=collate))


@TABLE.refused(InvalidInput, texts.COLLATED_VALUES)
def collate_that_mixes_by_numpy(w: World) -> None:
    def collate(records: list[Any]) -> Any:
        return _mixed(records) if np.random.rand() > 0.6 else default_collate(records)

    fit(w, mlp(), loader=w.loader(collate_fn=collate))


@TABLE.refused(InvalidInput, texts.COLLATED_VALUES)
def collate_that_mixes_even_batches(w: World) -> None:
    def collate(records: list[Any]) -> Any:
        return _mixed(records) if len(records) == 4 else default_collate(records)

    fit(w, mlp(), loader=w.loader(collate_fn=collate))


@TABLE.refused(InvalidInput, texts.COLLATED_VALUES)
def collate_that_mixes_with_the_batch_before(w: World) -> None:
    kept: list[Any] = []

    def collate(records: list[Any]) -> Any:
        x, y = default_collate(records)
        if kept and kept[0].shape == x.shape:
            x = 0.5 * x + 0.5 * kept[0]
        kept[:] = [x]
        return x, y

    fit(w, mlp(), loader=w.loader(collate_fn=collate))


@TABLE.refused(InvalidInput, texts.COLLATED_VALUES)
def collate_that_scales_by_the_largest(w: World) -> None:
    def collate(records: list[Any]) -> Any:
        x, y = default_collate(records)
        return x / x.abs().max(), y

    fit(w, mlp(), loader=w.loader(collate_fn=collate))


@TABLE.refused(InvalidInput, texts.COLLATED_VALUES)
def collate_that_sorts_by_length(w: World) -> None:
    def collate(records: list[Any]) -> Any:
        return default_collate(sorted(records, key=lambda r: float(r[0].sum())))

    fit(w, mlp(), loader=w.loader(collate_fn=collate))


@TABLE.refused(UnsupportedModule, texts.COLLATED_ROWS)
def collate_that_keeps_one_of_each_class(w: World) -> None:
    def collate(records: list[Any]) -> Any:
        return default_collate(list({int(y): (x, y) for x, y in records}.values()))

    fit(w, mlp(), loader=w.loader(collate_fn=collate))


@TABLE.right()
def collate_adds_noise(w: World) -> None:
    def collate(records: list[Any]) -> Any:
        return default_collate([(x + 0.1, y) for x, y in records])

    fit(w, mlp(), loader=w.loader(collate_fn=collate))


class _Several(Dataset[Any]):
    """Reads a batch at once, as Hugging Face's data sets do."""

    def __init__(self, records: Any) -> None:
        self.records = records

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self.records[i] for i in indices]


@TABLE.right()
def batches_read_at_once(w: World) -> None:
    fit(w, mlp(), loader=w.loader(_Several(w.data)))


@TABLE.refused(InvalidInput, texts.COLLATED_VALUES)
def batches_read_at_once_and_centred(w: World) -> None:
    """``set_transform`` of a data set: the transform sees the whole batch."""

    class Centred(_Several):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            x, y = default_collate([self.records[i] for i in indices])
            return list(zip(x - x.mean(0), y, strict=True))

    fit(w, mlp(), loader=w.loader(Centred(w.data)))


@TABLE.right()
def batches_read_at_once_without_repeats(w: World) -> None:
    class Distinct(_Several):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            found = [self.records[i] for i in indices]
            return [found[0], *found[1:]]

    fit(w, mlp(), loader=w.loader(Distinct(w.data)))


@TABLE.refused(InvalidInput, texts.COLLATED_VALUES)
def batches_read_at_once_and_mixed(w: World) -> None:
    class Mixed(_Several):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            x, y = default_collate([self.records[i] for i in indices])
            return list(zip(0.5 * x + 0.5 * x.roll(1, 0), y, strict=True))

    fit(w, mlp(), loader=w.loader(Mixed(w.data)))


@TABLE.refused(InvalidInput, texts.LISTED_AGAIN, after=3)
def subset_that_grows_by_hard_examples(w: World) -> None:
    """The indices of the data set are changed between epochs, the length stays."""
    chosen = Subset(w.data, list(range(RECORDS)))
    model, optimizer, loader = w.private(mlp(), loader=w.loader(chosen))
    _train(model, optimizer, loader)
    chosen.indices = [TARGET if i in (4, 5, 6, 7) else i for i in range(RECORDS)]
    w.owner = dict.fromkeys((4, 5, 6, 7), TARGET)
    _train(model, optimizer, loader)


@TABLE.refused(InvalidInput, texts.LISTED_AGAIN, after=3)
def subset_changed_in_place(w: World) -> None:
    chosen = Subset(w.data, list(range(RECORDS)))
    model, optimizer, loader = w.private(mlp(), loader=w.loader(chosen))
    _train(model, optimizer, loader)
    chosen.indices[4:8] = [TARGET] * 4
    w.owner = dict.fromkeys((4, 5, 6, 7), TARGET)
    _train(model, optimizer, loader)


@TABLE.refused(InvalidInput, texts.LISTED_AGAIN, after=3)
def data_sets_joined_in_place(w: World) -> None:
    halves = ConcatDataset([Subset(w.data, range(6)), Subset(w.data, range(6, RECORDS))])
    model, optimizer, loader = w.private(mlp(), loader=w.loader(halves))
    _train(model, optimizer, loader)
    halves.datasets[0] = Subset(w.data, range(6, RECORDS))
    w.owner = {i: i + 6 for i in range(6)}
    _train(model, optimizer, loader)


@TABLE.refused(InvalidInput, texts.LISTED_AGAIN)
def concatenated_subsets_that_overlap(w: World) -> None:
    parts = ConcatDataset([Subset(w.data, range(8)), Subset(w.data, range(4, RECORDS))])
    fit(w, mlp(), loader=w.loader(parts))


@TABLE.right()
def subset_with_negative_numbers(w: World) -> None:
    """-2 is the record before the last, which is listed by its positive number, too."""
    fit(w, mlp(), loader=w.loader(Subset(w.data, [*range(RECORDS - 1), TARGET - RECORDS])))


@TABLE.refused(InvalidInput, texts.LISTED_AGAIN)
def class_of_subset_with_repeats(w: World) -> None:
    class Chosen(Subset[Any]):
        """A subset with classes, as many projects write it."""

    fit(w, mlp(), loader=w.loader(Chosen(w.data, [*range(RECORDS - 1), TARGET])))


@TABLE.right()
def records_transformed_by_epoch(w: World) -> None:
    class ByEpoch(Dataset[Any]):
        epoch = 0

        def __len__(self) -> int:
            return RECORDS

        def __getitem__(self, index: int) -> Any:
            x, y = w.data[index]
            return x * (1 + self.epoch), y

    records = ByEpoch()
    model, optimizer, loader = w.private(mlp(), loader=w.loader(records))
    for epoch in range(2):
        records.epoch = epoch
        _train(model, optimizer, loader)


@TABLE.right()
def persistent_iterator(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    batches = iter(loader)
    for _ in range(5):
        try:
            batch = next(batches)
        except StopIteration:
            batches = iter(loader)
            batch = next(batches)
        _train(model, optimizer, [batch])


@TABLE.refused(PrivacyError, texts.EARLIER_BATCH, after=3)
def two_readers_by_tee(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    one, two = itertools.tee(loader)
    _train(model, optimizer, one)
    _train(model, optimizer, two)


@TABLE.right()
def tee_for_a_look_ahead(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    one, two = itertools.tee(loader)
    next(two, None)
    for batch, following in itertools.zip_longest(one, two):
        assert following is None or len(following) == 2
        _train(model, optimizer, [batch])


@TABLE.refused(PrivacyError, texts.LEFT_OUT)
def zipped_with_itself(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    for (x, y), (x2, y2) in zip(loader, loader, strict=False):
        optimizer.zero_grad()
        (cross_entropy(model, x, y) + cross_entropy(model, x2, y2)).backward()
        optimizer.step()


@TABLE.right()
def zipped_with_public_batches(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    public = [torch.randn(3, 6) for _ in range(3)]
    for (x, y), _ in zip(loader, public, strict=True):
        _train(model, optimizer, [(x, y)])


@TABLE.right()
def chained_epochs(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    _train(model, optimizer, itertools.chain.from_iterable(loader for _ in range(2)))


@TABLE.right()
def every_second_batch(w: World) -> None:
    model, optimizer, loader = w.private(mlp(), draws=EACH)
    _train(model, optimizer, itertools.islice(loader, 0, None, 2))


@TABLE.right()
def first_batch_looked_at(w: World) -> None:
    model, optimizer, loader = w.private(mlp(), draws=EACH)
    x, _ = next(iter(loader))
    assert x.shape[1] == 6
    _train(model, optimizer, loader)


@TABLE.refused(PrivacyError, texts.SECOND_STEP, after=1)
def first_batch_overfitted_then_all(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    batch = next(iter(loader))
    _train(model, optimizer, [batch] * 2)


@TABLE.refused(PrivacyError, texts.LEFT_OUT, after=1)
def error_in_the_middle_of_an_epoch(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    for _ in range(2):
        try:
            for step, (x, y) in enumerate(loader):
                optimizer.zero_grad()
                cross_entropy(model, x, y).backward()
                if step == 1:
                    raise KeyboardInterrupt
                optimizer.step()
        except KeyboardInterrupt:
            optimizer.zero_grad()


@TABLE.refused(PrivacyError, texts.LEFT_OUT, after=1)
def error_before_the_backward_pass(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    for _ in range(2):
        try:
            for step, (x, y) in enumerate(loader):
                optimizer.zero_grad()
                loss = cross_entropy(model, x, y)
                if step == 1:
                    raise RuntimeError("out of memory")
                loss.backward()
                optimizer.step()
        except RuntimeError:
            optimizer.zero_grad()


@TABLE.right()
def left_early_and_begun_again(w: World) -> None:
    model, optimizer, loader = w.private(mlp(), draws=EACH)
    for _ in range(3):
        for step, batch in enumerate(loader):
            if step == 1:
                break
            _train(model, optimizer, [batch])


@TABLE.right()
def validation_loader_over_the_same_data(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    other = w.loader()
    for batch in loader:
        _train(model, optimizer, [batch])
        model.eval()
        with torch.no_grad():
            for x, _ in other:
                model(x)
        model.train()


@TABLE.refused(PrivacyError, texts.NOT_YIELDED)
def two_loaders_for_one_model(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    other = w.loader(Subset(w.data, [TARGET, 2, 3]))
    for (x, y), (x2, y2) in zip(loader, other, strict=False):
        optimizer.zero_grad()
        (cross_entropy(model, x, y) + cross_entropy(model, x2, y2)).backward()
        optimizer.step()


@TABLE.right()
def written_through_numpy(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    for x, y in loader:
        array = x.numpy()
        array -= array.mean(0)
        _train(model, optimizer, [(x, y)])


@TABLE.right()
def written_through_dlpack(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    for x, y in loader:
        other = torch.from_dlpack(x)
        other -= other.mean(0)
        _train(model, optimizer, [(x, y)])


@TABLE.refused(UnsupportedModule, "got item")
def shifted_by_numbers_of_the_batch(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    for x, y in loader:
        _train(model, optimizer, [(x - x.mean().item(), y)])


@TABLE.refused(UnsupportedModule, "got share_memory")
def batch_in_shared_memory(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    for x, y in loader:
        x.share_memory_()
        _train(model, optimizer, [(x, y)])


@TABLE.right()
def batch_pickled(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    for x, y in loader:
        x, y = copy.deepcopy((x, y))
        _train(model, optimizer, [(x, y)])


@TABLE.right()
def batch_wrapped_into_a_loader(w: World) -> None:
    """An inner loop over small batches of one handed-out batch."""
    model, optimizer, loader = w.private(mlp(), loss_reduction="sum")
    for x, y in loader:
        optimizer.zero_grad()
        for xs, ys in DataLoader(TensorDataset(x, y), batch_size=2):
            F.cross_entropy(model(xs), ys, reduction="sum").backward()
        optimizer.step()


@TABLE.right()
def replay_of_the_batch_as_dictionary(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    kept: dict[str, Tensor] = {}
    for x, y in loader:
        kept.update(x=x, y=y)
        _train(model, optimizer, [(kept["x"], kept["y"])])


@TABLE.refused(PrivacyError, texts.SECOND_STEP, after=4)
def last_batch_once_more(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    _train(model, optimizer, loader)
    batch = next(iter(loader))
    _train(model, optimizer, [batch, batch])


@TABLE.refused(UnsupportedModule, "got matmul", after=1)
def queue_of_features_from_batches_before(w: World) -> None:
    """MoCo: keys of the batches before are the negatives."""
    model, optimizer, loader = w.private(mlp())
    kept = torch.randn(4, CLASSES)
    for x, _ in loader:
        z = model(x)
        optimizer.zero_grad()
        F.cross_entropy(z @ kept.T, torch.zeros(len(x), dtype=torch.long)).backward()
        optimizer.step()
        kept = torch.cat([kept, z.detach()])[-4:]


@TABLE.refused(PrivacyError, texts.STILL_WAITING, after=1)
def gradients_of_two_batches_at_half_rate(w: World) -> None:
    """The step is left out every second time, gradients are cleared."""
    model, optimizer, loader = w.private(mlp())
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        if step % 2 == 0:
            optimizer.step()
