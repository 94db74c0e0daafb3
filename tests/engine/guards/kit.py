"""What a loop is: written as a user would write it, run on neighbouring data, and judged.

A loop runs without noise and with learning rate 0, so that every step starts from the same
parameters. It runs with the target record in the batches and without it, for several hostile
values of that record; the other records and all random states are the same. The largest change of
a step's clipped sum, in units of the clipping bound C, is its *movement*. A second record, which no
batch holds, must move nothing, unless the certificate says that all records are in all steps. A
step without the target must not remember it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import dpkern
from dpkern.base.errors import DPKernError
from tests.engine.guards.records import DRAWS, ROWS, TARGET, Kind, data

BOUND = 0.1
"""C, below most gradients' norms: what turns them shows."""

WIDE = (BOUND, 1.0)
"""Bounds; below larger ones what scales gradients shows, too."""

SLACK = 1e-4
"""Relative rounding that a movement may show."""


class World:
    """One run of a loop: its data, and what was released.

    Args:
        kind: of records.
        target: hostile value of the target; None: the usual one.
        present: whether batches hold the target.
        outside: hostile value of the record that no batch holds.
        bound: C.
    """

    def __init__(
        self,
        kind: Kind,
        *,
        target: int | None = None,
        present: bool = True,
        outside: int | None = None,
        bound: float = BOUND,
    ) -> None:
        self.bound = bound
        self.data = data(kind, target=target, outside=outside)
        self.present = present
        self.sums: list[Tensor] = []
        """The clipped sum of every released step."""
        self.released: dict[str, Tensor] = {}
        """What the loop hands out besides the module's state."""
        self.saved: dict[str, Tensor] = {}
        """The state of the module at the end, and ``released``."""
        self.engine = dpkern.PrivacyEngine()
        self.module: nn.Module = nn.Identity()
        self.error: Exception | None = None
        """What ended the run."""
        self.draws: Sequence[Sequence[int]] = DRAWS
        """The positions drawn for every step, if the target were present."""
        self.owner: dict[int, int] = {}
        """Position in the data set -> record, where they differ."""

    def loader(self, records: Dataset[Any] | None = None, **options: Any) -> DataLoader[Any]:
        """The user's own loader, before it is private."""
        given = {"batch_size": 4, "shuffle": True} | options
        return DataLoader(self.data if records is None else records, **given)

    def private(
        self,
        module: nn.Module,
        *,
        loader: DataLoader[Any] | None = None,
        optimizer: Any = None,
        draws: Sequence[Sequence[int]] = DRAWS,
        **options: Any,
    ) -> Any:
        """Call ``make_private``; the loader that comes back draws ``draws``."""
        given = {"noise_multiplier": 0.0, "max_grad_norm": self.bound} | options
        own_loader = given.pop("data_loader", self.loader() if loader is None else loader)
        made = self.engine.make_private(
            module=module,
            optimizer=optimizer or torch.optim.SGD(module.parameters(), lr=0.0),
            data_loader=own_loader,
            **given,
        )
        self.module = module
        self.engine.step._reduce = self._keep  # where the ranks of a job would add theirs up
        if made[-1] is not None:
            self.draw(made[-1], draws)
        return made

    def draw(self, loader: Any, draws: Sequence[Sequence[int]]) -> None:
        """Let a private loader draw these positions, without the target where it is absent."""
        self.draws = draws
        turns = [torch.tensor(batch, dtype=torch.int64) for batch in self.drawn()]
        loader.batches._draw = lambda step: turns[step % len(turns)]

    def drawn(self) -> list[list[int]]:
        """The positions in every batch."""
        return [
            [p for p in batch if self.present or self.owner.get(p, p) != TARGET]
            for batch in self.draws
        ]

    def holds(self, step: int) -> bool:
        """Whether the target belongs to a step's batch."""
        batch = self.draws[step % len(self.draws)]
        return any(self.owner.get(p, p) == TARGET for p in batch)

    def batches(self) -> list[Any]:
        """Batches of a loop that has no loader of the engine's."""
        collate = torch.utils.data.default_collate
        return [collate([self.data[i] for i in batch]) for batch in self.drawn()]

    def _keep(self, sums: list[Tensor]) -> None:
        units = self.engine.step.plan.units
        each = [
            total.detach().double().flatten() * (1.0 if unit is None else unit)
            for total, unit in zip(sums, units, strict=True)
        ]
        self.sums.append(torch.cat(each))

    @property
    def certified_for_all(self) -> bool:
        """Whether the certificate takes every record to be in every step."""
        return all(rate == 1.0 for _, rate, _ in self.engine.accountant.history)

    def save(self) -> None:
        """Take what leaves the run without noise, as users save it; learning rates are 0."""
        found = {k: v for k, v in self.module.state_dict().items() if isinstance(v, Tensor)}
        found |= {f"released {k}": v for k, v in self.released.items()}
        self.saved = {k: v.detach().clone() for k, v in found.items()}


@dataclass(frozen=True)
class Refused:
    """One typed error; ``says`` is a part of its text, ``after`` the steps released before it."""

    error: type[DPKernError]
    says: str
    after: int = 0


@dataclass(frozen=True)
class Loop:
    """A loop and what must happen to it.

    Args:
        family: its class of constructs.
        name: for messages.
        run: the loop.
        expected: ``right``, or the error.
        kind: of its records.
        bounds: values of C to try.
        random: draws random numbers per row, so that a record's absence shifts those of others:
            the target is replaced instead of removed, which moves at most 2 C.
        slack: relative rounding that a movement may show.
    """

    family: str
    name: str
    run: Callable[[World], Any]
    expected: str | Refused = "right"
    kind: Kind = ROWS
    bounds: tuple[float, ...] = (BOUND,)
    random: bool = False
    slack: float = SLACK


@dataclass
class Verdict:
    """What a loop did.

    Attributes:
        slack: as the loop's.
        moved: largest movement of a step with the target, in C.
        strayed: largest movement by a record that the batch does not hold, in C.
        leaked: names of states that depend on a record and carry no noise.
        steps: released steps.
        error: what refused it.
    """

    slack: float = SLACK
    moved: float = 0.0
    strayed: float = 0.0
    leaked: set[str] = field(default_factory=set)
    steps: int = 0
    error: Exception | None = None

    def right(self) -> bool:
        """Whether everything that was released is covered by the certificate."""
        return self.moved <= 1 + self.slack and self.strayed <= self.slack and not self.leaked


def run(loop: Loop, **options: Any) -> World:
    """One run, with the same random state as every other one."""
    world = World(loop.kind, **options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        random.seed(0)
        try:
            loop.run(world)
            world.save()
        except Exception as error:  # noqa: BLE001 (the verdict says whether it is a typed one)
            world.error = error
    return world


def judge(loop: Loop) -> Verdict:
    """Run a loop on all neighbours and say how far a record moves what it releases."""
    verdict = Verdict(loop.slack)
    for bound in loop.bounds:
        usual = run(loop, bound=bound)
        verdict.error, verdict.steps = usual.error, len(usual.sums)
        start, unit = (usual, 2.0) if loop.random else (run(loop, bound=bound, present=False), 1.0)
        for number in range(len(loop.kind.hostile)):
            hostile = run(loop, bound=bound, target=number)
            _compare(verdict, start, hostile, unit, holding=True)
        _compare(verdict, start, usual, unit, holding=True)
        for number in range(min(2, len(loop.kind.hostile))):
            stranger = run(loop, bound=bound, outside=number)
            _compare(verdict, usual, stranger, unit, holding=False)
    return verdict


def _compare(verdict: Verdict, one: World, other: World, unit: float, *, holding: bool) -> None:
    for step, (a, b) in enumerate(zip(one.sums, other.sums, strict=False)):
        moved = float((a - b).norm()) / one.bound
        moved = moved if math.isfinite(moved) else math.inf
        if one.certified_for_all or (holding and one.holds(step)):
            verdict.moved = max(verdict.moved, moved / (unit if holding else 2))
        else:
            verdict.strayed = max(verdict.strayed, moved)
    verdict.error = verdict.error or other.error
    if one.error is not None or other.error is not None:
        return
    if len(one.sums) != len(other.sums):
        verdict.strayed = math.inf  # how many steps there are depends on a record
    before, after = one.saved, other.saved
    for name in before.keys() | after.keys():
        same = name in before and name in after and before[name].shape == after[name].shape
        if not same or not torch.allclose(
            before[name].double(), after[name].double(), rtol=1e-5, atol=1e-7, equal_nan=True
        ):
            verdict.leaked.add(name)


class Table:
    """Collects the loops of one class.

    ``@table.right()`` and ``@table.refused(error, says)`` stand above a loop; its name is the
    function's.
    """

    def __init__(self, family: str, **options: Any) -> None:
        self.family = family
        self.options = options
        self.loops: list[Loop] = []

    def right(self, **options: Any) -> Callable[[Callable[[World], Any]], Callable[[World], Any]]:
        return self._add("right", options)

    def refused(
        self, error: type[DPKernError], says: str, *, after: int = 0, **options: Any
    ) -> Callable[[Callable[[World], Any]], Callable[[World], Any]]:
        return self._add(Refused(error, says, after), options)

    def _add(
        self, expected: str | Refused, options: dict[str, Any]
    ) -> Callable[[Callable[[World], Any]], Callable[[World], Any]]:
        def keep(function: Callable[[World], Any]) -> Callable[[World], Any]:
            name = function.__name__.strip("_").replace("_", " ")
            given = self.options | options
            self.loops.append(Loop(self.family, name, function, expected, **given))
            return function

        return keep
