"""The page of all commands: it is that of the commands themselves, and imports none of them."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from importlib import import_module

import pytest

from dpkern.cli import COMMANDS, load, main
from dpkern.commands.help_pages import ALL, COMMON, EXAMPLES


@pytest.mark.parametrize("name", COMMANDS)
def test_lines_are_those_of_the_commands(name: str) -> None:
    command = load(name)
    assert command.name == name
    first = inspect.cleandoc(command.help or "").split("\n\n")[0]
    assert " ".join(first.split()) == COMMANDS[name][1]


def test_the_page_imports_no_command() -> None:
    code = (
        "import json, sys\nfrom dpkern.cli import main\n"
        "print(main(['--help']), json.dumps(sorted(sys.modules)), sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *page, returned, modules = done.stdout.splitlines()
    assert returned == "0"
    for name in COMMANDS:
        assert any(f" {name} " in line for line in page)
    loaded = set(json.loads(modules))
    heavy = {"triton", "scipy", "numba", "matplotlib", "dp_accounting", "sklearn"}
    commands = {import_module(module, "dpkern").__name__ for module, _ in COMMANDS.values()}
    assert not loaded & (heavy | commands)


PATHS = sorted(EXAMPLES)


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main(list(arguments))
    return capsys.readouterr().out


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")


def test_every_command_and_subcommand_has_examples() -> None:
    found = []
    for name in COMMANDS:
        found += [name, *(f"{name} {below}" for below in getattr(load(name), "commands", {}))]
    assert sorted(found) == PATHS


def test_a_command_without_examples_still_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(EXAMPLES, "cost table")
    assert main(["cost", "table"]) == 0
    assert main(["cost", "model", "--help"]) == 0


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.usefixtures("narrow")
def test_help_fits_one_screen_and_all_options_are_a_flag_away(
    capsys: pytest.CaptureFixture[str], path: str
) -> None:
    page = shown(capsys, *path.split(), "--help").splitlines()
    assert len(page) <= 50
    assert max(map(len, page)) <= 80
    assert any("Examples:" in line for line in page)
    everything = shown(capsys, *path.split(), ALL)
    assert (len(everything.splitlines()) > len(page)) == (path in COMMON)


@pytest.mark.parametrize("path", sorted(COMMON))
def test_common_options_are_options(path: str) -> None:
    name, _, below = path.partition(" ")
    command = load(name)
    command = command.commands[below] if below else command
    assert COMMON[path] < {parameter.name for parameter in command.params}


@pytest.mark.parametrize("line", [line for path in PATHS for line in EXAMPLES[path]])
def test_examples_are_understood(line: str) -> None:
    name, *rest = line.split()
    command = load(name)
    if rest and rest[0] in getattr(command, "commands", {}):
        command, rest = command.commands[rest[0]], rest[1:]
    command.make_context(name, rest)
