"""Find out which of Lightning's two packages a program uses.

``pytorch_lightning`` and ``lightning`` have the same classes twice, and refuse each other's.
"""

from __future__ import annotations

import sys

from . import validate as check

OLD, NEW = "pytorch_lightning", "lightning.pytorch"


def lightning_package() -> str:
    """Return the name of the package that the program has imported, else of the newer one.

    Raises:
        MissingDependency: it is not installed.
    """
    package = OLD if OLD in sys.modules and NEW not in sys.modules else NEW
    check.require(package.partition(".")[0])
    return package


__all__ = ["lightning_package"]
