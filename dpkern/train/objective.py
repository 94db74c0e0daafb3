"""Run ``dpkern train`` for a system that perturbs its loss: an autoencoder of records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from ..base import dispatch
from ..base.devices import training_device
from ..base.errors import InvalidInput
from ..objective import records as tables
from ..objective.methods import VisitSchedule
from ..objective.records import GENERATED, Records
from ..objective.spof import SpofTraining
from ..step.noise_tables import NoiseSource, named
from . import objective_mechanism, objective_report
from .base import BaseSession
from .display import SummaryTable
from .objective_options import CodeOptions, RecordOptions, read_bounds
from .objective_report import Reconstruction
from .report import FigureSpec
from .resources import missing
from .steps import Steps

GENERATED_RECORDS = 1000
EXAMPLES = 32
"""Records of each user in the epoch whose costs a report has."""

_EXAMPLE_RATE = 1e-12
"""Its learning rate: noise that stops runs at others moves this one too little, at the same costs.
"""


class VisitSteps(Steps[Reconstruction]):
    """Steps that take one record of every user each; a run that diverges has no step left."""

    def __init__(self, training: SpofTraining, backend: str | None) -> None:
        super().__init__()
        self.training, self._backend = training, backend
        self._at_once = max(1, training.steps // 1000)

    @property
    def done(self) -> int:
        """The number of steps taken."""
        return self.training.step_number

    @property
    def total(self) -> int:
        """The number of steps of the whole schedule."""
        return self.training.steps

    @property
    def diverged(self) -> bool:
        """Whether a logit left the guard's bounds: the weights stay as they were then."""
        return bool(self.training.diverged.any())

    @property
    def finished(self) -> bool:
        """Whether no step is left."""
        return super().finished or self.diverged

    def run(
        self,
        *,
        on_step: Callable[[int], None] | None = None,
        on_epoch: Callable[[Reconstruction], None] | None = None,
    ) -> None:
        """Take the steps that are left, on this backend or each call's own; see ``Steps``."""
        with nullcontext() if self._backend is None else dispatch.use(self._backend):
            super().run(on_step=on_step, on_epoch=on_epoch)

    def take(self) -> Reconstruction | None:
        """Take the next record of every user; of long schedules a thousandth at a time."""
        self.training.advance(self._at_once)
        complete = self.done % self.training.records_each == 0 or self.diverged
        return self.measured() if complete else None

    def measured(self) -> Reconstruction:
        """Return the state as it is now."""
        outcome = self.training.outcome()
        return Reconstruction(
            epoch=self.training.visits,
            step=self.done,
            heldout_accuracy=float(outcome.accuracy[0]),
            heldout_mse=float(outcome.mse[0]),
            heldout_bce=float(outcome.bce[0]),
            diverged=self.diverged,
        )


class ObjectiveSession(BaseSession[RecordOptions, CodeOptions, Reconstruction]):
    """A run of SPOF or the functional mechanism; see ``BaseSession``."""

    KINDS = (RecordOptions, CodeOptions)
    EPOCH = Reconstruction
    RUN_OPTIONS = frozenset(
        {"out", "resume", "overwrite", "figure", "backend", "device", "threads", "noise_source"}
    )
    OPS = ("coef.perturb", "coef.quadratic", "noise.add_noise", "noise.lattice_draws")

    steps: VisitSteps

    def _read(self) -> None:
        privacy, model = self.options.privacy, self.options.model
        self.mechanism = objective_mechanism.make(
            privacy.mechanism,
            mode=privacy.mode,
            settings=privacy.settings,
            epsilon=privacy.epsilon,
        )
        self.noise_source = named.source_of(self.options.run.noise_source)
        self.records = load(privacy)
        if model.code >= self.records.features:
            raise InvalidInput(
                "code",
                expected=f"fewer than the {self.records.features} features",
                got=model.code,
                remedy="Pass a smaller --code; one as long as its record compresses nothing.",
            )

    def public_facts(self) -> dict[str, Any]:
        """Return the public facts of the records."""
        return self.records.public_facts()

    def _prepare(self, saved: Mapping[str, Any] | None) -> None:
        del saved  # released records are in the training's own state
        privacy, model = self.options.privacy, self.options.model
        training = SpofTraining(
            self.records,
            self.mechanism,
            VisitSchedule(lr=model.lr, epochs=privacy.epochs),
            seeds=[model.init_seed],
            sigma=privacy.sigma,
            code=model.code,
            keys=[privacy.key()],
            noise_source=None if self.noise_source is None else self._source,
            device=training_device(self.options.run.device),
            fused=self.backend is None or not missing(self.backend, ("coef.descend",)),
        )
        self.steps = VisitSteps(training, self.backend)

    def _source(self) -> NoiseSource:
        """Return the source of the one run."""
        assert self.noise_source is not None
        return self.noise_source

    def _end(self) -> None:
        """Close the noise source; an interrupted run keeps its noise for the steps left."""
        if self.noise_source is not None:
            self.noise_source.close()

    def _load(self, saved: Mapping[str, Any]) -> None:
        self.training.load_state_dict(saved["training"])

    def _state(self) -> dict[str, Any]:
        return {"training": self.training.state_dict()}

    @property
    def training(self) -> SpofTraining:
        """The trainer of the one run."""
        return self.steps.training

    @property
    def protected_records(self) -> int:
        """The number of records of all users."""
        public = self.public_facts()
        return int(public["users"] * public["records_per_user"])

    def describe(self, epoch: Reconstruction) -> str:
        """Return one line on the run after an epoch, for a progress bar."""
        text = f"held-out accuracy {epoch.heldout_accuracy:.2f} %, mse {epoch.heldout_mse:.4f}"
        return text + (", diverged" if epoch.diverged else "")

    def _facts(self) -> dict[str, Any]:
        return objective_mechanism.facts(
            self.mechanism,
            visits=self.training.visits,
            seeded=self.seeded,
            records=self.records,
            source=self.noise_source,
        )

    def _measured(self) -> dict[str, Any]:
        now = self.steps.measured()
        return {
            "noise": objective_report.noise(
                self.mechanism, self.records, self.training, self.noise_source
            ),
            "test_accuracy": now.heldout_accuracy,
            "test_mse": now.heldout_mse,
            "test_bce": now.heldout_bce,
            **self.training.spread()[0].facts(),
            "test_note": "held-out records are not protected by epsilon",
            "diverged": now.diverged,
            "steps": self.steps_done,
            "data_notes": list(self.records.notes),
            "backend": self.backend,
            "device": str(self.training.device),
        }

    def _example(self) -> tuple[Callable[[], object], str, int]:
        privacy, model, records = self.options.privacy, self.options.model, self.records
        name = self.options.run.noise_source
        made = tables.generated(
            users=records.users, records=EXAMPLES, features=records.features, held_out=0.1
        )

        def source() -> NoiseSource:
            found = named.source_of(name)
            assert found is not None
            return found

        def epoch() -> None:
            SpofTraining(
                made,
                self.mechanism,
                VisitSchedule(lr=_EXAMPLE_RATE, epochs=1),
                seeds=[0],
                sigma=privacy.sigma,
                code=model.code,
                noise_source=None if name in (None, named.INLINE) else source,
            ).run()

        # Draws are made for many steps at once: an epoch has them all.
        of = f"one epoch of {EXAMPLES} generated records of each of {records.users} users"
        return epoch, of, 2 * EXAMPLES * records.users * records.features

    def _drawn(self, summary: Mapping[str, Any]) -> FigureSpec:
        return objective_report.drawn(summary, self.history)

    def _shown(self, summary: Mapping[str, Any]) -> SummaryTable:
        return objective_report.shown(summary)


def load(privacy: RecordOptions) -> Records:
    """Load the records of these options."""
    shape: dict[str, Any] = {
        "users": privacy.users,
        "features": privacy.features,
        "held_out": privacy.test_fraction,
        "seed": privacy.split_seed,
    }
    if privacy.data == GENERATED:
        return tables.generated(records=privacy.samples or GENERATED_RECORDS, **shape)
    return tables.load(
        privacy.data,
        columns=privacy.headings,
        user_column=privacy.user_column,
        bounds=read_bounds(privacy.bounds),
        samples=privacy.samples,
        **shape,
    )
