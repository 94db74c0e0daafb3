"""The keywords of ``make_private``, as type checkers, ``help`` and the engine know them."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import dpkern
from dpkern import PrivacyEngine
from dpkern.engine import arguments, keywords
from dpkern.engine.arguments import MakePrivateOptions
from dpkern.engine.keywords import MakePrivateKeywords

NAMED = {"grad_sample_mode", "criterion"}
"""The options that decide what is returned: the overloads name them."""


def test_keywords_are_the_options() -> None:
    declared = typing.get_type_hints(MakePrivateOptions, vars(arguments))
    shown = typing.get_type_hints(MakePrivateKeywords, vars(keywords))
    assert shown == {name: kind for name, kind in declared.items() if name not in NAMED}


@pytest.mark.parametrize("name", ["make_private", "make_private_with_epsilon"])
def test_signatures_show_every_option_with_its_default(name: str) -> None:
    parameters = inspect.signature(getattr(PrivacyEngine, name)).parameters
    assert not any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for option in dataclasses.fields(MakePrivateOptions):
        assert parameters[option.name].default == option.default


TYPED = """
import torch
from torch import nn
from torch.utils.data import DataLoader
from typing import Any, assert_type
from dpkern import PrivacyEngine
from dpkern.engine import PrivateLoader

class Net(nn.Module): ...

def train(net: Net, adam: torch.optim.Adam, data: DataLoader[Any]) -> None:
    engine = PrivacyEngine()
    made = engine.make_private(module=net, optimizer=adam, data_loader=data, clipping="flat")
    assert_type(made, tuple[Net, torch.optim.Adam, PrivateLoader])
    alone = engine.make_private(module=net, optimizer=adam, data_loader=None, sample_rate=0.1)
    assert_type(alone, tuple[Net, torch.optim.Adam, None])
    loss = nn.MSELoss()
    ghost = engine.make_private_with_epsilon(
        module=net, optimizer=adam, data_loader=data, target_epsilon=1, target_delta=1e-6,
        epochs=1, max_grad_norm=1.0, grad_sample_mode="ghost", criterion=loss,
    )
    assert_type(ghost, tuple[Net, torch.optim.Adam, nn.MSELoss, PrivateLoader])
"""
MISSPELT = 'PrivacyEngine().make_private(module=n, optimizer=o, data_loader=None, cliping="flat")'


@pytest.mark.slow
def test_a_type_checker_knows_results_and_finds_misspelt_options(tmp_path: Path) -> None:
    wrong = (
        "import torch\nfrom dpkern import PrivacyEngine\n"
        f"def f(n: torch.nn.Linear, o: torch.optim.SGD) -> None:\n    {MISSPELT}\n"
    )
    (tmp_path / "right.py").write_text(TYPED)
    (tmp_path / "wrong.py").write_text(wrong)
    root = Path(dpkern.__file__).parents[1]
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent"]
    done = subprocess.run(
        [*command, f"--cache-dir={root / '.mypy_cache'}", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=root,
    )
    errors = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert errors, done.stdout
    assert all("wrong.py" in line for line in errors), done.stdout
    assert 'did you mean "clipping"?' in done.stdout


def test_the_package_lists_its_names() -> None:
    names = dir(dpkern)
    assert {"PrivacyEngine", "explain", "fix", "survey", "audit", "losses"} <= set(names)
    for name in ("PrivacyEngine", "explain", "fix", "survey", "engine", "noise_tables"):
        assert getattr(dpkern, name) is not None
