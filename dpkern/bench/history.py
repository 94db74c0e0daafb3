"""Follow the times of a case through results of different commits, and find tables that are old."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..base.files import unusable
from . import text
from .environment import SCHEMA
from .measure import Row
from .paired import FASTER, MARGIN, SAME, SLOWER, UNCLEAR
from .results import key_of, read
from .revision import SOURCE, git

OTHER_MACHINE = "other machine"
"""The verdict on a time whose predecessor another processor took."""
KERNELS = ("csrc", "dpkern/ops")
"""Paths whose changes make a table old."""
WIDTHS = (14, 10, 10, 7, 35)


def committed(path: Path, source: Path = SOURCE) -> list[dict[str, Any]]:
    """Return every committed version of a result file, oldest first; other layouts are left out.

    There are none of a file outside of the repository.
    """
    if not path.resolve().is_relative_to(source.resolve()):
        return []
    name = str(path.resolve().relative_to(source.resolve()))
    found = []
    for commit in reversed((git(source, "log", "--format=%H", "--", name) or "").split()):
        written = git(source, "show", f"{commit}:{name}")
        content = json.loads(written) if written else None
        if isinstance(content, dict) and content.get("schema") == SCHEMA:
            found.append(content)
    return found


def results_of(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the results in files by their dates, oldest first.

    Raises:
        InvalidInput: a file that is none.
    """
    return sorted((read(path) for path in paths), key=lambda found: found["environment"]["date"])


def changes(old: Row, new: Row) -> tuple[float, str]:
    """Return the ratio of two rows' medians and a verdict on the new one.

    Different runs share no rounds, so that only intervals that lie apart show a difference.
    """
    ratio = new["ms"] / old["ms"]
    (low, high), (new_low, new_high) = old["ms interval"], new["ms interval"]
    if not (old["quiet"] and new["quiet"]):
        return ratio, UNCLEAR
    if new_low > high * (1 + MARGIN):
        return ratio, SLOWER
    if new_high < low / (1 + MARGIN):
        return ratio, FASTER
    close = new_high <= low * (1 + MARGIN) and new_low >= high / (1 + MARGIN)
    return ratio, SAME if close else UNCLEAR


def followed(found: Sequence[dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield each case with its times in every result that has it: commit, date, ms, change."""
    by_key: dict[str, list[tuple[dict[str, Any], Row]]] = {}
    for content in found:
        for row in content["rows"]:
            if "ms" in row:
                by_key.setdefault(key_of(row), []).append((content["environment"], row))
    for entries in by_key.values():
        first = entries[0][1]
        name = f"{first['op']} {first['case']}, {first['backend']}, threads: {first['threads']}"
        times: list[dict[str, Any]] = []
        for i, (place, row) in enumerate(entries):
            entry = {"date": place["date"], "commit": place["commit"], "ms": row["ms"]}
            if i and _machine(entries[i - 1][0]) != _machine(place):
                entry["verdict"] = OTHER_MACHINE
            elif i:
                entry["ratio"], entry["verdict"] = changes(entries[i - 1][1], row)
            times.append(entry)
        yield name, times


def _machine(place: dict[str, Any]) -> tuple[Any, ...]:
    """Return what two times must share to be compared: processor, cores and devices."""
    devices = [device["name"] for device in place["devices"]]
    return place["processor"], place["cores"], devices


def measured_at(path: Path, source: Path = SOURCE) -> str | None:
    """Return the commit that a table of times was measured at; None where this is not known.

    A table that does not say so, as those of ``python -m benchmarks`` before they did, is as old as
    the commit that wrote it last, at least.

    Raises:
        InvalidInput: no such file, or no table.
    """
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise unusable("result", path, error, "Name a table of times.") from error
    except ValueError:
        content = None
    if not isinstance(content, dict):
        content = read(path)  # says what is wrong with it
    place = content.get("environment") or content.get("machine")
    if isinstance(place, dict) and "commit" in place:
        commit = place["commit"]
        return None if commit is None else str(commit)
    if not path.resolve().is_relative_to(source.resolve()):
        return None
    name = str(path.resolve().relative_to(source.resolve()))
    return git(source, "log", "-1", "--format=%H", "--", name) or None


def commits_since(commit: str | None, source: Path = SOURCE) -> list[str] | None:
    """Return the commits that changed kernels after another one; None where unknown."""
    if not commit:
        return None
    found = git(source, "log", "--format=%h %s", f"{commit}..HEAD", "--", *KERNELS)
    return None if found is None else found.splitlines()


def lines(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a table of 80 columns for each case; ``over`` is the ratio to the time before."""
    for name, times in followed(found):
        yield from text.wrapped(name)
        cells = [
            [
                f"  {entry['date'][:10]}",
                (entry["commit"] or "unknown")[:10],
                f"{entry['ms']:.3g}",
                f"{entry['ratio']:.3f}" if "ratio" in entry else "-",
                entry.get("verdict", "-"),
            ]
            for entry in times
        ]
        yield from text.lines(("  date", "commit", "ms", "over", "verdict"), WIDTHS, cells)
        yield ""
