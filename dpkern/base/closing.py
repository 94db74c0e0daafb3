"""Objects that are closed at the end of a ``with`` block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Closes(ABC):
    """An object that a ``with`` block closes, however the block ends."""

    @abstractmethod
    def close(self) -> None:
        """Give up what it holds; calling it twice changes nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
