"""Make what is measured: a model, and one batch of generated data that it takes."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..base import validate as check
from ..base.errors import InvalidInput
from .demo import models

CLASSES = 10


@dataclass(frozen=True, kw_only=True)
class BenchmarkModel:
    """A model with its batch.

    Attributes:
        name: name in titles.
        model: model as it was built; copies of it are trained.
        x: ``[B, ...]``.
        labels: label of every row of logits: ``model(x)`` is ``[B, ..., classes]``.
    """

    name: str
    model: nn.Module
    x: Tensor
    labels: Tensor

    @property
    def batch(self) -> int:
        return len(self.x)

    @property
    def rows(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.x.shape[1:])

    @property
    def classes(self) -> int:
        """The number of logits of one label."""
        return int(self.labels.max()) + 1

    def loss(self, model: nn.Module, samples: int | None = None) -> Tensor:
        """Return the mean cross entropy of the first samples."""
        logits = model(self.x[:samples])
        each = len(self.labels) // self.batch
        labels = self.labels[: None if samples is None else samples * each]
        return nn.functional.cross_entropy(logits.flatten(0, -2), labels)

    def fresh(self) -> nn.Module:
        """Return a copy of the model, in training mode."""
        return copy.deepcopy(self.model).train()


def subject(
    model: str | nn.Module, *, batch_size: int, row_shape: Sequence[int] | None = None
) -> BenchmarkModel:
    """Return the model, and random rows and labels for it.

    Args:
        model: a name of ``demo.models``; ``package.module:callable``, which returns a module, or
            a module and an example input ``[B', ...]`` that its rows are drawn from; or a module.
        batch_size: number of rows.
        row_shape: shape of one sample. None selects the model's usual one, or the example's.

    Raises:
        InvalidInput: an unknown model, something that is none, or rows that it does not take.
    """
    check.integer(2, batch_size=batch_size)
    shape = None if row_shape is None else _row_shape(row_shape)
    example = None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if isinstance(model, nn.Module):
            name, built = type(model).__name__, model
        elif isinstance(model, str) and ":" in model:
            name = model
            built, example = _called(model)
        else:
            check.choice(models.ALL_MODELS, model=model)
            name, shape = str(model), shape or models.example_rows(str(model))
            built = models.build(name, row_shape=shape, classes=CLASSES)
        x = _rows(batch_size, shape, example)
        logits = _logits(built, x[:2])
        labels = torch.randint(logits.shape[-1], (len(x), *logits.shape[1:-1])).flatten()
    return BenchmarkModel(name=name, model=built, x=x, labels=labels)


def _row_shape(given: Sequence[int]) -> tuple[int, ...]:
    if not given:
        raise InvalidInput(
            "row_shape",
            expected="at least one size",
            got=str(list(given)),
            remedy="Pass the shape of one sample, such as (3, 32, 32).",
        )
    return tuple(check.integer(1, row_shape=size) for size in given)


def _called(path: str) -> tuple[nn.Module, Tensor | None]:
    """Return what the callable at ``package.module:callable`` returns."""
    place, _, attribute = path.partition(":")
    expected = "package.module:callable that can be imported from here"
    try:
        maker = getattr(importlib.import_module(place), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidInput(
            "model", expected=expected, got=f"{path} ({error})", remedy="Check its spelling."
        ) from error
    made = maker() if callable(maker) else maker
    module, example = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module) or not (example is None or isinstance(example, Tensor)):
        raise InvalidInput(
            "model",
            expected="a callable that returns a torch.nn.Module, or one and an example input",
            got=type(made).__name__,
            remedy="Return the model itself.",
        )
    return module, example


def _rows(batch: int, shape: tuple[int, ...] | None, example: Tensor | None) -> Tensor:
    """Draw rows from the example, or normal ones of this shape."""
    if example is not None and example.dim() and len(example) and shape is None:
        return example.detach()[torch.randint(len(example), (batch,))]
    if shape is None:
        raise InvalidInput(
            "row_shape",
            expected="the shape of one sample, for a model that is not one of the catalogue",
            got=None,
            remedy="Pass row_shape=(3, 32, 32), for example, or let the callable return an "
            "example input as well.",
        )
    return torch.randn(batch, *shape)


@torch.no_grad()
def _logits(model: nn.Module, x: Tensor) -> Tensor:
    """Return the model's outputs for two rows."""
    try:
        out: Tensor = model(x)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise InvalidInput(
            "row_shape",
            expected="rows that the model takes",
            got=f"{list(x.shape[1:])} ({str(error).splitlines()[0]})",
            remedy="Pass the shape of one sample.",
        ) from error
    check_logits(out, len(x))
    return out


def check_logits(out: object, rows: int) -> None:
    """Check that a model's output is one tensor of logits of so many rows."""
    if isinstance(out, Tensor):
        if out.is_floating_point() and out.dim() >= 2 and len(out) == rows and out.shape[-1] > 1:
            return
        got = f"shape {list(out.shape)}"
    else:
        got = type(out).__name__
    raise InvalidInput(
        "model",
        expected="one tensor of logits [B, ..., at least 2 classes]",
        got=got,
        remedy="Wrap the model in one that returns logits.",
    )
