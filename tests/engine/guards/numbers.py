"""Numbers that the loop reads from samples, and what comes back of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, Dataset

from dpkern.base.errors import InvalidInput, PrivacyError, UnsupportedModule
from tests.engine.guards.kit import WIDE, Table, World
from tests.engine.guards.losses import of_outputs
from tests.engine.guards.models import HIDDEN, Between, fit, mlp
from tests.engine.guards.records import CLASSES, TARGET

TABLE = Table("numbers read from samples", bounds=WIDE)


def each(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, reduction="none")


@TABLE.refused(UnsupportedModule, "got item")
def divided_by_a_count(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        counted = y > 0
        return (each(z, y) * counted).sum() / max(counted.sum().item(), 1)

    fit(w, mlp(), of_outputs(loss), loss_reduction="sum")


@TABLE.refused(UnsupportedModule, "got item")
def divided_by_a_count_and_a_constant(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        return each(z, y).sum() / (2 * (y > 0).sum().item() + 1)

    fit(w, mlp(), of_outputs(loss), loss_reduction="sum")


@TABLE.refused(UnsupportedModule, "number computed over samples")
def two_losses_balanced_by_their_values(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        one, two = F.cross_entropy(z, y), z.square().mean()
        return one / one.item() + two / two.item()

    fit(w, mlp(), of_outputs(loss))


@TABLE.refused(UnsupportedModule, "number computed over samples")
def divided_by_its_own_value_as_float(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        value = F.cross_entropy(z, y)
        return value / float(value.detach())

    fit(w, mlp(), of_outputs(loss))


@TABLE.refused(UnsupportedModule, "got median")
def clamped_at_the_median_as_float(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        terms = each(z, y)
        return terms.clamp(max=float(terms.median())).mean()

    fit(w, mlp(), of_outputs(loss))


@TABLE.refused(UnsupportedModule, "number computed over samples")
def centred_by_the_mean_as_float(w: World) -> None:
    fit(w, mlp(), lambda m, x, y: F.cross_entropy(m(x - float(x.mean())), y))


@TABLE.refused(UnsupportedModule, "got std")
def divided_by_the_spread_as_float(w: World) -> None:
    fit(w, mlp(), lambda m, x, y: F.cross_entropy(m(x / float(x.std())), y))


@TABLE.refused(UnsupportedModule, "got item")
def features_cut_at_a_count(w: World) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        first = x[:, : (x[:, 0] > 0).sum().item()]
        return F.cross_entropy(model(F.pad(first, (0, x.shape[1] - first.shape[1]))), y)

    fit(w, mlp(), loss)


@TABLE.refused(UnsupportedModule, "targets made elsewhere")
def labels_reversed_in_a_list(w: World) -> None:
    fit(w, mlp(), of_outputs(lambda z, y: F.cross_entropy(z, torch.tensor(y.tolist()[::-1]))))


@TABLE.refused(UnsupportedModule, "targets made elsewhere")
def labels_sorted_by_numpy(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z, torch.from_numpy(np.sort(y.numpy())))

    fit(w, mlp(), of_outputs(loss))


@TABLE.refused(PrivacyError, "a loss made from the module's outputs")
def rows_centred_inside_a_transform(w: World) -> None:
    """``vmap`` knows no ``item()``, with which targets are looked at."""

    def loss(z: Tensor, y: Tensor) -> Tensor:
        centre = z.detach().mean(0)

        def one(row: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy((row - centre)[None], target[None])

        mapped: Any = torch.func.vmap(one)
        return mapped(z, y).mean()

    fit(w, mlp(), of_outputs(loss))


class Kept(Between):
    """A network that keeps the mean of its last batch where no pass reads it."""

    def forward(self, x: Tensor, *more: Any, **named: Any) -> Tensor:
        self.__dict__["last"] = x.detach().mean(0)
        return super().forward(x)


def unchanged(m: nn.Module, h: Tensor) -> Tensor:
    return h


@TABLE.refused(UnsupportedModule, "got contents that depend on the samples")
def last_batch_in_a_state_dict_of_ones_own(w: World) -> None:
    class Saved(Kept):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            found = super().state_dict(*args, **kwargs)
            return found | {"last": self.__dict__.get("last", torch.zeros(HIDDEN))}

    fit(w, Saved(unchanged))


@TABLE.refused(UnsupportedModule, "got contents that depend on the samples")
def last_batch_added_by_a_state_dict_hook(w: World) -> None:
    def add(module: nn.Module, found: dict[str, Any], prefix: str, _: Any) -> None:
        found[prefix + "last"] = module.__dict__.get("last", torch.zeros(HIDDEN))

    inner = Kept(unchanged)
    inner._register_state_dict_hook(add)
    fit(w, inner)


class Augmented(Dataset[Any]):
    """A data set behind a function of its features."""

    def __init__(self, inner: Any, change: Callable[[Tensor], Tensor]) -> None:
        self.inner, self.change = inner, change

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        x, y = self.inner[index]
        return self.change(x), y


@TABLE.refused(InvalidInput, "listed 2 times")
def two_augmentations_joined(w: World) -> None:
    both = [Augmented(w.data, lambda x: x), Augmented(w.data, lambda x: -x)]
    fit(w, mlp(), loader=w.loader(ConcatDataset(both)))


@TABLE.right()
def one_augmentation(w: World) -> None:
    fit(w, mlp(), loader=w.loader(Augmented(w.data, lambda x: 0.5 * x)))


class Scaled(nn.Module):
    """A network whose outputs an argument scales."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor, scale: float = 1.0, *, step: int = 0) -> Tensor:
        return self.body(x) * scale


SIZES = ((0, 1, 2, 3, TARGET), (4, 5, 6, TARGET), (7, 8, TARGET))


def scaled_by(scale: Callable[[int], float]) -> Callable[[World], None]:
    def run(w: World) -> None:
        fit(w, Scaled(), lambda m, x, y: F.cross_entropy(m(x, scale(len(x))), y), draws=SIZES)

    return run


@TABLE.refused(UnsupportedModule, "which has followed the number of samples", after=2)
def size_of_the_batch_as_an_input(w: World) -> None:
    scaled_by(lambda size: size)(w)


@TABLE.refused(UnsupportedModule, "which has followed the number of samples", after=2)
def inverse_of_the_size_as_an_input(w: World) -> None:
    scaled_by(lambda size: 4 / size)(w)


@TABLE.refused(UnsupportedModule, "which has followed the number of samples", after=2)
def root_of_the_size_as_an_input(w: World) -> None:
    scaled_by(lambda size: size**0.5)(w)


def inputs_scaled_by(scale: Callable[[Tensor], Tensor]) -> Callable[[World], None]:
    def run(w: World) -> None:
        fit(w, mlp(), lambda m, x, y: F.cross_entropy(m(scale(x)), y), draws=SIZES)

    return run


@TABLE.refused(UnsupportedModule, "which has followed the number of samples", after=2)
def inputs_divided_by_the_size_of_the_batch(w: World) -> None:
    inputs_scaled_by(lambda x: x / len(x))(w)


@TABLE.refused(UnsupportedModule, "which has followed the number of samples", after=2)
def inputs_times_the_inverse_of_the_size(w: World) -> None:
    inputs_scaled_by(lambda x: x * (4 / len(x)))(w)


@TABLE.refused(UnsupportedModule, "which has followed the number of samples", after=2)
def outputs_divided_by_the_size(w: World) -> None:
    fit(w, mlp(), of_outputs(lambda z, y: F.cross_entropy(z / len(y), y)), draws=SIZES)


@TABLE.refused(UnsupportedModule, "which has followed the number of samples", after=2)
def inputs_divided_by_one_of_two_sizes(w: World) -> None:
    """As a shuffled epoch has them, whose last batch is smaller."""
    turns = ((0, 1, 2, TARGET), (6, TARGET), (7, 8, 9, TARGET))
    fit(w, mlp(), lambda m, x, y: F.cross_entropy(m(x / len(x)), y), draws=turns)


@TABLE.refused(UnsupportedModule, "which has followed the number of samples", after=2)
def terms_divided_by_the_size(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        return (each(z, y) / len(y)).sum()

    fit(w, mlp(), of_outputs(loss), draws=SIZES, loss_reduction="sum")


@TABLE.right()
def metric_divided_by_the_size(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        assert ((z.argmax(1) == y) / len(y)).sum() <= 1
        return F.cross_entropy(z, y)

    fit(w, mlp(), of_outputs(loss), draws=SIZES)


@TABLE.right()
def inputs_scaled_by_constants(w: World) -> None:
    inputs_scaled_by(lambda x: (x / 4 * 0.3 - 0.1) / x.shape[1])(w)


@TABLE.right()
def constants_and_steps_as_inputs(w: World) -> None:
    model, optimizer, loader = w.private(Scaled(), draws=SIZES)
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        F.cross_entropy(model(x, 0.5, step=step + 2), y).backward()
        optimizer.step()


@TABLE.right()
def losses_printed_as_numbers(w: World) -> None:
    seen: list[float] = []

    def loss(z: Tensor, y: Tensor) -> Tensor:
        value = F.cross_entropy(z, y)
        seen.extend([float(value), value.item(), sum(each(z, y).tolist())])
        seen.append(int((z.argmax(1) == y).sum()) / len(y))
        return value / 2

    fit(w, mlp(), of_outputs(loss))
    assert min(seen) >= 0


@TABLE.right()
def accuracy_counted_by_item(w: World) -> None:
    correct, total = 0, 0

    def loss(z: Tensor, y: Tensor) -> Tensor:
        nonlocal correct, total
        correct += (z.argmax(1) == y).sum().item()  # type: ignore[assignment]
        total += len(y)
        return F.cross_entropy(z, y) * 0.5

    fit(w, mlp(), of_outputs(loss))
    assert 0 <= correct <= total


@TABLE.right()
def features_shown_by_numpy(w: World) -> None:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        assert np.histogram(x.numpy())[0].sum() == x.numel()
        return F.cross_entropy(m(x / 255.0), y)

    fit(w, mlp(), loss)


@TABLE.right()
def labels_looked_up_and_adopted(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        names = [(c + 1) % CLASSES for c in y.tolist()]
        return F.cross_entropy(z, w.engine.adopt(torch.tensor(names)))

    fit(w, mlp(), of_outputs(loss))


@TABLE.right()
def random_targets_beside_a_printed_label(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        assert y[0].item() >= 0
        return F.cross_entropy(z, y) + F.mse_loss(z, torch.zeros(len(z), CLASSES))

    fit(w, mlp(), of_outputs(loss))


@TABLE.right()
def constant_of_the_value_of_a_statistic(w: World) -> None:
    """Values that constants have as well are not remembered."""

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        assert float(torch.ones_like(x).mean()) == 1.0
        return F.cross_entropy(m((x + 1.0) * 1.0), y)

    fit(w, mlp(), loss)


@TABLE.refused(UnsupportedModule, "got max")
def divided_by_a_new_tensor_of_the_largest(w: World) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x / x.new_tensor(x.abs().max().item())), y)

    fit(w, mlp(), loss)


@TABLE.refused(UnsupportedModule, "number computed over samples")
def divided_by_its_own_value_as_float_of_item(w: World) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        value = F.cross_entropy(z, y)
        return value / float(value.item())

    fit(w, mlp(), of_outputs(loss))
