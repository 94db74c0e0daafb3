"""Import a user's file as it stands now, and never a compiled copy of what it was."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType


class _AsItStands(SourceFileLoader):
    """A loader without bytecode files.

    Python takes a bytecode file for fresh if the source has the size and, to the second, the time
    of change that it had: a number that is edited at once, ``2.0`` to ``0.5``, would not be seen.
    """

    def get_code(self, fullname: str) -> CodeType:
        """Compile the source."""
        code: CodeType = self.source_to_code(self.get_data(self.path), self.path)
        return code


def spec_of(path: Path, name: str) -> ModuleSpec | None:
    """Return what imports this file under a name; None if it is no Python file."""
    if not path.is_file() or path.suffix != ".py":
        return None
    return importlib.util.spec_from_file_location(name, path, loader=_AsItStands(name, str(path)))
