"""Keep rows with all that they depend on, and show them as a table."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..base.errors import InvalidInput
from ..base.files import file_at, unusable, write_atomically
from . import text
from .environment import SCHEMA
from .measure import Row

COLUMNS = (
    "op and case",
    "backend",
    "threads",
    "ms",
    "fastest torch",
    "torch ms",
    "ratio",
    "GB/s",
    "of limit",
    "guard",
)
TEXT_COLUMNS = ("op and case", "backend", "thr", "ms", "torch ms", "ratio", "limit", "guard")
TEXT_WIDTHS = (22, 9, 3, 9, 8, 6, 6, 10)
STEP_COLUMNS = ("step", "threads", "ms", "ratio", "interval", "guard")
STEP_WIDTHS = (15, 7, 9, 7, 14, 23)
KEY = ("op", "case", "sizes", "dtype", "backend", "isa", "threads", "cache")
"""Fields that two measurements of the same thing share."""


def result(
    environment: dict[str, Any],
    settings: dict[str, Any],
    complete: bool,
    rows: Sequence[Row],
    kind: str = "ops",
) -> dict[str, Any]:
    """Return the contents of a result file; its kind is ``ops``, ``steps`` or ``compare``."""
    return {
        "schema": SCHEMA,
        "kind": kind,
        "complete": complete,
        "environment": environment,
        "settings": settings,
        "rows": list(rows),
    }


def key_of(row: Row) -> str:
    """Return a text that is the same for measurements of the same thing."""
    return json.dumps([row.get(name) for name in KEY], sort_keys=True)


def digest_of(row: Row) -> str:
    """Return a short name for what a row measures."""
    return hashlib.sha256(key_of(row).encode()).hexdigest()[:12]


def is_done(row: Row) -> bool:
    """Whether a row needs no second measurement: it has numbers, of a quiet machine."""
    return "ms" in row and bool(row["quiet"])


SAME = ("commit", "dirty", "torch", "processor", "cores", "build", "devices", "variables")
"""Entries of the environment that all runs of one result share."""


def begun(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Return an unfinished result of the same plan.

    Raises:
        InvalidInput: no result, or one of another plan.
    """
    found = read(path)
    if _plan_of(found["settings"]) != _plan_of(settings):
        raise InvalidInput(
            "resume",
            expected="the options that this result was measured with",
            got=f"others than in {path}",
            remedy="Repeat its options (its field settings lists them), or name a new file.",
        )
    return found


def _plan_of(settings: dict[str, Any]) -> str:
    kept = {name: value for name, value in settings.items() if name != "done"}
    return json.dumps(kept, sort_keys=True)


def check_same_place(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse to put rows of other code, or of another machine, into a result.

    Raises:
        InvalidInput: the environments differ.
    """
    # As the file gives them back: tuples are lists there.
    now = json.loads(json.dumps(now))
    differ = [name for name in SAME if before.get(name) != now.get(name)]
    if differ:
        raise InvalidInput(
            "resume",
            expected="the code and the machine that this result was begun with",
            got=f"another {', '.join(differ)}",
            remedy="Measure all of it anew, into a new file.",
        )


def merged(before: dict[str, Any], new: dict[str, Any], order: Sequence[str]) -> dict[str, Any]:
    """Return a result with the rows of both: new ones replace older ones of the same thing.

    Args:
        order: digests of what the plan selects; the result is complete if all have a row.
    """
    rows = {digest_of(row): row for row in [*before["rows"], *new["rows"]]}
    places = {digest: i for i, digest in enumerate(order)}
    # A reference's row, which no plan selects, stands behind its op's.
    last: dict[str, int] = {}
    for digest, row in rows.items():
        last[row["op"]] = max(last.get(row["op"], -1), places.get(digest, -1))
    ordered = sorted(rows, key=lambda digest: places.get(digest, last[rows[digest]["op"]] + 0.5))
    runs = [*before.get("runs", [_run_of(before)]), _run_of(new)]
    whole = set(order) <= rows.keys()
    return {
        **new,
        "complete": new["complete"] and whole,
        "settings": before["settings"],
        "runs": runs,
        "rows": [rows[digest] for digest in ordered],
    }


def _run_of(content: dict[str, Any]) -> dict[str, Any]:
    place = content["environment"]
    return {"date": place["date"], "load": place["load"], "rows": len(content["rows"])}


def read(path: Path) -> dict[str, Any]:
    """Return the contents of a result file.

    Raises:
        InvalidInput: no such file, other contents, or another version of the layout.
    """
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise unusable("result", path, error, "Name a file that dpkern bench wrote.") from error
    except ValueError as error:
        raise _no_result(path, "no JSON") from error
    version = found.get("schema") if isinstance(found, dict) else None
    if version != SCHEMA or "rows" not in found:
        raise _no_result(path, f"schema {version}")
    return dict(found)


def _no_result(path: Path, got: str) -> InvalidInput:
    return InvalidInput(
        f"result {path}",
        expected=f"a result of dpkern bench with schema {SCHEMA}",
        got=got,
        remedy="Measure again with `dpkern bench --out`.",
    )


def write(path: Path, content: dict[str, Any]) -> None:
    """Write a result as JSON, one row a line, and its table beside it.

    Raises:
        InvalidInput: a selection of rows would overwrite a complete table.
    """
    check_place(path, content["complete"])
    rows = ",\n".join(json.dumps(_rounded(row)) for row in content["rows"])
    head = json.dumps({**content, "rows": []}, indent=1)
    text = head.replace('"rows": []', f'"rows": [\n{rows}\n]') + "\n"
    write_atomically(path, lambda file: file.write(text.encode()), name="out")
    page = markdown(content).encode()
    write_atomically(path.with_suffix(".md"), lambda file: file.write(page), name="out")


def check_place(path: Path, complete: bool) -> None:
    """Make the folder of a result, and refuse a place where it would overwrite something else.

    Raises:
        InvalidInput: a file that is no result, a page without a result, a complete table in the
            place of a selection, a folder, or one that cannot be made.
    """
    file_at("out", path)
    page = path.with_suffix(".md")
    if page == path or (page.exists() and not path.exists()):
        raise InvalidInput(
            "out",
            expected="a file whose table, NAME.md, takes no other file's place",
            got=f"{path}, with its table at {page}",
            remedy="Name another file, such as run.json.",
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unusable("out", path, error, "Name a folder that can be made.") from error
    if path.exists() and read(path)["complete"] and not complete:
        raise InvalidInput(
            "out",
            expected="a new file, or one of another selection",
            got=f"{path}, a table of all cases",
            remedy="Name another file for a part of the cases, or measure all of them.",
        )


def _rounded(value: Any) -> Any:
    """Return the same with six significant digits, far more than a measurement has."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, (list, tuple)) else value


def cells(row: Row) -> list[str]:
    """Return the cells of a row; a row without numbers says why, a disturbed one has no ratio."""
    name = f"{row['op']} {row['case']}" + ("" if row["cache"] == "warm" else f", {row['cache']}")
    name += "".join(f", {size}={value}" for size, value in row.get("changed", {}).items())
    backend = row["backend"] + (f" {row['isa']}" if row["isa"] else "")
    place = [name, backend, str(row["threads"])]
    if "ms" not in row:
        return [*place, without_number(row), *["-"] * (len(COLUMNS) - len(place) - 1)]
    flags = ", ".join(row["guard"]["flags"])
    measured = [
        row["ms"],
        row["torch"],
        row["torch ms"],
        row.get("ratio"),
        row["GB/s"],
        row.get("of limit"),
    ]
    return [*place, *(_cell(value) for value in measured), f"disturbed: {flags}" if flags else "ok"]


REASONS = ("wrong", "no memory", "refused", "absent")
"""Words in the place of a number; the row's field of this name says more."""


def without_number(row: Row) -> str:
    """Return why a row has no number."""
    return next((word for word in REASONS if word in row), "-")


def why_not(
    rows: Sequence[Row], words: Sequence[str] = ("wrong", "no memory", "absent")
) -> list[str]:
    """Return a line for each row that has no number although one was to be expected."""
    return [
        f"{row['op']} {row['case']}, {row['backend']}: {word}: {row[word]}"
        for row in rows
        for word in words
        if word in row
    ]


def step_cells(row: Row) -> list[str]:
    """Return the cells of a row of whole steps."""
    if "ms" not in row:
        return [row["backend"], str(row["threads"]), without_number(row), "-", "-", "-"]
    flags = ", ".join(row["guard"]["flags"])
    interval = row.get("ratio interval")
    return [
        row["backend"],
        str(row["threads"]),
        _cell(row["ms"]),
        _cell(row.get("ratio")),
        "-" if interval is None else f"{interval[0]:.3g} to {interval[1]:.3g}",
        f"disturbed: {flags}" if flags else "ok",
    ]


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def markdown(content: dict[str, Any]) -> str:
    """Return the table that is committed beside a result."""
    if content["kind"] == "steps":
        return "\n".join([*step_head(content), *step_tables(content["rows"], markdown=True)]) + "\n"
    lines = [*head(content), "", *table(content["rows"])]
    why = {row["op"]: row["no torch"] for row in content["rows"] if "no torch" in row}
    if why:
        lines += ["", "Without a formulation in torch:", ""]
        lines += [f"- `{op}`: {reason}." for op, reason in why.items()]
    return "\n".join(lines) + "\n"


def step_head(content: dict[str, Any]) -> list[str]:
    """Return the lines above tables of whole steps."""
    return [
        _where(content),
        "",
        "Whole steps on one batch of generated rows, SGD with momentum, medians of samples that "
        "are taken in turns in one process; `ratio` = step / faster step of torch without privacy, "
        "with its 95 % interval. dpkern's clipped sums and the other libraries' updates were "
        "first compared with per-sample gradients in float64, on a small batch.",
    ]


def step_tables(rows: Sequence[Row], *, markdown: bool) -> list[str]:
    """Return a table for each model and mechanism, and why ways are missing."""
    lines: list[str] = []
    for case in dict.fromkeys(row["case"] for row in rows):
        mine = [row for row in rows if row["case"] == case]
        sizes = mine[0]["sizes"]
        checked = next((row["checked"] for row in mine if "checked" in row), None)
        lines += ["", f"{case}: batch {sizes['B']}, {sizes['parameters']:,} parameters."]
        lines += [f"Checked: {checked}."] if checked else []
        lines += [""]
        if markdown:
            lines += ["| " + " | ".join(STEP_COLUMNS) + " |", "|" + "---|" * len(STEP_COLUMNS)]
            lines += ["| " + " | ".join(step_cells(row)) + " |" for row in mine]
            lines += ["", *(f"* {line}" for line in why_not(mine, REASONS))]
        else:
            cells = [step_cells(row) for row in mine]
            lines += list(text.lines(STEP_COLUMNS, STEP_WIDTHS, cells))
            lines += [part for line in why_not(mine, REASONS) for part in text.wrapped(line)]
    return lines


def head(content: dict[str, Any]) -> list[str]:
    """Return the lines above a table: what was measured where, and how to read it."""
    rows = content["rows"]
    disturbed = sum(not row.get("quiet", True) for row in rows)
    return [
        _where(content),
        "",
        "Medians of samples that are taken in turns in one process; `ratio` = fastest torch "
        "formulation / dpkern; `of limit` = time of a copy (or sum, or product) of as many bytes "
        "(or operations) on as many threads, over dpkern's. Rows whose guard says disturbed have "
        f"no ratio: {disturbed} of {len(rows)}. Samples, intervals and the environment are in the "
        "JSON file.",
    ]


def _where(content: dict[str, Any]) -> str:
    place = content["environment"]
    commit = (place["commit"] or "unknown")[:10] + (", changed" if place["dirty"] else "")
    return (
        f"dpkern {place['dpkern']} (commit {commit}), torch {place['torch']}, "
        f"{place['processor']}, {place['cores']} cores, {place['date']}."
    )


def text_lines(rows: Sequence[Row], *, title: bool = True) -> list[str]:
    """Return a table for a terminal of 80 columns; the rest of a row is in the file."""
    return list(text.lines(TEXT_COLUMNS, TEXT_WIDTHS, [_short(row) for row in rows], title=title))


def _short(row: Row) -> list[str]:
    name, backend, threads, ms, _, other, ratio, _, limit, flags = cells(row)
    return [name, backend, threads, ms, other, ratio, limit, flags]


def table(rows: Sequence[Row]) -> list[str]:
    """Return a table of Markdown."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    return lines + ["| " + " | ".join(cells(row)) + " |" for row in rows]
