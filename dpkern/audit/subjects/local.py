"""Audit one release of one record: its noisy form, noisy coefficients, or a randomized response.

Neighbours are two values of the record: all features 0 against all 1, and one feature alone. Rows
of a call are runs: every record of a data set has noise of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ...base.errors import InvalidInput
from ...base.laws import SCALE_UNITS
from ...base.rng import Key, Purpose
from ...base.validate import integer
from ...objective import release
from ...ops import coef
from ...privacy.mechanisms import LabelMechanism
from ...privacy.mechanisms.functional import Functional
from .. import claims, likelihood
from ..claims import Claim
from ..subject import Pair, Subject
from .backend import check_backend, named, running

REPLACED = "replace_one"


@dataclass(frozen=True, kw_only=True)
class ReleasedRecordSubject(Subject):
    """The released record of SPOF or FM in corrected mode, on which everything is trained.

    Args:
        mechanism: configuration with ``release="record"``, or ``coefficients``, where the record is
            released as a target.
        features: n.

    Raises:
        InvalidInput: a mechanism that releases no record.
    """

    usual_runs: ClassVar[int] = 100_000

    mechanism: Functional
    features: int = 1
    name: str = field(init=False)
    claimed: Claim = field(init=False)
    certified: Claim = field(init=False)

    def __post_init__(self) -> None:
        integer(1, features=self.features)
        if self.mechanism.published or self.mechanism.form != "taylor" or not self.mechanism.noised:
            raise InvalidInput(
                "mechanism",
                expected="corrected mode with form='taylor', with noise",
                got=self.mechanism.fingerprint,
                remedy="Audit Coefficients or Visits.",
            )
        # What is released here is a target too, and costs what was asked for.
        promise = claims.Laplace(self.mechanism.epsilon)
        text = f"{self.mechanism.name}, corrected, {self.mechanism.release}"
        _settle(self, promise, promise, text)

    def release(self, data: Tensor, runs: int, seed: int) -> Tensor:
        """Return releases ``[runs, n]``."""
        del seed  # the key is the operating system's
        rows = data.expand(runs, self.features).contiguous()
        alone = self.mechanism.release == "coefficients"
        return release.record(self.mechanism, rows, Key.fresh(), clip=not alone)

    def pairs(self, weakest: Tensor | None) -> Sequence[Pair]:
        """Return pairs that differ in all features at once, and in one."""
        del weakest
        # 1 is ``reach`` units of scale / 2^20, never more than 1.
        reach = self.mechanism.record_reach(self.features) / SCALE_UNITS
        scale = self.features / self.mechanism.epsilon
        return [
            Pair(
                name=name,
                without=without,
                present=present,
                score=likelihood.LaplaceRatio(without, present * reach * scale, scale),
                layer="likelihood",
            )
            for name, without, present in _extremes(self.features)
        ]


@dataclass(frozen=True, kw_only=True)
class CoefficientSubject(Subject):
    """The printed release of SPOF and FM: noisy coefficients of a record, fresh at every visit.

    Args:
        mechanism: configuration in published mode.
        features: n.
        visits: visits of the record; the paper claims the same epsilon for any number.
        shift: c_j as a public number, which the printed scale grows with.
        backend: name of the backend, emulated where its device is missing. None selects the first
            one that supports the call; see ``dpkern info``.

    Raises:
        InvalidInput: another mode.
    """

    usual_runs: ClassVar[int] = 100_000

    mechanism: Functional
    features: int = 1
    visits: int = 1
    shift: float = 0.0
    backend: str | None = None
    name: str = field(init=False)
    claimed: Claim = field(init=False)
    certified: Claim = field(init=False)

    def __post_init__(self) -> None:
        integer(1, features=self.features)
        integer(1, visits=self.visits)
        check_backend(self.backend)
        if not (self.mechanism.published and self.mechanism.noised):
            raise InvalidInput(
                "mechanism",
                expected="published mode, with noise",
                got=self.mechanism.fingerprint,
                remedy="Audit Record.",
            )
        # The scale is a public number here, so what the coefficients alone cost can be proved.
        paid = self.mechanism.epsilon_audited(visits=self.visits, shift=self.shift)
        proved = claims.Laplace(paid) if self.visits == 1 else claims.PureDP(paid)
        text = f"{self.mechanism.name}, published, coefficients, {named(self.backend)}"
        _settle(self, claims.PureDP(self.mechanism.epsilon), proved, text)

    @property
    def _scale(self) -> float:
        return float(self.mechanism.scale(self.features, self.shift))

    def release(self, data: Tensor, runs: int, seed: int) -> Tensor:
        """Return ``[runs, visits 2 n]``: linear, then quadratic coefficients."""
        del seed  # the key is the operating system's
        key, scale = Key.fresh(), self._scale
        rows = data.expand(runs, self.features).contiguous()
        found = []
        with running(self.backend):
            for visit in range(self.visits):
                noise = coef.Noise(
                    scale=scale,
                    stream=key.stream(Purpose.LAPLACE, visit),
                    rounding=key.stream(Purpose.ROUNDING, visit),
                )
                form = coef.form_of(str(self.mechanism.form))
                found += list(coef.perturb(rows, form=form, noise=noise, backend=self.backend))
        return torch.cat(found, dim=1)

    def pairs(self, weakest: Tensor | None) -> Sequence[Pair]:
        """Return pairs that differ in all features at once, and in one."""
        del weakest
        form = coef.form_of(str(self.mechanism.form))
        found = []
        for name, without, present in _extremes(self.features):
            means = [
                torch.cat(tuple(coef.perturb(x[None], form=form)), dim=1)[0].repeat(self.visits)
                for x in (without, present)
            ]
            score = likelihood.LaplaceRatio(means[0], means[1], self._scale)
            found.append(
                Pair(name=name, without=without, present=present, score=score, layer="likelihood")
            )
        return found


@dataclass(frozen=True, kw_only=True)
class Response(Subject):
    """One randomized response.

    Args:
        mechanism: its configuration.
        backend: name of the backend, emulated where its device is missing. None selects the first
            one that supports the call; see ``dpkern info``.
    """

    usual_runs: ClassVar[int] = 100_000

    mechanism: LabelMechanism
    backend: str | None = None
    name: str = field(init=False)
    claimed: Claim = field(init=False)
    certified: Claim = field(init=False)

    def __post_init__(self) -> None:
        check_backend(self.backend)
        proved = claims.of_event(self.mechanism.event_spec(), neighbouring=REPLACED)
        k = self.mechanism.categories
        text = f"{self.mechanism.name}, {k} categories, {named(self.backend)}"
        claimed = claims.PureDP(self.mechanism.epsilon)
        _settle(self, claimed if self.mechanism.mode == "published" else proved, proved, text)

    def release(self, data: int, runs: int, seed: int) -> Tensor:
        """Return ``[runs, 1]``: the answers to one symbol."""
        del seed  # the key is the operating system's
        symbols = torch.full((runs,), data, dtype=torch.int64)
        stream = Key.fresh().stream(Purpose.SYMBOLS, 1)
        with running(self.backend):
            told = self.mechanism.randomize(symbols, stream=stream, backend=self.backend)
        return told[:, None]

    def pairs(self, weakest: Tensor | None) -> Sequence[Pair]:
        """Return the first category against the last, which is furthest away, both ways round."""
        del weakest
        last = self.mechanism.categories - 1
        return [
            Pair(
                name=f"{without} or {present}",
                without=without,
                present=present,
                score=likelihood.ResponseRatio(
                    without, present, self.mechanism.truth, self.mechanism.lie
                ),
                layer="likelihood",
            )
            for without, present in ((0, last), (last, 0))
        ]


def _extremes(features: int) -> list[tuple[str, Tensor, Tensor]]:
    """Return records that differ as much as two can, and records that differ in one feature."""
    zeros, one = torch.zeros(features), torch.zeros(features)
    one[0] = 1
    found = [("all features", zeros, torch.ones(features))]
    return found if features == 1 else [*found, ("one feature", zeros, one)]


def _settle(subject: Subject, claimed: Claim, certified: Claim, name: str) -> None:
    """Set the fields that follow from the others."""
    for each, value in {"claimed": claimed, "certified": certified, "name": name}.items():
        object.__setattr__(subject, each, value)
