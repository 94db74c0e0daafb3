"""Reproduce every item of one paper, or of all: checks first, then one item after the other.

Every item is followed up to its first training before any is trained, so that a folder that cannot
be read ends the run at once. Items without training are finished then, and not computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..base.errors import InvalidInput
from ..base.version import __version__
from . import catalogue, data_roots
from .pieces import CachedRun, ProgressListener
from .result import Result
from .runner import ItemPlanned, ItemRequest

Wanted = tuple[str, str]
"""A paper and its item."""


def wanted(paper: str) -> list[Wanted]:
    """Return the items of a paper, or of every paper for ``all``, without those always refused.

    Raises:
        InvalidInput: an unknown paper.
    """
    papers = list(catalogue.PAPERS) if paper == catalogue.ALL else [paper]
    found: list[Wanted] = []
    for name in papers:
        chosen = catalogue.names(name, catalogue.ALL if catalogue.has_items(name) else None)
        found += [(name, item) for item in chosen]
    return found


def check_data(pairs: Sequence[Wanted], data: str | None) -> list[Wanted]:
    """Return the items that take nothing of ``--data``.

    Raises:
        InvalidInput: no item takes any of it, a data set that none takes, or one folder for items
            of several papers.
    """
    if data is None:
        return []
    roots = data_roots.read(data)
    if roots is None and len({paper for paper, _ in pairs}) > 1:
        raise InvalidInput(
            "data",
            expected=f"folders by data set, of {', '.join(data_roots.KINDS)}",
            got=data,
            remedy="Example: --data mnist=FOLDER,fitbit=FOLDER",
        )
    unused = [pair for pair in pairs if catalogue.data_of(*pair, data) is None]
    taken = set().union(*(catalogue.DATA.get(pair, frozenset()) for pair in pairs))
    foreign = [kind for kind in roots or () if kind not in taken]
    if foreign or len(unused) == len(pairs):
        raise InvalidInput(
            "data",
            expected=f"data sets that an item takes: {', '.join(sorted(taken)) or 'none'}",
            got=data,
            remedy="Leave the others out.",
        )
    return unused


@dataclass(frozen=True, kw_only=True)
class PlannedItem:
    """An item whose checks have passed.

    Attributes:
        paper, item: its names.
        request: the request for it.
        pieces: what it trains first; empty where it is finished.
        result: what it found, where nothing had to be trained.
    """

    paper: str
    item: str
    request: ItemRequest
    pieces: Sequence[CachedRun]
    result: Result | None

    @property
    def name(self) -> str:
        return f"{self.paper} {self.item}".strip()

    @classmethod
    def unplanned(cls, paper: str, item: str, request: ItemRequest) -> PlannedItem:
        """Return an item whose checks come with its computation."""
        return cls(paper=paper, item=item, request=request, pieces=(), result=None)

    def watched(self, watch: ProgressListener) -> PlannedItem:
        """Return the item with an observer of its progress."""
        return replace(self, request=replace(self.request, watch=watch))

    def compute(self) -> Result:
        """Return the item's result, trained now unless it is known."""
        return self.result or catalogue.reproduce(self.paper, self.item, self.request)


def plan(pairs: Sequence[Wanted], make: Callable[[str, str], ItemRequest]) -> list[PlannedItem]:
    """Follow every item up to its first training.

    Args:
        pairs: the items.
        make: makes the request for a paper and its item.

    Raises:
        InvalidInput: as the items do.
    """
    return [_planned(paper, item, make(paper, item)) for paper, item in pairs]


def _planned(paper: str, item: str, request: ItemRequest) -> PlannedItem:
    pieces: list[CachedRun] = []
    result = None
    with suppress(ItemPlanned):
        result = catalogue.reproduce(paper, item, replace(request, planned=pieces))
    return PlannedItem(paper=paper, item=item, request=request, pieces=pieces, result=result)


def by_paper(items: Sequence[PlannedItem]) -> Iterator[tuple[str, list[PlannedItem]]]:
    """Yield each paper with its items, in order."""
    for paper in dict.fromkeys(item.paper for item in items):
        yield paper, [item for item in items if item.paper == paper]


SUMMARY = "verdicts.json"
"""File of all verdicts beside the results."""


def summary(contents: Sequence[Mapping[str, Any]], *, quick: bool) -> dict[str, Any]:
    """Return every item's verdicts, data and guard, of the contents that were written."""
    items = [
        {
            "paper": content["paper"],
            "item": content["item"],
            "title": content["title"],
            "data": list(dict.fromkeys(row["data"] for row in content["rows"])),
            "verdicts": content["verdicts"],
        }
        for content in contents
    ]
    return {"dpkern": __version__, "quick": quick, "items": items}


def page_path(out: Path, paper: str) -> Path:
    """Return the file of a paper's page."""
    return out / f"{paper}.html"


__all__ = [
    "SUMMARY",
    "PlannedItem",
    "by_paper",
    "check_data",
    "page_path",
    "plan",
    "summary",
    "wanted",
]
