"""Everyday ways from the loader to the module: every row stays one record's."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.guards.kit import Table, World
from tests.guards.models import Language, Reader, conv, cross_entropy, fit, mlp
from tests.guards.records import CLASSES, FEATURES, IMAGES, TEXTS, TOKENS, as_dict, padded

TABLE = Table("batches")


@TABLE.right()
def plain_loop(w: World) -> None:
    fit(w, mlp())


@TABLE.right()
def micro_batches_by_chunk(w: World) -> None:
    model, optimizer, loader = w.private(mlp(), loss_reduction="sum")
    for x, y in loader:
        optimizer.zero_grad()
        for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
            F.cross_entropy(model(a), b, reduction="sum").backward()
        optimizer.step()


@TABLE.right()
def micro_batches_by_split(w: World) -> None:
    model, optimizer, loader = w.private(mlp())
    for x, y in loader:
        optimizer.zero_grad()
        for a, b in zip(x.split(2), y.split(2), strict=True):
            (F.cross_entropy(model(a), b) * len(a) / len(x)).backward()
        optimizer.step()


@TABLE.right()
def micro_batches_by_slices(w: World) -> None:
    model, optimizer, loader = w.private(mlp(), loss_reduction="sum")
    for x, y in loader:
        optimizer.zero_grad()
        for start in range(0, len(x), 2):
            part = slice(start, start + 2)
            F.cross_entropy(model(x[part]), y[part], reduction="sum").backward()
        optimizer.step()


@TABLE.right()
def losses_of_micro_batches_added(w: World) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        parts = zip(x.split(2), y.split(2), strict=True)
        return sum(F.cross_entropy(model(a), b, reduction="sum") for a, b in parts) / len(x)

    fit(w, mlp(), loss)


@TABLE.right()
def one_sample_at_a_time(w: World) -> None:
    model, optimizer, loader = w.private(mlp(), loss_reduction="sum")
    for x, y in loader:
        optimizer.zero_grad()
        for row, label in zip(x, y, strict=True):
            F.cross_entropy(model(row[None]), label[None]).backward()
        optimizer.step()


@TABLE.right()
def rows_augmented_one_by_one(w: World) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x = torch.stack([row / (1 + row.norm()) for row in x])
        return cross_entropy(model, x, y)

    fit(w, mlp(), loss)


@TABLE.right()
def rows_permuted(w: World) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        order = torch.randperm(len(x))
        return cross_entropy(model, x[order], y[order])

    fit(w, mlp(), loss)


@TABLE.right()
def rows_sorted_by_size(w: World) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        order = x.norm(dim=1).argsort(descending=True)
        return cross_entropy(model, x.index_select(0, order), y[order])

    fit(w, mlp(), loss)


@TABLE.right()
def rows_reversed(w: World) -> None:
    fit(w, mlp(), lambda model, x, y: cross_entropy(model, x.flip(0), y.flip(0)))


@TABLE.right()
def rows_of_one_class_only(w: World) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        kept = y != 1
        return F.cross_entropy(model(x[kept]), y[kept], reduction="sum")

    fit(w, mlp(), loss, loss_reduction="sum")


@TABLE.right(random=True)
def half_of_the_rows(w: World) -> None:
    """Which ones is a coin's matter, thrown for each record anew."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        mask = torch.ones(len(x)).bernoulli_(0.9, generator=torch.Generator().manual_seed(0))
        return (F.cross_entropy(model(x), y, reduction="none") * mask).mean()

    fit(w, mlp(), loss)


@TABLE.right()
def two_views_in_two_passes(w: World) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return (cross_entropy(model, x, y) + cross_entropy(model, -x, y)) / 2

    fit(w, mlp(), loss)


@TABLE.right()
def two_views_behind_each_other(w: World) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model, torch.cat([x, -x]), torch.cat([y, y]))

    fit(w, mlp(), loss)


@TABLE.right()
def two_views_next_to_each_other(w: World) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        both = torch.stack([x, -x], 1).flatten(0, 1)
        return cross_entropy(model, both, y.repeat_interleave(2))

    fit(w, mlp(), loss)


@TABLE.right()
def four_copies_of_every_row(w: World) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        copies = x.repeat_interleave(4, 0) * 0.9
        return cross_entropy(model, copies, y.repeat_interleave(4))

    fit(w, mlp(), loss)


@TABLE.right(kind=IMAGES)
def several_crops(w: World) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        crops = [F.pad(x, (1, 0))[..., :4], F.pad(x, (0, 1))[..., 1:], x.flip(-1)]
        return sum(cross_entropy(model, crop, y) for crop in crops) / len(crops)

    fit(w, conv(), loss)


@TABLE.right(kind=IMAGES)
def several_crops_in_one_pass(w: World) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        crops = torch.cat([x, x.flip(-1), x.flip(-2)])
        outputs = model(crops).chunk(3)
        return sum(F.cross_entropy(output, y) for output in outputs) / 3

    fit(w, conv(), loss)


@TABLE.right(kind=IMAGES)
def normalised_by_constants(w: World) -> None:
    mean, deviation = torch.tensor([0.1, -0.2]), torch.tensor([1.1, 0.9])

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model, (x - mean[:, None, None]) / deviation[:, None, None], y)

    fit(w, conv(), loss)


@TABLE.right(kind=IMAGES)
def normalised_image_by_image(w: World) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        mean, deviation = x.mean((1, 2, 3), keepdim=True), x.std((1, 2, 3), keepdim=True)
        return cross_entropy(model, (x - mean) / (deviation + 1e-3), y)

    fit(w, conv(), loss)


@TABLE.right(kind=IMAGES)
def resized_and_cropped(w: World) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        large = F.interpolate(x, size=6, mode="bilinear", align_corners=False)
        return cross_entropy(model, large[:, :, 1:5, 1:5], y)

    fit(w, conv(), loss)


@TABLE.right(kind=IMAGES)
def blurred_by_a_fixed_filter(w: World) -> None:
    kernel = torch.full((2, 1, 3, 3), 1 / 9)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model, F.conv2d(x, kernel, padding=1, groups=2), y)

    fit(w, conv(), loss)


@TABLE.right(kind=IMAGES)
def cut_into_patches(w: World) -> None:
    head = nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Flatten(), nn.Linear(20, CLASSES))

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        patches = x.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5)
        return cross_entropy(model, patches.reshape(len(x), 4, 8), y)

    fit(w, head, loss)


@TABLE.right(kind=IMAGES)
def channels_last(w: World) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model, x.contiguous(memory_format=torch.channels_last), y)

    fit(w, conv(), loss)


@TABLE.right(kind=IMAGES)
def erased_at_random(w: World) -> None:
    """A square of each image is set to zero, in place."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x = x.clone()
        for i in range(len(x)):
            x[i, :, 1:3, 0:2] = 0.0
        return cross_entropy(model, x, y)

    fit(w, conv(), loss)


@TABLE.right()
def targets_one_hot(w: World) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(model(x), F.one_hot(y, CLASSES).to(x.dtype))

    fit(w, mlp(), loss)


@TABLE.right(kind=TOKENS)
def words_one_hot(w: World) -> None:
    head = nn.Sequential(nn.Linear(17, 4), nn.Tanh(), nn.Flatten(), nn.Linear(20, CLASSES))
    fit(w, head, lambda m, x, y: cross_entropy(m, F.one_hot(x, 17).float(), y))


@TABLE.right(random=True)
def noise_of_a_generator_of_ones_own(w: World) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        noise = torch.randn(8, FEATURES, generator=torch.Generator().manual_seed(2))
        return cross_entropy(model, x + 0.1 * noise[: len(x)], y)

    fit(w, mlp(), loss)


@TABLE.right(random=True)
def noise_in_place_of_the_features(w: World) -> None:
    """Each record stands for a row of noise, too."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model, x, y) + cross_entropy(model, torch.randn_like(x), y)

    fit(w, mlp(), loss)


@TABLE.right(random=True)
def noise_of_the_global_generator(w: World) -> None:
    fit(w, mlp(), lambda m, x, y: cross_entropy(m, x + 0.1 * torch.randn_like(x), y))


@TABLE.right()
def device_and_dtype(w: World) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x = x.to("cpu", torch.float64, non_blocking=True)
        return cross_entropy(model, x, y.to("cpu"))

    fit(w, mlp().double(), loss)


@TABLE.right()
def features_concatenated(w: World) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model, torch.cat([x, x.square(), x.cos()], 1), y)

    fit(w, mlp(inputs=3 * FEATURES), loss)


@TABLE.right()
def features_by_products(w: World) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        products = torch.einsum("bi,bj->bij", x, x).flatten(1)
        return cross_entropy(model, products, y)

    fit(w, mlp(inputs=FEATURES**2), loss)


@TABLE.right()
def features_projected(w: World) -> None:
    axes = torch.randn(FEATURES, FEATURES, generator=torch.Generator().manual_seed(4))
    fit(w, mlp(), lambda m, x, y: cross_entropy(m, x @ axes, y))


@TABLE.right()
def missing_values_filled_with_a_constant(w: World) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x = torch.where(x.abs() < 0.3, torch.zeros(()), x)
        x[x > 2.0] = 2.0
        return cross_entropy(model, x.nan_to_num().clamp(-3, 3), y)

    fit(w, mlp(), loss)


@TABLE.right(kind=TOKENS)
def words_masked(w: World) -> None:
    """Masked language modelling: every third word becomes word 1."""
    model, optimizer, loader = w.private(Language())
    for ids, _ in loader:
        optimizer.zero_grad()
        masked = ids.clone()
        masked[:, ::3] = 1
        each = F.cross_entropy(model(masked).transpose(1, 2), ids, reduction="none")
        each[:, ::3].mean(1).mean().backward()
        optimizer.step()


@TABLE.right(kind=TOKENS)
def words_shifted(w: World) -> None:
    model, optimizer, loader = w.private(Language())
    for ids, _ in loader:
        optimizer.zero_grad()
        logits = model(ids[:, :-1])
        each = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        each.mean(1).mean().backward()
        optimizer.step()


@TABLE.right()
def batches_in_a_dictionary(w: World) -> None:
    model, optimizer, loader = w.private(mlp(), loader=w.loader(collate_fn=as_dict))
    for batch in loader:
        batch = {key: value.to("cpu") for key, value in batch.items()}
        optimizer.zero_grad()
        F.cross_entropy(model(batch["inputs"]), batch["labels"]).backward()
        optimizer.step()


@dataclass
class Batch:
    x: Tensor
    y: Tensor


def as_dataclass(records: Any) -> Batch:
    return Batch(*torch.utils.data.default_collate(records))


@TABLE.right()
def batches_in_a_dataclass(w: World) -> None:
    model, optimizer, loader = w.private(mlp(), loader=w.loader(collate_fn=as_dataclass))
    for batch in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(batch.x), batch.y).backward()
        optimizer.step()


Pair = namedtuple("Pair", "x y")


def as_named(records: Any) -> Pair:
    return Pair(*torch.utils.data.default_collate(records))


@TABLE.right()
def batches_in_a_named_tuple(w: World) -> None:
    model, optimizer, loader = w.private(mlp(), loader=w.loader(collate_fn=as_named))
    for batch in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(batch.x), batch.y).backward()
        optimizer.step()


class Encoding(UserDict[str, Tensor]):
    """Like Hugging Face's ``BatchEncoding``: a mapping that moves between devices."""

    def to(self, device: str) -> Encoding:
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self


def as_encoding(records: Any) -> Encoding:
    return Encoding(padded(records))


@TABLE.right(kind=TEXTS)
def batches_in_an_encoding(w: World) -> None:
    model, optimizer, loader = w.private(Language(), loader=w.loader(collate_fn=as_encoding))
    for batch in loader:
        batch = batch.to("cpu")
        optimizer.zero_grad()
        mask = batch["attention_mask"]
        logits = model(**batch).transpose(1, 2)
        each = F.cross_entropy(logits, batch["input_ids"], reduction="none") * mask
        (each.sum(1) / mask.sum(1).clamp(min=1)).mean().backward()
        optimizer.step()


@TABLE.right(kind=TEXTS)
def padded_texts_pooled_under_a_mask(w: World) -> None:
    def middle(m: nn.Module, ids: Tensor, h: Tensor) -> Tensor:
        mask = (ids != 0).unsqueeze(-1)
        return ((h * mask).sum(1) / mask.sum(1).clamp(min=1)).unsqueeze(1)

    model, optimizer, loader = w.private(Reader(middle), loader=w.loader(collate_fn=padded))
    for batch in loader:
        optimizer.zero_grad()
        ids = batch["input_ids"]
        F.cross_entropy(model(ids), ids[:, 0] % CLASSES).backward()
        optimizer.step()


@TABLE.right()
def split_into_physical_batches(w: World) -> None:
    fit(w, mlp(), max_physical_batch_size=2)


@TABLE.right()
def fixed_batch_size(w: World) -> None:
    fit(w, mlp(), sampling="fixed")


@TABLE.right()
def handed_on_through_a_function_and_a_queue(w: World) -> None:
    """Prepared by a generator that keeps one batch at a time."""

    def prepared(loader: Any) -> Any:
        for x, y in loader:
            waiting = [(x.contiguous(), y.view(-1))]
            yield waiting.pop()

    model, optimizer, loader = w.private(mlp())
    for x, y in prepared(loader):
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
