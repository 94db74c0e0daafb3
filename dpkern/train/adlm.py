"""Run ``dpkern train`` for AdLM or ILM: everything is released once, then trained on."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base.errors import InvalidInput
from ..base.rng import Key
from ..base.threads import torch_threads
from ..nn.polynomial import PowerCoefficients
from ..objective import adlm as trainer
from ..objective.adlm import AdlmSchedule, AdlmTraining, ReleasedDataset
from ..objective.adlm_data import Labelled
from ..step.noise_tables import NoiseSource, named
from . import adlm_mechanism, adlm_report
from .adlm_options import BoundedOptions, LabelledOptions
from .adlm_report import BoundedEpoch
from .base import BaseSession
from .display import SummaryTable
from .report import FigureSpec
from .steps import Steps

PRETRAINING = 12
"""Epochs of the network that relevances come from, as for MNIST."""

CLASSES_READ = (
    "the number of classes was read off the labels and counts as public, not covered by epsilon; "
    "pass --classes"
)

_TENSORS = ("inputs", "offset", "bias_noise", "relevance", "betas", "scales")


class ReleasedBatchSteps(Steps[BoundedEpoch]):
    """Steps that take one batch of released rows at a time."""

    def __init__(self, training: AdlmTraining) -> None:
        super().__init__()
        self.training = training

    @property
    def done(self) -> int:
        """The number of steps taken."""
        return self.training.step

    @property
    def total(self) -> int:
        """The number of steps of the whole schedule."""
        return self.training.total_steps

    @property
    def finished(self) -> bool:
        """Whether no step is left."""
        return self.training.finished

    def take(self) -> BoundedEpoch | None:
        """Take the next batch."""
        accuracy = self.training.advance()
        if accuracy is None:
            return None
        return BoundedEpoch(
            epoch=-(-self.done // self.training.steps_per_epoch),
            step=self.done,
            heldout_accuracy=float(accuracy[0]),
            loss=float(self.training.outcome().loss[0, -1]),
            diverged=self.diverged,
        )

    @property
    def diverged(self) -> bool:
        """Whether the scores left the guard's bounds: the weights stay as they were then."""
        return bool(self.training.diverged.any())


class AdlmSession(BaseSession[LabelledOptions, BoundedOptions, BoundedEpoch]):
    """A run of AdLM or ILM; see ``BaseSession``."""

    KINDS = (LabelledOptions, BoundedOptions)
    EPOCH = BoundedEpoch
    RUN_OPTIONS = frozenset({"out", "resume", "overwrite", "figure", "threads", "noise_source"})
    OPS = ("coef.expanded", "coef.quadratic", "noise.add_noise", "noise.lattice_draws")

    steps: ReleasedBatchSteps

    def _read(self) -> None:
        privacy = self.options.privacy
        self.data, self.warnings = load(privacy, privacy.data)

    def public_facts(self) -> dict[str, Any]:
        """Return what the privacy statement takes as public."""
        return {
            "data": self.data.source,
            "public_data": self.options.privacy.public_data,
            "training_rows": len(self.data.x),
            "heldout_rows": len(self.data.x_test),
            "row_shape": list(self.data.row_shape),
            "classes": self.data.classes,
        }

    def _prepare(self, saved: Mapping[str, Any] | None) -> None:
        privacy, model = self.options.privacy, self.options.model
        shape = self.data.row_shape
        architecture = model.architecture(shape)
        network = trainer.build(architecture, shape, self.data.classes, seed=model.init_seed)
        rows = len(self.data.x)
        self.mechanism = adlm_mechanism.make(
            privacy.mechanism,
            mode=privacy.mode,
            settings=privacy.settings,
            epsilon=privacy.epsilon,
            setting=trainer.setting(network, shape, records=rows, batch=privacy.batch_of(rows)),
        )
        self._check_public()
        self.noise_source = self._source(saved)
        key = privacy.key()
        if saved is not None:
            released = self._restored(saved["training"]["released"])
        else:
            with torch_threads(self.threads):
                relevance = self._relevance(architecture) if self.mechanism.adaptive else None
                released = trainer.release(
                    self.mechanism, self.data, key, relevance=relevance, source=self._fresh()
                )
        training = AdlmTraining(
            self.data,
            [released],
            [network],
            AdlmSchedule(lr=model.lr, epochs=privacy.epochs),
            seeds=[model.init_seed],
            keys=[key],
        )
        self.steps = ReleasedBatchSteps(training)

    def _source(self, saved: Mapping[str, Any] | None) -> NoiseSource | None:
        """Return a source of the kind that made, or will make, the release.

        Raises:
            InvalidInput: another one than the release of a resumed run was made with, or one for
                labels that get their noise at every visit.
        """
        name = self.options.run.noise_source
        if saved is not None:
            made = saved["training"]["released"].get("noise_source", named.INLINE)
            if name not in (None, made):
                raise InvalidInput(
                    "noise_source",
                    expected=f"{made}, which made the release that this run goes on with",
                    got=name,
                    remedy="Leave --noise-source out when resuming.",
                )
            name = made
        self.source_name = named.INLINE if name is None else name
        source = named.source_of(name)
        if source is not None:
            trainer.check_source(self.mechanism)
        return source

    def _fresh(self) -> Callable[[], NoiseSource] | None:
        """Return what makes a new source for each release; None draws them from the key."""
        if self.noise_source is None:
            return None

        def made() -> NoiseSource:
            source = named.source_of(self.source_name)
            assert source is not None
            return source

        return made

    @property
    def training(self) -> AdlmTraining:
        """The trainer of the one run."""
        return self.steps.training

    def _check_public(self) -> None:
        """Require public records where relevances come from them, and refuse them elsewhere."""
        privacy, mechanism = self.options.privacy, self.mechanism
        needed = mechanism.adaptive and mechanism.relevance_from != "trained_on_data"
        if needed and _same(privacy.public_data, privacy.data):
            raise _not_public(privacy.public_data)
        if needed == (privacy.public_data is not None):
            return
        raise InvalidInput(
            "public_data",
            expected="public records, which the network behind the relevances is trained on"
            if needed
            else "none: nothing here comes from public records",
            got="none" if needed else privacy.public_data,
            remedy="Pass --public-data; or --mechanism ilm, which needs no relevances."
            if needed
            else "Leave --public-data out.",
        )

    def _relevance(self, architecture: str) -> Tensor:
        """Compute relevances before noise, of the training rows or of public ones as configured."""
        privacy, mechanism = self.options.privacy, self.mechanism
        seen = self.data
        if privacy.public_data is not None:
            seen, _ = load(privacy, privacy.public_data)
            if (seen.row_shape, seen.classes) != (self.data.row_shape, self.data.classes):
                raise InvalidInput(
                    "public_data",
                    expected=f"rows {list(self.data.row_shape)}, {self.data.classes} classes",
                    got=f"rows {list(seen.row_shape)}, {seen.classes} classes",
                    remedy="Give records of the same kind, and --classes if some have no record.",
                )
            if _within(seen.x, self.data.x):
                raise _not_public("the same rows")
        network: nn.Sequential = trainer.pretrained(
            seen,
            architecture,
            epochs=PRETRAINING,
            seed=self.options.model.init_seed,
            input_range=mechanism.input_range,
        )
        of = seen if mechanism.relevance_from == "public" else self.data
        return trainer.relevance_of(mechanism, network, of)

    def _load(self, saved: Mapping[str, Any]) -> None:
        self.training.load_state_dict(saved["training"]["state"])

    def _state(self) -> dict[str, Any]:
        return {"training": {"state": self.training.state_dict(), "released": self._kept()}}

    def _kept(self) -> dict[str, Any]:
        """Return what was released, so that a resumed run releases nothing twice.

        True labels, which the feature_expanded form reads at every visit, stay out.
        """
        (released,) = self.training.released
        kept: dict[str, Any] = {name: getattr(released, name) for name in _TENSORS}
        made = released.coefficients
        kept["noise_source"] = self.source_name
        kept["targets"] = None if released.visit_scale is not None else released.targets
        kept["coefficients"] = None if made is None else [made.linear, made.quadratic]
        return kept

    def _restored(self, kept: Mapping[str, Any]) -> ReleasedDataset:
        made, targets, scale = kept["coefficients"], kept["targets"], None
        if self.mechanism.coefficient_form == "feature_expanded":
            scale = self.mechanism.label_scale
            targets = F.one_hot(self.data.y, self.data.classes).float()
        constant = float(torch.log(torch.tensor(2.0, dtype=torch.float64)))
        return ReleasedDataset(
            mechanism=self.mechanism,
            **{name: kept[name] for name in _TENSORS},
            targets=targets,
            coefficients=None if made is None else PowerCoefficients(constant, *made),
            visit_scale=scale,
        )

    def describe(self, epoch: BoundedEpoch) -> str:
        """Return one line on the run after an epoch, for a progress bar."""
        text = f"held-out accuracy {epoch.heldout_accuracy:.2f} %"
        return text + (", diverged" if epoch.diverged else "")

    def _facts(self) -> dict[str, Any]:
        visits = -(-self.steps_done // self.training.steps_per_epoch)
        return adlm_mechanism.facts(
            self.mechanism, visits=visits, seeded=self.seeded, source=self.noise_source
        )

    def _measured(self) -> dict[str, Any]:
        return {
            "noise": {
                **adlm_report.noise(self.mechanism, self.training.released[0].scales),
                "source": self.source_name,
            },
            "test_accuracy": float(self.training.accuracy()[0]) if self.steps_done else None,
            **(self.training.spread()[0].facts() if self.steps_done else {}),
            "test_note": "held-out rows are not protected by epsilon",
            "diverged": self.steps.diverged,
            "steps": self.steps_done,
            "data_warnings": list(self.warnings),
        }

    def _example(self) -> tuple[Callable[[], object], str, int]:
        model, shape = self.options.model, self.data.row_shape
        network = trainer.build(
            model.architecture(shape), shape, self.data.classes, seed=model.init_seed
        )
        data = replace(self.data, x=self.data.x_test, y=self.data.y_test)  # not protected

        def step() -> None:
            AdlmTraining(
                data,
                self.training.released,
                [copy.deepcopy(network)],
                AdlmSchedule(lr=model.lr, epochs=1),
                seeds=[0],
                keys=[Key.from_unsafe_seed(0)],
            ).advance()

        numbers = sum(p.numel() for p in network.parameters())
        return step, f"one step of {self.training.batch} released rows", numbers

    def _drawn(self, summary: Mapping[str, Any]) -> FigureSpec:
        return adlm_report.drawn(summary, self.history)

    def _shown(self, summary: Mapping[str, Any]) -> SummaryTable:
        return adlm_report.shown(summary)


def load(privacy: LabelledOptions, source: str) -> tuple[Labelled, tuple[str, ...]]:
    """Load rows, checked to be in [0, 1] and of several classes, and warnings about them."""
    found = privacy.load(source)
    labelled = Labelled(
        x=found.x_train,
        y=found.y_train,
        x_test=found.x_test,
        y_test=found.y_test,
        classes=found.classes,
        source=found.source,
    )
    if privacy.classes is None and Path(source).exists():
        return labelled, (*found.warnings, CLASSES_READ)
    return labelled, found.warnings


def _same(one: str | None, other: str) -> bool:
    """Whether two names are those of one file."""
    return one is not None and (one == other or os.path.realpath(one) == os.path.realpath(other))


def _not_public(got: str | None) -> InvalidInput:
    return InvalidInput(
        "public_data",
        expected="other records than those that are protected",
        got=got,
        remedy="Name public records of the same kind.",
    )


def _within(rows: Tensor, others: Tensor) -> bool:
    """Whether every row is among the others."""
    known = {row.numpy().tobytes() for row in others.flatten(1)}
    return all(row.numpy().tobytes() in known for row in rows.flatten(1))
