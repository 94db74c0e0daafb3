"""Check what is stated about a run, without running it: a statement, and a loader's batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...base.errors import InvalidInput
from .. import plan, sampler
from ..claims import ApproximateDP, Claim, NoClaim
from ..findings import Check
from ..subject import Pair, Subject

BATCHES = 400
"""Minimum of batches drawn from a loader, and at least four epochs."""


@dataclass(frozen=True, kw_only=True)
class StatementSubject(Subject):
    """A statement as a subject: its plan checks, and those of a loader's batches.

    Args:
        statement: statement about a whole run.
        loader: torch ``DataLoader`` of the stated batches. None leaves batches unchecked.
        name: name in reports.

    Raises:
        InvalidInput: a loader without a length, or of a sampling that no check knows.
        MissingDependency: dp-accounting is not installed.
    """

    statement: plan.Statement
    loader: Any = None
    name: str = "statement"
    claimed: Claim = field(init=False)
    certified: Claim = field(init=False)

    def __post_init__(self) -> None:
        if self.loader is not None and self.statement.sampling not in sampler.LAWS:
            raise InvalidInput(
                "LOADER",
                expected=f"batches that are {', '.join(sampler.LAWS)}",
                got=self.statement.sampling,
                remedy="Leave LOADER out; no check knows this sampling.",
            )
        numbers = (self.statement.epsilon, self.statement.certificate().epsilon)
        for name, epsilon in zip(("claimed", "certified"), numbers, strict=True):
            claim = (
                ApproximateDP(epsilon, self.statement.delta) if epsilon < math.inf else NoClaim()
            )
            object.__setattr__(self, name, claim)

    def release(self, data: Any, runs: int, seed: int) -> Tensor:
        """Return ``[runs, 0]``: nothing is released."""
        del data, seed
        return torch.empty(runs, 0)

    def pairs(self, weakest: Tensor | None) -> Sequence[Pair]:
        """Return no pairs: no output shows what is asked here."""
        del weakest
        return ()

    def checks(self, *, quick: bool) -> Sequence[Check]:
        """Check the statement against its event, and the loader's batches against the statement."""
        del quick
        found = plan.checks(self.statement)
        return found if self.loader is None else (*found, *self._drawn())

    def _drawn(self) -> Sequence[Check]:
        epoch = max(len(self.loader), 1)
        batches = sampler.of_loader(self.loader, epochs=max(4, -(-BATCHES // epoch)))
        return sampler.checks(
            batches,
            law=self.statement.sampling,
            records=len(self.loader.dataset),
            sample_rate=self.statement.sample_rate,
        )


__all__ = ["StatementSubject"]
