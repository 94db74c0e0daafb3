"""The list of mechanisms: every configuration class of this package, found by its name.

The command line, audits, costs and tests list mechanisms by this list, and ask each class for the
rest. A new mechanism is in it as soon as the package's ``__init__`` imports its file.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterator
from typing import Any, ClassVar, Self

from ...base.validate import choice
from .examples import Audit


class CataloguedMechanism(ABC):
    """The root of all configurations; a class with a ``name`` of its own is a mechanism.

    Attributes:
        name: the mechanism's name, as ``--mechanism`` takes it.
        trained_by: what a training run of it is given: ``gradients`` (of any model), ``records``
            (of users, for an autoencoder), ``labelled rows``, or ``sums of rows``. None means
            that ``dpkern train`` cannot train it.
        audits: how ``dpkern audit`` makes its subjects.
    """

    name: ClassVar[str]
    trained_by: ClassVar[str | None]
    audits: ClassVar[tuple[Audit, ...]]

    @classmethod
    def all(cls) -> tuple[type[Self], ...]:
        """Return the mechanisms of this package that are of this kind, by name."""
        return tuple(sorted(set(_named(cls)), key=lambda kind: kind.name))

    @classmethod
    def named(cls, name: str) -> type[Self]:
        """Return the mechanism of this kind and name.

        Raises:
            InvalidInput: there is none.
        """
        known = {kind.name: kind for kind in cls.all()}
        return known[choice(tuple(known), mechanism=name)]

    @classmethod
    def names(cls, *, trained_by: str) -> tuple[str, ...]:
        """Return names of the mechanisms of this kind that such a run trains."""
        return tuple(kind.name for kind in cls.all() if kind.trained_by == trained_by)


def _named(kind: type[Any]) -> Iterator[type[Any]]:
    """Yield the classes of this package; those that a caller derives elsewhere are not its."""
    if "name" in vars(kind) and kind.__module__.startswith(f"{__package__}."):
        yield kind
    for derived in kind.__subclasses__():
        yield from _named(derived)
