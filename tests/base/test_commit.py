"""The commit of reports: of the checkout, of the build, or unknown."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from dpkern.base import commit as made_from
from dpkern.base.version import __version__


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    made_from.commit.cache_clear()
    yield
    made_from.commit.cache_clear()


def git(folder: Path, *arguments: str) -> str:
    given = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(given, cwd=folder, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package folder of our own, in no checkout and without a record."""
    folder = tmp_path / "dpkern"
    (folder / "base").mkdir(parents=True)
    (folder / "file").write_text("1")
    monkeypatch.setattr(made_from, "PACKAGE", folder)
    monkeypatch.setattr(made_from, "BUILT", folder / "base" / "commit.txt")
    recorded = SimpleNamespace(read_text=lambda name: None)
    monkeypatch.setattr(made_from.metadata, "distribution", lambda name: recorded)
    return folder


def test_a_checkout_names_its_commit_and_whether_files_differ(package: Path) -> None:
    git(package.parent, "init", "-q")
    git(package.parent, "add", ".")
    git(package.parent, "commit", "-qm", "one")
    head = git(package.parent, "rev-parse", "HEAD").strip()
    assert made_from.commit() == head
    assert made_from.version_with_commit() == f"{__version__}, commit {head}"
    (package / "file").write_text("2")
    made_from.commit.cache_clear()
    assert made_from.commit() == f"{head}-dirty"


def test_a_built_package_names_what_the_build_wrote(package: Path) -> None:
    made_from.BUILT.write_text("abc\n")
    assert made_from.commit() == "abc"


def test_an_installation_from_a_repository_names_what_pip_recorded(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = '{"url": "x", "vcs_info": {"vcs": "git", "commit_id": "def"}}'
    recorded = SimpleNamespace(read_text=lambda name: text)
    monkeypatch.setattr(made_from.metadata, "distribution", lambda name: recorded)
    assert made_from.commit() == "def"


def test_an_unknown_commit_is_none(package: Path) -> None:
    assert made_from.commit() is None
    assert made_from.version_with_commit() == __version__
