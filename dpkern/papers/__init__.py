"""Tables and figures of the sources: published beside ours, claimed beside certified."""

from .catalogue import PAPERS, names, reproduce
from .pieces import Finished, Piece, Watch
from .result import Result, Row
from .runner import Request

__all__ = [
    "PAPERS",
    "Finished",
    "Piece",
    "Request",
    "Result",
    "Row",
    "Watch",
    "names",
    "reproduce",
]
