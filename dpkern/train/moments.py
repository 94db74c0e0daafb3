"""Run ``dpkern train`` for an objective release: moments are released once, then fitted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..base.collapse import of_scores
from ..base.rng import Key
from ..base.threads import torch_threads
from ..objective import moments
from ..objective.moments import ReleasedMoments
from . import moments_mechanism
from .adlm import CLASSES_READ
from .base import BaseSession
from .display import SummaryTable
from .moments_options import SumsOptions, SurrogateOptions
from .objective_report import title
from .report import FigureSpec
from .steps import Steps

EXAMPLES = 256
"""Number of generated records whose release is counted and timed."""


@dataclass(frozen=True, kw_only=True)
class FittedEpoch:
    """The state after the fit."""

    epoch: int
    step: int
    heldout_accuracy: float


class FitSteps(Steps[FittedEpoch]):
    """The one step that fits scores to what was released."""

    def __init__(
        self, released: ReleasedMoments, options: SurrogateOptions, test: tuple[Tensor, Tensor]
    ) -> None:
        super().__init__()
        self.released, self._options = released, options
        self._features, self._labels = test
        self.weights: Tensor | None = None

    @property
    def done(self) -> int:
        """The number of fits."""
        return 0 if self.weights is None else 1

    @property
    def total(self) -> int:
        """One."""
        return 1

    def take(self) -> FittedEpoch:
        """Fit."""
        chosen = self._options
        self.weights = self.released.solve(surrogate=chosen.surrogate, ridge=chosen.ridge)
        return FittedEpoch(epoch=1, step=1, heldout_accuracy=self.accuracy())

    def accuracy(self) -> float:
        """Return the share of held-out rows that are classified right, in percent."""
        return 100 * float((self.scores().argmax(1) == self._labels).double().mean())

    def scores(self) -> torch.Tensor:
        """Return the scores of held-out rows, ``[rows, classes]``."""
        assert self.weights is not None
        return self._features.double() @ self.weights.T


class MomentsSession(BaseSession[SumsOptions, SurrogateOptions, FittedEpoch]):
    """A run of an objective release; see ``BaseSession``."""

    KINDS = (SumsOptions, SurrogateOptions)
    EPOCH = FittedEpoch
    RUN_OPTIONS = frozenset({"out", "resume", "overwrite", "figure", "threads"})
    OPS = ("noise.add_noise",)

    steps: FitSteps

    @classmethod
    def known(cls) -> set[str]:
        """Return the names of the options that such a run has: none about epochs or batches."""
        return super().known() - {"epochs", "batch_size"}

    def _read(self) -> None:
        privacy = self.options.privacy
        self.data = privacy.load(privacy.data)
        read_off = privacy.classes is None and Path(privacy.data).exists()
        self.warnings = (*self.data.warnings, *((CLASSES_READ,) if read_off else ()))

    def public_facts(self) -> dict[str, Any]:
        """Return what the privacy statement takes as public."""
        return self.data.public_facts()

    def _prepare(self, saved: Mapping[str, Any] | None) -> None:
        privacy = self.options.privacy
        self.mechanism, self.feature_map = moments_mechanism.make(
            privacy.mechanism,
            mode=privacy.mode,
            settings=privacy.settings,
            epsilon=privacy.epsilon,
            delta=privacy.delta,
            row_shape=self.data.row_shape,
            classes=self.data.classes,
        )
        radius = self.mechanism.radius
        with torch_threads(self.threads):
            test = self.feature_map(self.data.x_test, radius=radius)
            if saved is not None:
                released = ReleasedMoments.from_state(saved["training"]["released"])
            else:
                train = self.feature_map(self.data.x_train, radius=radius)
                released = moments.release(self.mechanism, train, self.data.y_train, privacy.key())
        self.steps = FitSteps(released, self.options.model, (test, self.data.y_test))

    def _load(self, saved: Mapping[str, Any]) -> None:
        self.steps.weights = saved["training"]["weights"]

    def _state(self) -> dict[str, Any]:
        """Return what was released, so that a resumed run releases nothing twice."""
        released = self.steps.released.state_dict()
        return {"training": {"released": released, "weights": self.steps.weights}}

    def describe(self, epoch: FittedEpoch) -> str:
        """Return one line on the run after an epoch, for a progress bar."""
        return f"held-out accuracy {epoch.heldout_accuracy:.2f} %"

    def _example(self) -> tuple[Callable[[], object], str, int]:
        rows = torch.rand((EXAMPLES, *self.data.row_shape))
        labels = torch.arange(EXAMPLES) % self.data.classes
        features = self.feature_map(rows, radius=self.mechanism.radius)

        def step() -> None:
            moments.release(self.mechanism, features, labels, Key.from_unsafe_seed(0))

        of = f"a release of the sums of {EXAMPLES} generated records"
        return step, of, self.mechanism.coordinates

    def _facts(self) -> dict[str, Any]:
        return moments_mechanism.facts(self.mechanism, self.feature_map, seeded=self.seeded)

    def _measured(self) -> dict[str, Any]:
        return {
            "noise": {
                "law": "Gaussian" if self.mechanism.noisy else "none",
                "multiplier": self.mechanism.noise_multiplier,
                "released_numbers": self.mechanism.coordinates,
            },
            "test_accuracy": self.steps.accuracy() if self.steps_done else None,
            "majority_accuracy": 100 * self.data.majority_accuracy,
            **(of_scores(self.steps.scores()).facts() if self.steps_done else {}),
            "test_note": "held-out rows are not protected by epsilon",
            "steps": self.steps_done,
            "data_warnings": list(self.warnings),
        }

    def _drawn(self, summary: Mapping[str, Any]) -> FigureSpec:
        accuracies = [epoch.heldout_accuracy for epoch in self.history]
        return FigureSpec(title=title(summary), panels={"held-out accuracy, %": accuracies})

    def _shown(self, summary: Mapping[str, Any]) -> SummaryTable:
        public, chosen = summary["public"], self.options.model
        return SummaryTable(
            title=f"{summary['mechanism']} on {public['data']}",
            results=(
                (
                    "held-out accuracy",
                    f"{summary['test_accuracy']:.2f} % of {public['heldout_rows']} rows (their "
                    f"most frequent label: {summary['majority_accuracy']:.2f} %)",
                ),
            ),
            settings=(
                ("relation", summary["relation"]),
                ("certified for", summary["certified_for"]),
                ("accountant", summary["accountant"]),
                ("features", f"{self.mechanism.length}, {self.feature_map.map}"),
                ("noise multiplier", f"{self.mechanism.noise_multiplier:.5g}"),
                ("fitted", f"{chosen.surrogate}, ridge {chosen.ridge:g}; free to repeat"),
            ),
            data=summary["data_warnings"],
        )
