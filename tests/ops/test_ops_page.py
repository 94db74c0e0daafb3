"""The table of ops and backends in the docs says what is registered."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from dpkern.base import dispatch
from dpkern.ops import testing
from tests.ops.backends.every_backend import EMULATED, running

PAGE = Path(__file__).parents[2] / "docs" / "ops.md"


def claimed() -> dict[str, dict[str, bool]]:
    """Return the backends of each op whose cell says more than "-"."""
    lines = iter(PAGE.read_text().splitlines())
    header = next(line for line in lines if line.startswith("| op |"))
    backends = [cell.strip("` ") for cell in header.strip("|").split("|")][2:]
    table = {}
    for line in lines:
        if not line.startswith("|"):
            break
        if line.startswith("|--"):
            continue
        names, _, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        stem = names.strip("`").split(".")[0]
        for name in names.split(", "):
            full = f"{stem}.{name.strip('`').split('.')[-1]}"
            has = [cell != "-" for cell in cells]
            table[full] = dict(zip(backends, has, strict=True))
    return table


def test_every_op_has_a_row() -> None:
    table = claimed()
    assert sorted(table) == sorted(dispatch.OPS)
    backends = {name for name in dispatch.BACKENDS if name != "reference"}
    assert all(set(row) == backends for row in table.values())


@pytest.mark.parametrize("name", [n for n in dispatch.BACKENDS if n != "reference"])
def test_the_table_is_what_is_registered(name: str) -> None:
    available, reason = dispatch.availability(name)
    if not available and (name not in EMULATED or isinstance(testing.emulation(name), str)):
        pytest.skip(f"{name} {reason}")
    with running(name) if name in EMULATED else nullcontext():
        registered = {op: name in current.kernels for op, current in dispatch.OPS.items()}
    assert registered == {op: row[name] for op, row in claimed().items()}
