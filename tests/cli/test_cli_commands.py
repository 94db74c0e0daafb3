"""The page of all commands: it is that of the commands themselves, and imports none of them."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from importlib import import_module

import pytest

from dpkern.cli import COMMANDS, load


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
