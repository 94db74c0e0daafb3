"""Sweep training loops that people write: is each of them right, or refused, in dpkern and Opacus?

    pip install -r benchmarks/clients/requirements.txt
    python -m benchmarks.clients.loops [part of a name ...]

A loop runs twice, without noise and on all records at once, the second time with one record
replaced by an outlier. ``right`` means that it trains, that its first release moves by at most
twice the clipping bound (the sensitivity to one replaced record), and that as many releases are
accounted as there were. A loop that no certificate can describe has to be refused. ``WRONG`` and
``crash`` must not happen. Each row goes to ``benchmarks/results/loops``.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import chdir
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from .catalogue import import_torchvision
from .time_limit import time_limit

RESULTS = Path(__file__).parent.parent / "results" / "loops"
RECORDS, BOUND, LR = 16, 0.5, 1.0
SLACK = 1.02
"""Rounding of half precision, over twice the bound."""
SECONDS = 120
PEERS = ("dpkern", "opacus")


class NotOffered(Exception):
    """The library has nothing for this framework."""


class World:
    """A data set, and a library that makes a loop over it private."""

    def __init__(self, peer: str, data: TensorDataset) -> None:
        self.peer, self.data = peer, data
        self.engine: Any = None
        self.module: Any = None
        self.before = torch.empty(0)
        self.released = 1

    def loader(self, **options: Any) -> DataLoader[Any]:
        """The user's own loader: one batch of all records."""
        return DataLoader(self.data, **{"batch_size": RECORDS, **options})

    def watch(self, module: nn.Module) -> nn.Module:
        """Remember the weights before the first step."""
        self.module, self.before = module, weights(module)
        return module

    def private(
        self, module: nn.Module, optimizer: Any = None, loader: Any = None, **options: Any
    ) -> Any:
        """``make_private`` of the library, without noise."""
        self.watch(module)
        trained = [p for p in module.parameters() if p.requires_grad]
        return self.make_engine().make_private(
            module=module,
            optimizer=optimizer or torch.optim.SGD(trained, lr=LR),
            data_loader=self.loader() if loader is None else loader,
            noise_multiplier=0.0,
            max_grad_norm=options.pop("max_grad_norm", BOUND),
            **options,
        )

    def make_engine(self) -> Any:
        if self.peer == "dpkern":
            from dpkern import PrivacyEngine
        else:
            from opacus import PrivacyEngine
        self.engine = PrivacyEngine()
        return self.engine

    def ours(self) -> Any:
        """What the frameworks take, in dpkern alone."""
        if self.peer != "dpkern":
            raise NotOffered
        from dpkern.integrations import PrivacyArguments

        return PrivacyArguments(noise_multiplier=0.0, max_grad_norm=BOUND)

    def parts(self, loader: Any, optimizer: Any) -> Any:
        """Physical batches of four."""
        if self.peer == "dpkern":
            from dpkern.compat.opacus.utils.batch_memory_manager import BatchMemoryManager
        else:
            from opacus.utils.batch_memory_manager import BatchMemoryManager
        return BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=4, optimizer=optimizer
        )

    def accounted(self) -> int:
        if self.peer == "dpkern":
            return int(self.engine.step.steps)
        return sum(steps for *_, steps in self.engine.accountant.history)


def weights(module: Any) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        return torch.cat([p.detach().flatten().float().clone() for p in module.parameters()])


@dataclasses.dataclass
class Row:
    """What happened to one loop."""

    peer: str
    name: str
    private: bool
    verdict: str
    says: str = ""


def records(*, outlier: bool) -> TensorDataset:
    """The data set, or its neighbour."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(RECORDS, 6, generator=generator)
    y = torch.randint(3, (RECORDS,), generator=generator)
    if outlier:
        x[3], y[3] = 30 * x[3].flip(0) + 5, (y[3] + 1) % 3
    return TensorDataset(x, y)


def judge(loop: Callable[[World], Any], peer: str, *, private: bool) -> Row:
    """Run a loop on both data sets."""
    row = Row(peer, loop.__name__.replace("_", " "), private, "crash")
    found = []
    for outlier in (False, True):
        torch.manual_seed(0)
        world = World(peer, records(outlier=outlier))
        try:
            loop(world)
        except NotOffered:
            return dataclasses.replace(row, verdict="not offered")
        except Exception as error:  # noqa: BLE001 - told apart by is_refusal
            verdict = "refused" if is_refusal(error, peer) else "crash"
            return dataclasses.replace(row, verdict=verdict, says=_short(error))
        found.append((world, (weights(world.module) - world.before) * RECORDS / LR))
    if not private:
        return dataclasses.replace(row, verdict="WRONG", says="trains under a certificate")
    (world, one), (_, other) = found
    moved = float((one - other).norm()) / BOUND
    if float(one.norm()) == 0:
        return dataclasses.replace(row, verdict="WRONG", says="trains nothing")
    if not moved <= 2 * SLACK:
        says = f"one record moves the release by {moved:.1f} bounds"
        return dataclasses.replace(row, verdict="WRONG", says=says)
    if world.accounted() != world.released:
        says = f"{world.accounted()} releases accounted, {world.released} made"
        return dataclasses.replace(row, verdict="WRONG", says=says)
    return dataclasses.replace(row, verdict="right", says=f"{moved:.2f} bounds")


def is_refusal(error: Exception, peer: str) -> bool:
    """Whether the library itself says no."""
    if peer == "dpkern":
        from dpkern.base.errors import DPKernError

        return isinstance(error, DPKernError)
    frames = traceback.extract_tb(error.__traceback__)
    return "/opacus/" in frames[-1].filename


def _short(error: BaseException) -> str:
    said = f"{type(error).__name__}: {error}".replace(f"{Path(__file__).parents[2]}/", "")
    return " ".join(said.split())[:300]


def main(names: Sequence[str]) -> None:
    from .loop_catalogue import LOOPS

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    import_torchvision()
    rows = []
    for loop, private in LOOPS:
        if names and not any(name in loop.__name__ for name in names):
            continue
        for peer in PEERS:
            with tempfile.TemporaryDirectory() as folder, chdir(folder), time_limit(SECONDS):
                row = judge(loop, peer, private=private)
            print(f"{peer:7s} {row.name:45s} {row.verdict}: {row.says}", flush=True)
            rows.append(row)
    if not names:
        write(rows)


def write(rows: Sequence[Row]) -> None:
    versions = {name: metadata.version(name) for name in ("torch", "opacus", "transformers")}
    versions |= {name: metadata.version(name) for name in ("accelerate", "lightning", "peft")}
    data = {"versions": versions, "rows": [dataclasses.asdict(row) for row in rows]}
    RESULTS.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
    RESULTS.with_suffix(".md").write_text(page(rows, versions))


def page(rows: Sequence[Row], versions: Mapping[str, str]) -> str:
    """The results as Markdown."""
    verdicts = [
        v
        for v in ("right", "refused", "not offered", "WRONG", "crash")
        if any(r.verdict == v for r in rows)
    ]
    counts = Counter((row.peer, row.private, row.verdict) for row in rows)
    lines = [
        "# Training loops",
        "",
        "Loops as people write them, with dpkern and with Opacus. *Right*: one replaced record",
        "moves the first release by at most two clipping bounds (the figure), and as many releases",
        "are accounted as were made. `python -m benchmarks.clients.loops` makes this page with",
        ", ".join(f"{name} {version}" for name, version in versions.items()) + ".",
        "",
        "| loops | library | " + " | ".join(verdicts) + " |",
        "|---|---|" + "---|" * len(verdicts),
    ]
    for private, kind in ((True, "that can be private"), (False, "that must be refused")):
        for peer in PEERS:
            numbers = " | ".join(str(counts[peer, private, v]) for v in verdicts)
            lines.append(f"| {kind} | {peer} | {numbers} |")
    lines += ["", "| loop | dpkern | opacus |", "|---|---|---|"]
    told: dict[tuple[str, bool], dict[str, str]] = {}
    for row in rows:
        says = row.says[:160].replace("|", "\\|")
        cell = f"{row.verdict}: {says}" if says else row.verdict
        told.setdefault((row.name, row.private), {})[row.peer] = cell
    for (name, private), cells in told.items():
        must = "" if private else " (must be refused)"
        lines.append(f"| {name}{must} | " + " | ".join(cells[peer] for peer in PEERS) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(sys.argv[1:])
