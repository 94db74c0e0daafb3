"""Everyday changes of inputs, and batches in every container."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.engine.guards.kit import Table, World
from tests.engine.guards.models import Language, Reader, conv, cross_entropy, fit, mlp
from tests.engine.guards.records import CLASSES, FEATURES, IMAGES, TEXTS, TOKENS, as_dict, padded

TABLE = Table("inputs")


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
    model, optimizer, loader = w.private(
        Language(), loader=w.loader(collate_fn=as_encoding), masked_padding=True
    )
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

    model, optimizer, loader = w.private(
        Reader(middle), loader=w.loader(collate_fn=padded), masked_padding=True
    )
    for batch in loader:
        optimizer.zero_grad()
        ids = batch["input_ids"]
        F.cross_entropy(model(ids), ids[:, 0] % CLASSES).backward()
        optimizer.step()
