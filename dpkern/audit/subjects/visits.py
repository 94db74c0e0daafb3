"""Audit training on one record by a perturbed loss: the weights after each of its visits.

It runs the trainers of ``dpkern.objective`` with one record for each user. All runs begin with the
same weights, which are public. Users of a run have noise of their own and are the runs of an audit;
where a mechanism knows one user only, every run is a training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ...base.rng import Key
from ...base.validate import integer
from ...objective.autoencoder import xavier
from ...objective.methods import VisitSchedule
from ...objective.spof import SpofTraining
from ...privacy.mechanisms import OutputSGD
from ...privacy.mechanisms.functional import Functional
from .. import claims
from ..claims import Claim
from ..subject import Pair, Subject
from .local import REPLACED, _extremes, _settle

BEGIN = 0
"""Seed of the initial weights."""


class _OneRecord(NamedTuple):
    """Users with one record each, ``[m, 1, n]``."""

    train: Tensor
    test: Tensor


@dataclass(frozen=True, kw_only=True)
class VisitsSubject(Subject):
    """Weights of encoder and decoder after each visit of one record.

    Args:
        mechanism: ``SPOF``, ``FM`` or ``OutputSGD``, in either mode.
        features: n.
        code: l.
        visits: visits of the record.
        lr: learning rate.
        sigma: standard deviation of the environmental noise.
    """

    mechanism: Functional | OutputSGD
    features: int = 4
    code: int = 2
    visits: int = 1
    lr: float = 0.05
    sigma: float = 0.0
    name: str = field(init=False)
    claimed: Claim = field(init=False)
    certified: Claim = field(init=False)

    def __post_init__(self) -> None:
        integer(1, visits=self.visits)
        proved = claims.of_event(
            self.mechanism.event_spec(visits=self.visits), neighbouring=REPLACED
        )
        paid = self.visits if self.mechanism.claims_visits else 1
        claimed = claims.PureDP(paid * self.mechanism.epsilon_claimed())
        name = f"{self.mechanism.name}, {self.mechanism.mode}, weights after {self.visits} visits"
        _settle(self, claimed if self.mechanism.mode == "published" else proved, proved, name)

    def release(self, data: Tensor, runs: int, seed: int) -> Tensor:
        """Return weights ``[runs, visits 2 n l]``."""
        del seed  # keys are the operating system's
        users, seeds = (1, runs) if self.mechanism.single_user else (runs, 1)
        records = _OneRecord(
            data.expand(users, 1, self.features).contiguous(),
            torch.zeros(users, 1, self.features),
        )
        training = SpofTraining(
            records,
            self.mechanism,
            VisitSchedule(lr=self.lr, epochs=self.visits),
            seeds=range(seeds),
            sigma=self.sigma,
            code=self.code,
            keys=[Key.fresh() for _ in range(seeds)],
        )
        # Not the training's own: those of a user depend on how many users there are.
        begin = xavier(1, 1, self.features, self.code, [torch.Generator().manual_seed(BEGIN)])
        training.weights.encoder.copy_(begin.encoder)
        training.weights.decoder.copy_(begin.decoder)
        found = []
        for _ in range(self.visits):
            training.step()
            found += [part.flatten(1).clone() for part in training.weights.pairs()]
        return torch.cat(found, dim=1)

    def pairs(self, weakest: Tensor | None) -> Sequence[Pair]:
        """Return pairs that differ in all features at once, and in one."""
        del weakest
        return [
            Pair(name=name, without=without, present=present)
            for name, without, present in _extremes(self.features)
        ]
