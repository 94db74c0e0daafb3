"""Folders of data sets by name: ``--data mnist=DIR,cifar10=DIR,svhn=DIR``.

An experiment on several data sets takes each from its own folder, so that no row carries another's
name. A text without ``=`` is one folder, file or name for items on one data set.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..base.errors import InvalidInput
from ..train import formats
from ..train.data import Dataset

KINDS: Mapping[str, tuple[int, ...]] = {
    "mnist": (1, 28, 28),
    "cifar10": (3, 32, 32),
    "svhn": (3, 32, 32),
    "fitbit": (14,),
}
"""Data sets by name, and the shape of their rows; fitbit is a table of users' days."""


def read(text: str | None) -> dict[str, str] | None:
    """Return the folders by data set; None where the text names no data sets.

    Raises:
        InvalidInput: an unknown data set, one named twice, or a part without a folder.
    """
    if text is None or not any(text.startswith(f"{kind}=") for kind in KINDS):
        return None
    found: dict[str, str] = {}
    for part in text.split(","):
        kind, equals, folder = part.partition("=")
        if not equals or not folder or kind not in KINDS or kind in found:
            raise InvalidInput(
                "data",
                expected=f"DATA=FOLDER once for each of {', '.join(KINDS)}, with commas",
                got=text,
                remedy="Example: --data mnist=/data/mnist,cifar10=/data/cifar10",
            )
        found[kind] = folder
    return found


def not_by_name(text: str | None) -> InvalidInput:
    """Return the refusal of folders by name, for an item on one set of data."""
    return InvalidInput(
        "data",
        expected="one folder, file or name: this item takes any data",
        got=text,
        remedy="Leave the name and = out.",
    )


def check(found: Dataset, kind: str, given: str) -> None:
    """Refuse data of another set than the item is about.

    Raises:
        InvalidInput: files of another data set, or rows of another shape.
    """
    there = formats.kind_of(Path(given))
    if there not in (None, kind) or found.row_shape != KINDS[kind]:
        raise InvalidInput(
            "data",
            expected=f"{kind}, rows of shape {list(KINDS[kind])}",
            got=f"{given}: {there or 'no data set of these names'}, rows of shape "
            f"{list(found.row_shape)}",
            remedy=f"Name the folder of each data set: --data {kind}=FOLDER,...",
        )
