"""Control the records of an audited loop: which ones each batch holds, and their contents.

Batches with even numbers hold every target, those with odd numbers none; all other records come as
the engine's sampler drew them. A run without a target leaves it out of the batches that hold it,
and every other record keeps its batch, its place among the others and its random numbers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset

SEED = 0x10F5
OUTLIER = 1000.0
"""Factor of an outlier's floating-point numbers over those of a record."""


@dataclass(frozen=True)
class Content:
    """The content that stands in a record's place.

    Attributes:
        source: the record that is read instead.
        factor: factor of the record's floating-point numbers.
    """

    source: int
    factor: float = 1.0


def seed_everything(seed: int, *, devices: bool = True) -> None:
    """Seed the generators of torch, NumPy and Python; without ``devices`` torch's CPU one alone."""
    if devices:
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


@contextmanager
def generators_restored(*, devices: bool = True) -> Iterator[None]:
    """Put the states of the three generators back at the end."""
    several = list(range(torch.cuda.device_count())) if devices else []
    ours = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=several):
        try:
            yield
        finally:
            random.setstate(ours[0])
            np.random.set_state(ours[1])


class AuditedRecords(Dataset[Any]):
    """The user's data set with other contents, and with random numbers that no record shares.

    A transformation that draws random numbers would otherwise shift those of all later records when
    one is left out.
    """

    def __init__(self, dataset: Any, contents: Mapping[int, Content]) -> None:
        self.dataset = dataset
        self.contents = dict(contents)
        self.visits: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        number = int(index)
        content = self.contents.get(number, Content(number))
        visit = self.visits[number] = self.visits.get(number, 0) + 1
        with generators_restored(devices=False):  # workers may not touch a device
            seed_everything(SEED + 7919 * number + 104_729 * visit, devices=False)
            record = self._read(content.source)
        return record if content.factor == 1 else tree_map(_times(content.factor), record)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return several records, each drawn apart."""
        return [self[index] for index in indices]

    def _read(self, number: int) -> Any:
        several = getattr(self.dataset, "__getitems__", None)
        return self.dataset[number] if several is None else several([number])[0]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)


def scales(record: Any) -> bool:
    """Whether a record has numbers that an outlier can be made of."""
    found = []
    tree_map(lambda leaf: found.append(_floating(leaf)), record)
    return any(found)


def _floating(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return leaf.is_floating_point()
    return isinstance(leaf, (float, np.floating)) or (
        isinstance(leaf, np.ndarray) and leaf.dtype.kind == "f"
    )


def _times(factor: float) -> Any:
    return lambda leaf: (
        leaf * type(leaf)(factor)
        if isinstance(leaf, np.floating)
        else (leaf * factor if _floating(leaf) else leaf)
    )


class ForcedMasks:
    """Batches that hold the targets or not, by their number, and never one of two targets alone.

    Args:
        targets: the records in question.
        removed: target that is left out. None leaves out none.
        records: size of the data set.
        poisson: batches may have any size; others keep theirs.
    """

    def __init__(
        self, targets: Sequence[int], removed: int | None, records: int, *, poisson: bool
    ) -> None:
        self.targets = torch.tensor(sorted(targets), dtype=torch.int64)
        self.removed = removed
        self.poisson = poisson
        self.rest = [i for i in range(records) if i not in targets]
        self.places: dict[int, int] = {}
        """The place of the missing record in its physical batch, by the batch's number."""
        self.parts: dict[int, list[list[int]]] = {}
        """The records of every physical batch, by the number of its logical batch."""

    def drawn(self, number: int, records: Tensor) -> Tensor:
        """Return the records of a batch, in the sampler's order and the targets at its end."""
        self.parts[number] = []
        if not len(self.targets):
            return records if len(records) else torch.tensor(self.rest[:1])
        others = records[~torch.isin(records, self.targets)]
        held = self.targets if number % 2 == 0 else self.targets[:0]
        wanted = 1 if self.poisson else max(len(records) - len(held), 1)
        if not self.poisson:
            others = others[:wanted]
        if len(others) < wanted:
            known = set(others.tolist())
            more = [i for i in self.rest if i not in known][: wanted - len(others)]
            others = torch.cat([others, torch.tensor(more, dtype=torch.int64)])
        return torch.cat([others, held])

    def kept(self, number: int, part: Tensor) -> Tensor:
        """Return a physical batch without the record that is left out."""
        if self.removed is not None and bool((part == self.removed).any()):
            self.places[number] = part.tolist().index(self.removed)
            part = part[part != self.removed]
        self.parts[number].append(part.tolist())
        return part
