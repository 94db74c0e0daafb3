"""Give a framework whole logical batches, as lists of the physical ones that they come in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from ..base.errors import InvalidInput, PrivacyError
from ..engine.loader import PrivateLoader, check_loader
from ..engine.provenance import untracked


class LogicalBatch(list[Any]):
    """The physical batches of one logical batch, in order."""


class LogicalBatches:
    """An iterable over logical batches whose loader may become private later.

    Args:
        original: the loader before it is private, over batches of the logical size.

    Raises:
        InvalidInput: a loader whose records cannot be drawn anew.
    """

    def __init__(self, original: DataLoader[Any]) -> None:
        check_loader(original)
        self.original = original
        self.private: PrivateLoader | None = None

    @property
    def dataset(self) -> Any:
        """The records."""
        return self.original.dataset

    def __len__(self) -> int:
        return len(self.original if self.private is None else self.private)

    def __iter__(self) -> Iterator[LogicalBatch]:
        """Yield the logical batches of one epoch.

        Raises:
            PrivacyError: the loader is not private yet.
        """
        if self.private is None:
            raise PrivacyError(
                "data_loader",
                expected="a private loader",
                got="one that make_private has not seen",
                remedy="Iterate over it in the framework's training loop only.",
            )
        parts = LogicalBatch()
        for part in self.private:
            parts.append(part)
            if self.private.final:
                yield parts
                parts = LogicalBatch()

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the engine's state holds the place in the run."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: the private loader goes on where the engine's state says."""


def enlarged(loader: DataLoader[Any], factor: int) -> DataLoader[Any]:
    """Return a loader whose batches have ``factor`` times as many records; the rest is the same.

    Raises:
        InvalidInput: a loader whose records cannot be drawn anew.
    """
    check_loader(loader)
    if factor == 1:
        return loader
    batches = loader.batch_sampler
    if type(batches) is not BatchSampler:
        raise InvalidInput(
            "data_loader",
            expected="batches to accumulate",
            got="a loader without batch_size",
            remedy="Pass batch_size= to the DataLoader.",
        )
    return DataLoader(
        loader.dataset,
        batch_size=batches.batch_size * factor,
        shuffle=isinstance(batches.sampler, RandomSampler),
        drop_last=batches.drop_last,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        pin_memory_device=loader.pin_memory_device,
    )


def physical_size(loader: DataLoader[Any], factor: int) -> int | None:
    """Return the number of records that a framework has in one pass; None if it accumulates none"""
    return None if factor == 1 else getattr(loader.batch_sampler, "batch_size", None)


def rows_of(part: Any) -> int:
    """Return the number of rows of a physical batch, by its first tensor."""
    if isinstance(part, Tensor):
        return part.shape[0] if part.dim() else 0
    values = part.values() if hasattr(part, "values") else part
    if isinstance(part, str) or not hasattr(values, "__iter__"):
        return 0
    return next((rows for rows in map(rows_of, values) if rows), 0)


def train_parts(
    batch: LogicalBatch, optimizer: torch.optim.Optimizer, train: Callable[[Any], Any]
) -> Any:
    """Train on all physical batches of a logical one; return what ``train`` made of the last.

    ``train`` runs forward and backward pass. After each physical batch but the last, the private
    optimizer clips its gradients and adds them up; the caller takes the step after the last.
    """
    *earlier, last = batch
    for part in earlier:
        train(part)
        optimizer.step()
    return train(last)


def plain(value: Tensor) -> Tensor:
    """Return a loss without its records: for reports, outside of what is trained."""
    return untracked(value.detach())
