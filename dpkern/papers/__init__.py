"""Reproduce tables and figures of the papers: published beside ours, claimed beside certified."""

from .catalogue import PAPERS, names, reproduce, takes
from .pieces import CachedRun, ProgressListener, ResultCache
from .result import ComparisonRow, Result
from .runner import ItemRequest

__all__ = [
    "PAPERS",
    "CachedRun",
    "ComparisonRow",
    "ItemRequest",
    "ProgressListener",
    "Result",
    "ResultCache",
    "names",
    "reproduce",
    "takes",
]
