"""The list of the longest test files names files that are there, in their order."""

from __future__ import annotations

from pathlib import Path

from tests.longest import LONGEST

ROOT = Path(__file__).parents[1]


def test_the_longest_files_are_there_and_in_order() -> None:
    assert not [path for path in LONGEST if not (ROOT / path).is_file()]
    assert list(LONGEST.values()) == sorted(LONGEST.values(), reverse=True)
