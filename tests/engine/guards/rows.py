"""Batches whose rows are not one record each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, DataLoader, Subset

from dpkern.base.errors import InvalidInput, PrivacyError, UnsupportedModule
from tests.engine.guards import texts
from tests.engine.guards.kit import Table, World
from tests.engine.guards.models import Language, Reader, conv, cross_entropy, fit, mlp
from tests.engine.guards.records import (
    CLASSES,
    DRAWS,
    IMAGES,
    RECORDS,
    TARGET,
    TEXTS,
    TOKENS,
    padded,
)

TABLE = Table("rows that are not records")

MIXED = ""


def _changed(change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda model, x, y: F.cross_entropy(model(change(x)), y)


@TABLE.refused(UnsupportedModule, "got sub")
def standardised_over_the_batch(w: World) -> None:
    fit(w, mlp(), _changed(lambda x: (x - x.mean(0)) / (x.std(0) + 1e-3)))


@TABLE.refused(UnsupportedModule, "got max")
def divided_by_the_largest_of_the_batch(w: World) -> None:
    fit(w, mlp(), _changed(lambda x: x / x.abs().max()))


@TABLE.refused(UnsupportedModule, "got sub")
def centred_in_place(w: World) -> None:
    def centre(x: Tensor) -> Tensor:
        x -= x.mean(0)
        return x

    fit(w, mlp(), _changed(centre))


@TABLE.refused(PrivacyError, texts.UNEVEN)
def first_row_overwritten(w: World) -> None:
    """One way to make a hard negative."""

    def overwrite(x: Tensor) -> Tensor:
        changed = x.clone()
        changed[0] = changed[-1]
        return changed

    fit(w, mlp(), _changed(overwrite))


@TABLE.refused(UnsupportedModule, "got add")
def mixup(w: World) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        other = torch.randperm(len(x))
        output = model(0.6 * x + 0.4 * x[other])
        return 0.6 * F.cross_entropy(output, y) + 0.4 * F.cross_entropy(output, y[other])

    fit(w, mlp(), loss)


@TABLE.refused(UnsupportedModule, "got lerp")
def mixup_by_lerp(w: World) -> None:
    fit(w, mlp(), _changed(lambda x: torch.lerp(x, x.flip(0), 0.3)))


@TABLE.refused(UnsupportedModule, "got __setitem__", kind=IMAGES)
def cutmix(w: World) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        other = torch.arange(len(x) - 1, -1, -1)
        mixed = x.clone()
        mixed[:, :, 1:3, 1:3] = x[other, :, 1:3, 1:3]
        output = model(mixed)
        return 0.75 * F.cross_entropy(output, y) + 0.25 * F.cross_entropy(output, y[other])

    fit(w, conv(), loss)


@TABLE.refused(UnsupportedModule, "got view_as", kind=IMAGES)
def patches_shuffled_over_all_images(w: World) -> None:
    def shuffle(x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        order = torch.randperm(len(flat), generator=torch.Generator().manual_seed(len(flat)))
        return flat[order].view_as(x)

    fit(w, conv(), _changed(shuffle))


@TABLE.refused(UnsupportedModule, "got std")
def noise_as_large_as_the_batch_is_wide(w: World) -> None:
    def noisy(x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
        return x + x.std() * noise

    fit(w, mlp(), _changed(noisy))


@TABLE.refused(UnsupportedModule, "got sort")
def sorted_column_by_column(w: World) -> None:
    fit(w, mlp(), _changed(lambda x: x.sort(0).values))


@TABLE.refused(UnsupportedModule, "got matmul")
def similarities_as_features(w: World) -> None:
    def similar(x: Tensor) -> Tensor:
        return F.normalize(x) @ F.normalize(x[-1:]).T * x

    fit(w, mlp(), _changed(similar))


@TABLE.refused(UnsupportedModule, "got einsum")
def similarities_by_einsum(w: World) -> None:
    def similar(x: Tensor) -> Tensor:
        return torch.einsum("bi,ci,cj->bj", x, x, x) / len(x)

    fit(w, mlp(), _changed(similar))


@TABLE.refused(UnsupportedModule, "got cumsum")
def running_sum_of_rows(w: World) -> None:
    fit(w, mlp(), _changed(lambda x: x.cumsum(0)))


@TABLE.refused(UnsupportedModule, "got diff")
def difference_to_the_row_before(w: World) -> None:
    def difference(x: Tensor) -> Tensor:
        return torch.diff(x, dim=0, prepend=x[:1])

    fit(w, mlp(), _changed(difference))


@TABLE.refused(UnsupportedModule, "got where")
def missing_values_filled_with_the_batch_mean(w: World) -> None:
    def fill(x: Tensor) -> Tensor:
        return torch.where(x.abs() < 0.3, x.mean(0, keepdim=True), x)

    fit(w, mlp(), _changed(fill))


@TABLE.refused(UnsupportedModule, "got quantile")
def clipped_at_the_batch_quantile(w: World) -> None:
    fit(w, mlp(), _changed(lambda x: x.clamp(max=x.quantile(0.7, dim=0))))


@TABLE.refused(UnsupportedModule, "got cat", kind=TOKENS)
def two_texts_in_one_row(w: World) -> None:
    """Packed for speed: the text and the next one share a row."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(torch.cat([x, x.roll(1, 0)], 1)), y)

    fit(w, Reader(), loss)


@TABLE.refused(UnsupportedModule, "got stack")
def features_swapped_between_records(w: World) -> None:
    def swap(x: Tensor) -> Tensor:
        columns = [x[:, j][torch.arange(len(x)).roll(j)] for j in range(x.shape[1])]
        return torch.stack(columns, 1)

    fit(w, mlp(), _changed(swap))


@TABLE.refused(UnsupportedModule, "got cross_entropy")
def labels_of_another_record(w: World) -> None:
    fit(w, mlp(), lambda model, x, y: F.cross_entropy(model(x), y.roll(1, 0)))


@TABLE.refused(UnsupportedModule, "got add")
def targets_smoothed_by_the_batch(w: World) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        hot = F.one_hot(y, 3).float()
        return F.cross_entropy(model(x), 0.7 * hot + 0.3 * hot.mean(0))

    fit(w, mlp(), loss)


def centring_collate(records: list[Any]) -> list[Tensor]:
    x, y = torch.utils.data.default_collate(records)
    return [x - x.mean(0), y]


@TABLE.refused(InvalidInput, texts.COLLATED_VALUES)
def collate_that_centres(w: World) -> None:
    fit(w, mlp(), loader=w.loader(collate_fn=centring_collate))


def mixing_collate(records: list[Any]) -> list[Tensor]:
    x, y = torch.utils.data.default_collate(records)
    return [0.5 * (x + x.flip(0)), y]


@TABLE.refused(InvalidInput, texts.COLLATED_VALUES)
def collate_that_mixes(w: World) -> None:
    fit(w, mlp(), loader=w.loader(collate_fn=mixing_collate))


def packing_collate(records: list[Any]) -> list[Tensor]:
    """Texts joined and cut into rows of one length, as for language models."""
    words = torch.cat([x for x, _ in records])
    rows = words[: len(words) // 4 * 4].view(-1, 4)
    return [rows, rows[:, 0] % 3]


@TABLE.refused(UnsupportedModule, texts.COLLATED_ROWS, kind=TOKENS)
def collate_that_packs(w: World) -> None:
    fit(w, Reader(), loader=w.loader(collate_fn=packing_collate))


def doubling_collate(records: list[Any]) -> list[Tensor]:
    """Every record and its mirror image, the mirror images behind."""
    x, y = torch.utils.data.default_collate(records)
    return [torch.cat([x, -x]), torch.cat([y, y])]


@TABLE.refused(UnsupportedModule, texts.COLLATED_ROWS)
def collate_with_two_views(w: World) -> None:
    fit(w, mlp(), loader=w.loader(collate_fn=doubling_collate))


def dropping_collate(records: list[Any]) -> list[Tensor]:
    """Records of the first class are thinned out."""
    kept = [r for i, r in enumerate(records) if i % 2 or int(r[1])] or records[:1]
    return torch.utils.data.default_collate(kept)


@TABLE.refused(UnsupportedModule, texts.COLLATED_ROWS)
def collate_that_drops(w: World) -> None:
    fit(w, mlp(), loader=w.loader(collate_fn=dropping_collate))


def balancing_collate(records: list[Any]) -> list[Tensor]:
    """The last record fills up the batch."""
    return torch.utils.data.default_collate([*records, *[records[-1]] * (6 - len(records))])


@TABLE.refused(UnsupportedModule, texts.COLLATED_ROWS)
def collate_that_repeats(w: World) -> None:
    fit(w, mlp(), loader=w.loader(collate_fn=balancing_collate))


@TABLE.refused(InvalidInput, texts.LISTED_AGAIN)
def oversampled_by_a_subset(w: World) -> None:
    """A rare record listed many times."""
    places = [*range(RECORDS), *[TARGET] * 5]
    w.owner = dict(enumerate(places))
    draws = [(*DRAWS[0], 12, 13, 14), DRAWS[1], (*DRAWS[2], 15, 16)]
    fit(w, mlp(), loader=w.loader(Subset(w.data, places)), draws=draws)


@TABLE.refused(InvalidInput, texts.LISTED_AGAIN)
def data_set_repeated_for_longer_epochs(w: World) -> None:
    w.owner = {i: i % RECORDS for i in range(3 * RECORDS)}
    draws = [(0, 1, TARGET, TARGET + RECORDS, TARGET + 2 * RECORDS), (4, 5, 17), (TARGET, 22, 8)]
    fit(w, mlp(), loader=w.loader(ConcatDataset([w.data] * 3)), draws=draws)


@TABLE.refused(InvalidInput, texts.LISTED_AGAIN)
def class_balanced_by_a_subset_of_a_subset(w: World) -> None:
    inner = Subset(w.data, [TARGET, *range(10)])
    places = [0, 0, 0, *range(1, 11)]
    w.owner = {i: inner.indices[p] for i, p in enumerate(places)}
    draws = [(0, 1, 2, 5, 6), (4, 5, 7), (0, 2, 8, 9)]
    fit(w, mlp(), loader=w.loader(Subset(inner, places)), draws=draws)


@TABLE.refused(PrivacyError, texts.PADDED, kind=TEXTS)
def padding_of_the_longest_text_in_the_loss(w: World) -> None:
    """One long record, and all others have more padding to predict."""
    model, optimizer, loader = w.private(Language(), loader=w.loader(collate_fn=padded))
    for batch in loader:
        optimizer.zero_grad()
        logits = model(batch["input_ids"]).transpose(1, 2)
        F.cross_entropy(logits, batch["input_ids"], reduction="none").mean(1).mean().backward()
        optimizer.step()


@TABLE.refused(PrivacyError, texts.PADDED, kind=TEXTS)
def padding_of_the_longest_text_in_the_average(w: World) -> None:
    """Word vectors are averaged over the padded length."""
    model, optimizer, loader = w.private(Reader(), loader=w.loader(collate_fn=padded))
    for batch in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(batch["input_ids"]), batch["input_ids"][:, 0] % CLASSES).backward()
        optimizer.step()


@TABLE.right(kind=IMAGES)
def channels_as_samples_of_their_image(w: World) -> None:
    """All rows of a record stand next to each other."""
    table = nn.Sequential(nn.Flatten(), nn.Linear(16, CLASSES))

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        each = model(x.flatten(0, 1))
        return F.cross_entropy(each.view(len(x), 2, CLASSES).mean(1), y)

    fit(w, table, loss)


@TABLE.refused(InvalidInput, texts.OWN_PLAN)
def loader_that_yields_single_rows(w: World) -> None:
    """Without a batch size each batch is one record, without a row dimension."""
    loader = DataLoader(w.data, batch_size=None, shuffle=True)
    fit(w, mlp(), cross_entropy, loader=loader)


@TABLE.refused(PrivacyError, texts.PIECES)
def losses_of_micro_batches_added(w: World) -> None:
    """One backward pass for all pieces, which are clipped piece by piece."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        parts = zip(x.split(2), y.split(2), strict=True)
        return sum(F.cross_entropy(model(a), b, reduction="sum") for a, b in parts) / len(x)

    fit(w, mlp(), loss)


@TABLE.refused(UnsupportedModule, "got set")
def memory_of_other_rows_taken(w: World) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        taken = torch.zeros_like(x)
        taken.set_(x.flip(0).contiguous())
        return F.cross_entropy(model(taken), y)

    fit(w, mlp(), loss)
