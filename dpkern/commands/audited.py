"""Compute the audited epsilon of a run, beside the claimed and the certified one.

The very step of the run is audited before the first one is taken: its mechanism, its plan on the
model's shapes, its backend, on public records. The run's lower bound follows from one bit of every
step, "the canary seems to be there", whose error rates the audit has bounded by ``a`` and ``b``:

    Poisson, fixed    T bits: rate a without, (1 - q) a + q (1 - b) with the record
    shuffled          how many of an epoch's k bits are set: Bin(k, a) without the record,
                      Bin(k - 1, a) + Bernoulli(1 - b) with it

and from the exact composition of these laws. It supposes that the adversary sees every step, knows
all other records, and that the record's gradient is at its bound in every step it takes part in;
that is what the certificate protects against. ``epsilon_if_gaussian`` also supposes that every step
is a Gaussian release of the audited mu, so that nothing is lost by keeping one bit.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ..audit import epsilon_lower_bound
from ..audit.auditing import run
from ..audit.findings import Evidence, Findings
from ..audit.subject import Subject
from ..audit.subjects.model import ModelStep, direct
from ..audit.subjects.step import PrivateStep
from ..base.errors import InvalidInput, PrivacyError
from ..base.validate import require
from ..privacy.accounting import events
from ..privacy.mechanisms import LabelMechanism
from ..privacy.mechanisms.base import Mechanism
from ..step.step import DPStep

CONFIDENCE = 0.999
RECORDS = 4
MAGNIFIED = 2.0**10
"""The loss is multiplied by this, so that the canary's gradient reaches its bounds."""

RUNS_PER_PROCESS = 2500
"""Starting a process costs as much as about so many runs."""

ASSUMPTIONS = (
    "one bit of every step is kept; the adversary sees every step and knows the other records, and "
    "the record's gradient is at its bound in every step that it takes part in"
)


@dataclass(frozen=True, kw_only=True)
class Audited:
    """The findings about one step, and the composition of steps.

    Attributes:
        found: findings about one step that the canary takes part in.
        radius: distance of the audited neighbours, in bounds of one record: 2 where one record
            was replaced by its opposite.
    """

    found: Findings
    radius: float

    def facts(self, step: DPStep, *, steps_per_epoch: int, delta: float) -> dict[str, Any]:
        """Return the facts for the report of the steps so far."""
        composed = max(
            (_one_bit(each, step, steps_per_epoch, delta) for each in self.found.evidence),
            default=0.0,
        )
        return {
            "epsilon_audited": composed,
            "audit": {
                "epsilon_if_gaussian": self._if_gaussian(step, steps_per_epoch, delta),
                "assumptions": ASSUMPTIONS,
                "per_step": {
                    "mu_lower": self.found.mu_lower,
                    "mu_certified": self.found.certified.mu,
                    "epsilon_lower": self.found.epsilon_lower,
                    "epsilon_certified": self.found.certified.epsilon(delta),
                    "epsilon_claimed": self.found.claimed.epsilon(delta),
                },
                **self.found.to_dict(),
            },
        }

    def _if_gaussian(self, step: DPStep, steps_per_epoch: int, delta: float) -> float | None:
        """Compose Gaussian releases; None where the noise is not Gaussian."""
        mu = self.found.mu_lower / self.radius
        if step.plan.distribution != "gaussian" or step.steps == 0:
            return None
        if mu == 0:
            return 0.0
        sampling, size = step.sampling["sampling"], step.sampling["dataset_size"]
        if sampling == "shuffled":
            epochs = step.steps // steps_per_epoch
            return epsilon_lower_bound.shuffled_epsilon_lower(
                1 / mu, delta, steps_per_epoch=steps_per_epoch, epochs=epochs
            )
        event = events.gaussian(1 / mu)
        rate = step.sampling["sample_rate"]
        if sampling == "fixed":
            sampled = events.sampled_without_replacement(size, round(rate * size), event)
            return epsilon_lower_bound.epsilon_lower(
                sampled, "replace_one", delta, steps=step.steps
            )
        sampled = events.poisson_sampled(rate, event)
        return epsilon_lower_bound.epsilon_lower(sampled, "add_remove", delta, steps=step.steps)


def subject_of(
    mechanism: Mechanism,
    model: nn.Module,
    *,
    row_shape: tuple[int, ...],
    classes: int,
    backend: str | None,
) -> Subject:
    """Return the step of a run as a subject; nothing of the run's data is in it.

    A whole engine step where the plan noises gradients as they are; else the private step on
    gradients of the model's shapes.

    Raises:
        InvalidInput: a run whose steps release nothing, or draw no noise.
    """
    shapes = [tuple(p.shape) for p in model.parameters() if p.requires_grad]
    if isinstance(mechanism, LabelMechanism) or not any(mechanism.plan(shapes).scales):
        raise InvalidInput(
            "audit",
            expected="a run whose steps draw noise",
            got=mechanism.name,
            remedy=f"Leave --audit out; `dpkern audit {mechanism.name}` audits a mechanism alone.",
        )
    if mechanism.neighbouring == "replace_one" or not direct(mechanism, model):
        return PrivateStep(mechanism=mechanism, shapes=tuple(shapes), backend=backend)
    public = torch.Generator().manual_seed(0)
    x = torch.rand(RECORDS, *row_shape, generator=public)
    y = torch.arange(RECORDS) % classes
    return ModelStep(
        module=model,
        loss=nn.CrossEntropyLoss(reduction="sum"),
        loss_reduction="sum",
        batch=(x[1:], y[1:]),
        canary=(x[:1], y[:1]),
        mechanism=mechanism,
        magnified=MAGNIFIED,
        backend=backend,
        label="the run's model",
    )


def audit(subject: Subject, runs: int, delta: float) -> Audited:
    """Audit the step.

    Raises:
        PrivacyError: the certificate is contradicted, or a check failed: nothing may be trained.
    """
    workers = max(1, min(os.cpu_count() or 1, runs // RUNS_PER_PROCESS))
    found = run(
        subject,
        runs=runs,
        confidence=CONFIDENCE,
        delta=delta,
        workers=workers,
        quick=True,
        layers=("covariance", "canary", "likelihood", "sensitivity"),
    )
    if found.contradicts_certificate or found.failed:
        raise PrivacyError(
            "audit",
            expected="a step that keeps its certificate",
            got=found.sentence,
            remedy="Do not train with it; report it together with `dpkern info`.",
        )
    replaced = isinstance(subject, PrivateStep) and subject.mechanism.neighbouring == "replace_one"
    return Audited(found=found, radius=2.0 if replaced else 1.0)


def _one_bit(each: Evidence, step: DPStep, steps_per_epoch: int, delta: float) -> float:
    """Compose what one test says of every step."""
    a, hit, rate = each.fpr_upper, 1 - each.fnr_upper, step.sampling["sample_rate"]
    if hit <= a or step.steps == 0:
        return 0.0
    if step.sampling["sampling"] != "shuffled":
        seen = (1 - rate) * a + rate * hit
        return epsilon_lower_bound.composed([_bit(seen, a, step.steps)], delta)
    one = _sums(steps_per_epoch - 1, a)
    p = np.convolve(one, [1 - hit, hit])
    q = np.convolve(one, [1 - a, a])
    return epsilon_lower_bound.composed(
        [epsilon_lower_bound.Laws(p, q, step.steps // steps_per_epoch)], delta
    )


def _bit(present: float, without: float, count: int) -> epsilon_lower_bound.Laws:
    with_it, without_it = ([1 - rate, rate] for rate in (present, without))
    return epsilon_lower_bound.Laws(np.array(with_it), np.array(without_it), count)


def _sums(bits: int, rate: float) -> NDArray[np.float64]:
    """Return the masses of how many of so many independent bits are set."""
    special = require("scipy.special")
    k = np.arange(bits + 1)
    ways = special.gammaln(bits + 1) - special.gammaln(k + 1) - special.gammaln(bits - k + 1)
    masses: NDArray[np.float64] = np.exp(
        ways + special.xlogy(k, rate) + special.xlog1py(bits - k, -rate)
    )
    return masses
