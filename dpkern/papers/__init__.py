"""Tables and figures of the sources: published beside ours, claimed beside certified."""

from .catalogue import PAPERS, reproduce
from .result import Result, Row
from .runner import Request

__all__ = ["PAPERS", "Request", "Result", "Row", "reproduce"]
