"""Help that fits one screen: examples for every command, and the rarer options on request.

``dpkern COMMAND --help`` shows the options of ``COMMON`` where a command has many, and examples;
``--help-all`` shows every option. All options work either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

ALL = "--help-all"
"""The option that shows everything."""

COMMON: dict[str, frozenset[str]] = {
    "train": frozenset(
        "data label epsilon delta max_grad_norm epochs batch_size lr ranges out".split()
    ),
    "privacy": frozenset(
        "sample_rate steps noise_multiplier epsilon delta sampling dataset_size mechanism mode "
        "json".split()
    ),
    "audit": frozenset("subject claim delta runs quick json html".split()),
    "reproduce": frozenset("paper item quick data out resume".split()),
    "cost count": frozenset(
        "mechanism n l processor noise layer mode format out figures tables".split()
    ),
    "cost compare": frozenset("mechanisms n l processor noise format out".split()),
    "cost frontier": frozenset("mechanisms epsilon seeds data model out format tables".split()),
    "bench": frozenset("op backend size shape dtype threads quick seconds out json".split()),
}
"""Parameters on the page of a command that has too many for one screen."""

EXAMPLES: dict[str, tuple[str, ...]] = {
    "train": (
        "train --epsilon 3",
        "train --data mine.csv --label kind --ranges ranges.toml --epsilon 3",
        "train --resume --out runs/mine",
    ),
    "privacy": (
        "privacy --sample-rate 0.01 --steps 1000 --epsilon 2",
        "privacy --sample-rate 0.01 --steps 1000 --noise-multiplier 1.1",
    ),
    "audit": (
        "audit dpsgd --html audit.html",
        "audit my_release.py:release --claim 2 --delta 1e-5",
    ),
    "reproduce": ("reproduce spof fig3 --quick",),
    "check": ("check lenet5", "check mine.py:make_model"),
    "info": ("info", "info --json"),
    "cost": ("cost count --mechanism dpsgd", "cost model mlp --batch-size 64"),
    "cost count": ("cost count --mechanism spof -n 14 -l 7",),
    "cost compare": ("cost compare --mechanisms spof,dpsgd-da -n 14 -l 7 --processor k7",),
    "cost frontier": ("cost frontier", "cost frontier --mechanisms dpsgd,adaclip --epsilon 1,3"),
    "cost model": ("cost model gredp-resnet18 --batch-size 8 --format html",),
    "cost predict": ("cost predict gpt2-small --processor h100 --batch 16..64",),
    "cost table": ("cost table cdt --word-bits 32",),
    "bench": ("bench --quick", "bench --op ghost,clip_sum --threads 1,2"),
    "bench compare": ("bench compare v0.1.0 . --op linear_norm",),
    "bench sweep": ("bench sweep linear_norm --axis B --values 16,32,64",),
    "bench history": ("bench history --stale benchmarks/results/ops.json",),
}
"""Command lines by command, without the first word."""


def prepare(command: Any, path: str, arguments: Sequence[str]) -> list[str]:
    """Give a command and its subcommands their pages, and return the arguments for them.

    Args:
        command: the command, which is changed.
        path: its name, after that of its group.
        arguments: those on the command line; ``--help-all`` becomes ``--help`` that hides nothing.
    """
    everything = ALL in arguments
    below = getattr(command, "commands", {})
    for name, subcommand in below.items():
        prepare(subcommand, f"{path} {name}", arguments)
    rare = [
        parameter
        for parameter in command.params
        if path in COMMON and parameter.name not in COMMON[path]
    ]
    # One without examples still runs: the tests say that it lacks them.
    lines = ["Examples:", *(f"  dpkern {line}" for line in EXAMPLES.get(path, ()))]
    if rare and not everything:
        for parameter in rare:
            parameter.hidden = True
        lines.append(f"{len(rare)} more options: dpkern {path} {ALL}")
    command.epilog = "\n\n".join(lines)
    return ["--help" if argument == ALL else argument for argument in arguments]


__all__ = ["ALL", "COMMON", "EXAMPLES", "prepare"]
