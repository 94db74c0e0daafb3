"""Audit what AdLM and ILM release of one labelled record: relevances, inputs, and label.

If no noise is shared, every record of a data set is a run of its own. Otherwise a run is a whole
release, of as many records as the setting has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ...base.errors import InvalidInput
from ...base.rng import Key
from ...nn.polynomial import label_coefficients
from ...objective import adlm_release
from ...objective.adlm_data import Labelled
from ...privacy.mechanisms.adlm import AdLM
from .. import claims, likelihood
from ..claims import Claim
from ..subject import Pair, Subject
from .local import REPLACED, _settle


class RelevanceRecord(NamedTuple):
    """One record, and the mean relevance of all records.

    Attributes:
        x: features in [0, 1], ``[d]``.
        label: its class.
        relevance: mean relevance of all records, float64 ``[d]``.
    """

    x: Tensor
    label: int
    relevance: Tensor


@dataclass(frozen=True, eq=False)
class ReleaseRatio:
    """The log-likelihood ratio of independent parts: Laplace noise, and answers to one label.

    Args:
        laplace: ratio of the first columns.
        answers: factor of each of the other columns.
    """

    laplace: likelihood.LaplaceRatio
    answers: Tensor
    name: str = "release likelihood ratio"

    def __call__(self, values: Tensor) -> Tensor:
        split = values.shape[1] - len(self.answers)
        told = values[:, split:].double() @ self.answers
        return likelihood.rounded(self.laplace(values[:, :split]) + told)


@dataclass(frozen=True, kw_only=True)
class LabelledRecord(Subject):
    """The release of one record by AdLM or ILM.

    Args:
        mechanism: its configuration.
        relevance: AdLM: mean relevance of each feature, public or the records'. None gives all of
            it to one feature, where the inputs' budget is spent on one coordinate.

    Raises:
        InvalidInput: coefficients that contain the hidden layer: nothing is released at once.
    """

    usual_runs: ClassVar[int] = 100_000

    mechanism: AdLM
    relevance: tuple[float, ...] | None = None
    name: str = field(init=False)
    claimed: Claim = field(init=False)
    certified: Claim = field(init=False)

    def __post_init__(self) -> None:
        if self.mechanism.coefficient_form != "label_scalar" or not self.mechanism.noisy:
            raise InvalidInput(
                "mechanism",
                expected="coefficient_form='label_scalar', with noise",
                got=self.mechanism.fingerprint,
                remedy="Set coefficient_form='label_scalar' and a finite epsilon: coefficients of "
                "the hidden layer are released in training only.",
            )
        proved = claims.of_event(self.mechanism.event_spec(), neighbouring=REPLACED)
        printed = self.mechanism.mode == "published"
        claimed = claims.PureDP(self.mechanism.epsilon_claimed()) if printed else proved
        _settle(self, claimed, proved, f"{self.mechanism.name}, {self.mechanism.mode}")

    @property
    def _apart(self) -> bool:
        """Whether each record of one release is a run of its own."""
        alone = self.mechanism.noise_sharing == "iid_per_example"
        return alone and not self.mechanism.releases_relevance

    def release(self, data: RelevanceRecord, runs: int, seed: int) -> Tensor:
        """Return ``[runs, ...]``: relevances if they are released, inputs, label.

        With a draw that all records share, the inputs of a bystander as well.
        """
        del seed  # keys are the operating system's
        if self._apart:
            found = self._released(data, max(runs, self.mechanism.setting.batch))
            return torch.cat([found.inputs[:runs], *_labels(found, slice(runs))], dim=1)
        return torch.stack([self._whole(data) for _ in range(runs)])

    def _whole(self, data: RelevanceRecord) -> Tensor:
        found = self._released(data, self.mechanism.setting.records - 1)
        seen = [found.inputs[:1], *_labels(found, slice(1))]
        if self.mechanism.releases_relevance and found.relevance is not None:
            seen.insert(0, found.relevance[None].float())
        if self.mechanism.noise_sharing == "shared_per_feature":
            seen.append(found.inputs[-1:])
        return torch.cat(seen, dim=1)[0]

    def _released(self, data: RelevanceRecord, copies: int) -> adlm_release.ReleasedDataset:
        """Release the record so many times, beside a bystander of another class."""
        setting = self.mechanism.setting
        sized = replace(self.mechanism, setting=replace(setting, records=copies + 1))
        x = torch.cat([data.x.expand(copies, -1), torch.zeros(1, len(data.x))])
        y = torch.full((copies + 1,), data.label, dtype=torch.int64)
        y[-1] = (data.label + 1) % setting.classes
        labelled = Labelled(x=x, y=y, x_test=x[-1:], y_test=y[-1:], classes=setting.classes)
        relevance = data.relevance if self.mechanism.adaptive else None
        return adlm_release.release(sized, labelled, Key.fresh(), relevance=relevance)

    def pairs(self, weakest: Tensor | None) -> Sequence[Pair]:
        """Return pairs that change everything, the inputs, the most relevant input, the label."""
        del weakest
        d = self.mechanism.setting.layer.features
        relevance = self._relevance()
        first = torch.zeros(d)
        first[int(relevance.argmax())] = 1
        zeros, last = torch.zeros(d), self.mechanism.setting.classes - 1
        others = {
            "everything": (torch.ones(d), last),
            "inputs": (torch.ones(d), 0),
            "one input": (first, 0),
            "label": (zeros, last),
        }
        moved = relevance
        if self.mechanism.releases_relevance:
            moved = relevance - 1 / self.mechanism.setting.records
        found = []
        for name, (x, label) in others.items():
            without = RelevanceRecord(zeros, 0, relevance)
            mean = moved if name == "everything" else relevance
            present = RelevanceRecord(x, label, mean)
            score = self._ratio(without, present) if self._apart else None
            layer = "canary" if score is None else "likelihood"
            found.append(
                Pair(name=name, without=without, present=present, score=score, layer=layer)
            )
        return found

    def _relevance(self) -> Tensor:
        if self.relevance is not None:
            return torch.tensor(self.relevance, dtype=torch.float64)
        one = torch.zeros(self.mechanism.setting.layer.features, dtype=torch.float64)
        one[0] = 1
        return one

    def _ratio(self, without: RelevanceRecord, present: RelevanceRecord) -> ReleaseRatio:
        mechanism, classes = self.mechanism, self.mechanism.setting.classes
        betas = mechanism.betas(without.relevance)
        scales = [mechanism.input_scales(betas)]
        means = [[mechanism.reach * each.x.double()] for each in (without, present)]
        answers = torch.zeros(0, dtype=torch.float64)
        hot = torch.eye(classes, dtype=torch.float64)
        if mechanism.labels == "response":
            channel = mechanism.channel
            # A released target is (answer = class) / (truth - lie), but for a constant.
            each = (channel.truth - channel.lie) * math.log(channel.truth / channel.lie)
            answers = each * (hot[present.label] - hot[without.label])
        else:
            assert mechanism.label_scale is not None
            for mean, record in zip(means, (without, present), strict=True):
                target = hot[record.label][None]
                if mechanism.labels == "coefficients":
                    made = label_coefficients(target)
                    mean += [made.linear[0], made.quadratic[0]]
                else:
                    mean.append(target[0])
            noisy = sum(len(part) for part in means[0][1:])
            scales.append(torch.full((noisy,), mechanism.label_scale, dtype=torch.float64))
        return ReleaseRatio(
            likelihood.LaplaceRatio(torch.cat(means[0]), torch.cat(means[1]), torch.cat(scales)),
            answers,
        )


def _labels(found: adlm_release.ReleasedDataset, rows: slice) -> list[Tensor]:
    """Return what is released of the labels, ``[n, ...]`` each."""
    if found.coefficients is not None:
        return [found.coefficients.linear[rows], found.coefficients.quadratic[rows]]
    assert found.targets is not None
    return [found.targets[rows]]
