"""Files of users are imported as they stand, also right after an edit."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from dpkern.base.script_file import spec_of


def value(path: Path) -> float:
    spec = spec_of(path, "edited")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return float(module.VALUE)


def test_an_edit_of_the_same_size_and_second_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = tmp_path / "edited.py"
    for number in ("2.0", "0.5"):
        path.write_text(f"VALUE = {number}\n")
        os.utime(path, (1_000_000_000, 1_000_000_000))
        assert value(path) == float(number)


@pytest.mark.parametrize("name", ["none.py", "data.txt"])
def test_no_python_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "data.txt").write_text("VALUE = 1\n")
    assert spec_of(tmp_path / name, "edited") is None
