"""Small data sets of every kind, in which one record, or one that is never drawn, turns hostile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

RECORDS, FEATURES, CLASSES, WORDS, LENGTH = 12, 6, 3, 17, 5
TARGET, OUTSIDE = 10, 11
"""The record that joins or leaves the batches, and one that no batch holds."""

DRAWS = ((0, 1, 2, 3, TARGET), (4, 5, 6, 7), (8, TARGET, 9, 1))
"""The records of every step: the target in the first and the third."""


@dataclass(frozen=True)
class Kind:
    """How records look: all of them, and the values that a hostile one may take."""

    make: Callable[[], list[Any]]
    hostile: tuple[Callable[[list[Any]], Any], ...]


class Listed(Dataset[Any]):
    """Records in a list."""

    def __init__(self, records: Sequence[Any]) -> None:
        self.records = list(records)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Any:
        return self.records[index]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _rows() -> list[Any]:
    x = torch.randn(RECORDS, FEATURES, generator=_generator(1))
    y = torch.randint(CLASSES, (RECORDS,), generator=_generator(2))
    return list(zip(x, y, strict=True))


def _far(scale: float, label: int) -> Callable[[list[Any]], Any]:
    def value(records: list[Any]) -> Any:
        x = torch.zeros_like(records[0][0])
        x.view(-1)[1::2] = scale
        x.view(-1)[0] = -scale
        return x, torch.tensor(label)

    return value


def _copy(of: int, scale: float) -> Callable[[list[Any]], Any]:
    def value(records: list[Any]) -> Any:
        x, y = records[of]
        return x * scale, (y + 1) % CLASSES

    return value


def _images() -> list[Any]:
    x = torch.randn(RECORDS, 2, 4, 4, generator=_generator(3))
    y = torch.randint(CLASSES, (RECORDS,), generator=_generator(4))
    return list(zip(x, y, strict=True))


def _scalars() -> list[Any]:
    return [(x, x.sum(0, keepdim=True).sin()) for x, _ in _rows()]


def _valued(hostile: Callable[[list[Any]], Any], target: float) -> Callable[[list[Any]], Any]:
    return lambda records: (hostile(records)[0], torch.tensor([target]))


def _tokens() -> list[Any]:
    x = torch.randint(2, WORDS, (RECORDS, LENGTH), generator=_generator(5))
    y = torch.randint(CLASSES, (RECORDS,), generator=_generator(6))
    return list(zip(x, y, strict=True))


def _words(first: int, step: int, label: int) -> Callable[[list[Any]], Any]:
    def value(records: list[Any]) -> Any:
        x = (first + step * torch.arange(LENGTH)) % WORDS
        return x, torch.tensor(label)

    return value


def _texts() -> list[Any]:
    lengths = torch.randint(2, 4, (RECORDS,), generator=_generator(7)).tolist()
    return [
        torch.randint(2, WORDS, (n,), generator=_generator(8 + i)) for i, n in enumerate(lengths)
    ]


def _text(length: int, word: int) -> Callable[[list[Any]], Any]:
    return lambda records: (word + torch.arange(length)) % (WORDS - 2) + 2


ROWS = Kind(_rows, (_far(30.0, 0), _far(-3.0, 1), _copy(0, -20.0), _copy(2, 1.0)))
IMAGES = Kind(_images, (_far(30.0, 2), _far(-3.0, 0), _copy(0, -20.0)))
SCALARS = Kind(
    _scalars,
    (_valued(_far(30.0, 0), 50.0), _valued(_far(-3.0, 0), -50.0), _valued(_copy(0, -20.0), 3.0)),
)
TOKENS = Kind(_tokens, (_words(2, 0, 0), _words(16, 0, 1), _words(3, 1, 2)))
TEXTS = Kind(_texts, (_text(12, 3), _text(2, 9), _text(7, 0)))


def data(kind: Kind, *, target: int | None = None, outside: int | None = None) -> Listed:
    """The records of a kind, the target or the outsider with the hostile value of this number."""
    records = kind.make()
    for place, number in ((TARGET, target), (OUTSIDE, outside)):
        if number is not None:
            records[place] = kind.hostile[number](kind.make())
    return Listed(records)


def as_dict(records: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Collate pairs as Hugging Face's collators do."""
    x, y = zip(*records, strict=True)
    return {"inputs": torch.stack(x), "labels": torch.stack(y)}


def padded(records: Sequence[Tensor]) -> dict[str, Tensor]:
    """Collate texts of several lengths, padded with 0."""
    ids = torch.nn.utils.rnn.pad_sequence(list(records), batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}
