"""Run ``dpkern train`` for a mechanism that makes gradients private."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from typing import Any

import torch

from ..base.collapse import of_scores
from ..base.devices import training_device
from ..base.errors import PrivacyError
from ..engine.demo import models
from ..engine.named import CALIBRATED_TO, Run, make
from ..engine.sampling import make_batches
from ..privacy import accounting
from ..privacy.mechanisms import LabelMechanism, Mechanism
from ..privacy.mechanisms.range_counts import RangeCounts
from ..step.noise_tables import named
from ..step.step import DPStep
from . import ceiling, checkpoint, data, gradient_report, hooks, label_privacy, noise_sources
from .base import BaseSession
from .display import SummaryTable
from .encoding import ColumnRange
from .gradient_report import DIAGNOSTICS_NOTE, Epoch
from .loop import EPSILON_POINTS, TrainingSteps, summed_cross_entropy
from .options import ModelOptions, PrivacyOptions, RunOptions
from .private_ranges import PrivateRanges
from .report import FigureSpec
from .step_audit import NOT_AUDITED, AuditedStep, required

SMALL_MODEL = 100_000
"""Parameters below which waking a second thread costs more than it saves in a step."""


class Session(BaseSession[PrivacyOptions, ModelOptions, Epoch]):
    """A run with private gradients, or with labels that were released once; see ``BaseSession``."""

    KINDS = (PrivacyOptions, ModelOptions)
    EPOCH = Epoch
    RUN_OPTIONS = frozenset(f.name for f in fields(RunOptions))
    OPS = ("clip.clip_sum", "update.step")
    FORMAT = checkpoint.FORMAT

    steps: TrainingSteps
    audited: AuditedStep | None = None
    """The findings of the audit of the run's step; None if no audit was requested."""

    def _read(self) -> None:
        privacy = self.options.privacy
        self.read_data: data.Dataset = privacy.load(privacy.data)
        self.data: data.Dataset = self.read_data  # later with the labels that a mechanism released
        self.noise_source = named.source_of(self.options.run.noise_source)
        self.ranges = self._ranges()

    def _ranges(self) -> PrivateRanges | None:
        """Return the private ranges that will be released; None where none are wanted."""
        privacy, encoding = self.options.privacy, self.data.encoding
        if privacy.private_ranges is None or encoding is None:
            return None
        counts = RangeCounts.for_epsilon(
            privacy.private_ranges,
            privacy.delta,
            columns=len(encoding.private),
            neighbouring="replace_one" if privacy.sampling == "fixed" else "add_remove",
        )
        return PrivateRanges(
            counts, privacy.private_ranges, encoding.private, encoding.private_places
        )

    def data_in_words(self) -> str:
        """Return what was read, before any budget is spent; empty for data without columns."""
        data = self.data
        if data.encoding is None:
            return ""
        rows = f"{len(data.x_train)} rows to train on, {len(data.x_test)} held out"
        text = f"{data.source}: {rows}; {data.encoding.in_words()}"
        return text if self.ranges is None else f"{text}; {self.ranges.in_words()}"

    def public_facts(self) -> dict[str, Any]:
        """Return the public facts of the rows."""
        return self.data.public_facts()

    def _prepare(self, saved: Mapping[str, Any] | None) -> None:
        privacy, run = self.options.privacy, self.options.run
        model = self._new_model()
        rows = len(self.data.x_train)
        batch_size = privacy.batch_of(rows)
        steps_per_epoch = rows // batch_size
        key = privacy.key()
        batches = make_batches(
            privacy.sampling,
            dataset_size=rows,
            batch_size=batch_size,
            steps=privacy.epochs * steps_per_epoch,
            key=key,
        )
        sampling: dict[str, Any] = {
            "sampling": privacy.sampling,
            "sample_rate": batches.sample_rate,
            "dataset_size": rows,
        }
        run_facts = Run(
            model=model,
            row_shape=self.data.row_shape,
            classes=self.data.classes,
            steps=batches.steps,
            sample_rate=batches.sample_rate,
            rows=rows,
            batch_size=batch_size,
            delta=privacy.delta,
            lr=self.options.model.lr,
        )
        dimension = sum(p.numel() for p in model.parameters())
        mechanism = self._mechanism(run_facts, saved, dimension, sampling)
        self.mechanism = mechanism
        local = isinstance(mechanism, LabelMechanism)
        if local and self.ranges is not None:
            raise PrivacyError(
                "private_ranges",
                expected="a mechanism that protects features",
                got=f"{mechanism.name}, which protects labels alone",
                remedy="Give public ranges with --ranges.",
            )
        if isinstance(mechanism, LabelMechanism):
            self.data = (
                label_privacy.released(mechanism, self.data, key)
                if saved is None
                else replace(self.data, y_train=saved["responses"])
            )
        device = training_device(run.device)
        model = model.to(device)
        step = DPStep(
            label_privacy.WITHOUT_NOISE if local else mechanism,
            [p.detach() for p in model.parameters()],
            expected_batch_size=batches.expected_batch_size,
            optimizer=self.options.model.rule(),
            unsafe_seed=privacy.unsafe_seed,
            rounds=privacy.rounds,
            backend=run.backend,
            noise_source=self.noise_source,
            gradients="batched",
            **sampling,
        )
        noise_sources.check(self.noise_source, mechanism)
        hooks.check(mechanism, step.optimizer, sampling=privacy.sampling, batch_size=batch_size)
        before, after = hooks.around(mechanism)
        after(step)  # where parameters are projected, the start lies in the set too
        if run.audit is not None:
            noise_sources.check_audit(self.noise_source)
            self.subject = required(self.auditor, run.audit).subject_of(
                mechanism,
                model,
                row_shape=self.data.row_shape,
                classes=self.data.classes,
                backend=run.backend,
            )
        if privacy.epsilon is not None and not local:
            step.calibrated_to = CALIBRATED_TO[privacy.mode]
        self.steps = TrainingSteps(
            data=self.data.to(device),
            model=model,
            step=step,
            batches=batches,
            steps_per_epoch=steps_per_epoch,
            delta=privacy.delta,
            max_physical_batch_size=run.max_physical_batch_size,
            epsilon_points=0 if local else EPSILON_POINTS,
            loss=(
                label_privacy.unbiased_loss(mechanism)
                if isinstance(mechanism, LabelMechanism)
                else summed_cross_entropy
            ),
            before=before,
            after=after,
        )

    def _new_model(self) -> torch.nn.Module:
        """Return the model with its initial parameters."""
        return models.build(
            self.options.model.model,
            row_shape=self.data.row_shape,
            classes=self.data.classes,
            init_seed=self.options.model.init_seed,
            linear=self.options.model.linear,
            norm=self.options.model.norm,
        )

    def _mechanism(
        self,
        facts: Run,
        saved: Mapping[str, Any] | None,
        dimension: int,
        sampling: Mapping[str, Any],
    ) -> Mechanism:
        """Return the mechanism with its noise: as saved, as given, or calibrated."""
        privacy = self.options.privacy
        mechanism, open_noise = make(
            privacy.mechanism,
            facts,
            mode=privacy.mode,
            settings=privacy.settings,
            epsilon=privacy.epsilon,
            noise_multiplier=privacy.noise_multiplier,
            max_grad_norm=privacy.max_grad_norm,
            clipping=privacy.clipping,
            arithmetic=privacy.arithmetic,
        )
        if not open_noise:
            return mechanism
        source = self.noise_source
        noise_sources.check_target(source)
        if saved is not None:
            return mechanism.with_noise_multiplier(saved["noise_multiplier"])
        assert privacy.epsilon is not None
        return accounting.calibrate(
            mechanism,
            variation=0.0 if source is None else source.variation,
            preparations=[] if self.ranges is None else [self.ranges.entry],
            to=CALIBRATED_TO[privacy.mode],
            target_epsilon=privacy.epsilon,
            steps=facts.steps,
            delta=privacy.delta,
            dimension=dimension,
            **sampling,
        )

    def _load(self, saved: Mapping[str, Any]) -> None:
        self.training.load_state_dict(dict(saved))
        if self.ranges is not None and saved["ranges"] is not None:
            self.ranges.known = [ColumnRange(*bounds) for bounds in saved["ranges"]]
            self._scale_rows(self.ranges)

    def _state(self) -> dict[str, Any]:
        known = None if self.ranges is None else self.ranges.known
        return {
            "noise_multiplier": self.noise_multiplier,
            "ranges": None if known is None else [list(bounds) for bounds in known],
            "responses": self.data.y_train if self.local else None,
            **self.training.state_dict(),
        }

    def _scale_rows(self, ranges: PrivateRanges) -> None:
        """Bring the columns with a private range to [-1, 1], wherever the rows are held."""
        self.read_data, self.data = ranges.scaled(self.read_data), ranges.scaled(self.data)
        self.steps.data = self.data.to(self.steps.data.x_train.device)

    @property
    def training(self) -> TrainingSteps:
        """The steps of the run."""
        return self.steps

    @property
    def threads(self) -> int:
        """The number of threads of the training steps; the noise does not depend on it."""
        if self.options.run.threads is not None:
            return self.options.run.threads
        return 1 if self.training.step.plan.dimension < SMALL_MODEL else torch.get_num_threads()

    @property
    def local(self) -> bool:
        """Whether the labels were released once and the steps spend nothing."""
        return isinstance(self.mechanism, LabelMechanism)

    @property
    def noise_multiplier(self) -> float | None:
        """The noise multiplier of every step; None where the steps add no noise."""
        return None if self.local else self.mechanism.noise_multiplier

    def _begin(self) -> None:
        """Audit first, then release ranges: nothing is released if the audit fails."""
        if self.options.run.audit is not None:
            runs, delta = self.options.run.audit, self.options.privacy.delta
            self.audited = required(self.auditor, runs).audit(self.subject, runs, delta)
        if self.ranges is not None and self.ranges.known is None:
            # Recorded first: a release that fails half-way counts as one that happened.
            self.steps.step.ledger.record_preparation(self.ranges.entry)
            self.ranges.release(self.data.x_train, self.options.privacy.key())
            self._scale_rows(self.ranges)

    def _end(self) -> None:
        """Close the noise source; an interrupted run keeps its noise for the steps left."""
        if self.noise_source is not None:
            self.noise_source.close()

    def describe(self, epoch: Epoch) -> str:
        """Return one line on the run after an epoch, for a progress bar."""
        text = f"held-out loss {epoch.heldout_loss:.3f}, accuracy {epoch.heldout_accuracy:.1%}"
        known = [past for past in self.history if past.shown_epsilon is not None]
        if known and known[-1].shown_epsilon is not None:
            secret = " if seed secret" if known[-1].epsilon_if_seed_secret is not None else ""
            text += f"; epsilon{secret} {accounting.shown_bound(known[-1].shown_epsilon)}"
        if self.options.run.diagnostics:
            loss = self.training.diagnostics.training_loss[-1]
            text += f", training loss {loss:.3f} ({DIAGNOSTICS_NOTE})"
        return text

    def _facts(self) -> dict[str, Any]:
        facts = self.training.step.report(self.options.privacy.delta)
        if isinstance(self.mechanism, LabelMechanism):
            facts |= label_privacy.report(self.mechanism, seeded=self.seeded)
        if self.audited is None:
            return facts | NOT_AUDITED
        return facts | self.audited.facts(
            self.training.step,
            steps_per_epoch=self.training.steps_per_epoch,
            delta=self.options.privacy.delta,
        )

    def _measured(self) -> dict[str, Any]:
        model, data = self.training.model, self.training.data
        loss, accuracy = models.evaluate(model, data.x_test, data.y_test)
        return {
            "noise_multiplier": self.noise_multiplier,
            "max_grad_norm": None if self.local else self.options.privacy.max_grad_norm,
            "data_warnings": list(self.data.warnings),
            "private_ranges": None if self.ranges is None else self.ranges.facts(),
            "test_accuracy": accuracy,
            "majority_accuracy": self.data.majority_accuracy,
            "test_loss": loss,
            **of_scores(models.scores(model, data.x_test)).facts(),
            "test_note": "held-out rows are not protected by epsilon",
            "non_private_ceiling": self._ceiling(),
            "backend": self.backend,
            "device": str(training_device(self.options.run.device)),
        }

    def _ceiling(self) -> dict[str, Any] | None:
        """Return the accuracy without privacy, once the run is complete and only if requested."""
        if not self.options.run.ceiling or not self.steps.finished:
            return None
        device = training_device(self.options.run.device)
        return ceiling.non_private_ceiling(
            self.training, self._new_model().to(device), self.read_data.to(device)
        )

    def privacy_warnings(self, certificate: Mapping[str, Any] | None = None) -> list[str]:
        """Return warnings; that of a requested ceiling among them."""
        found = super().privacy_warnings(certificate)
        return [*found, ceiling.WARNING] if self.options.run.ceiling else found

    def _example(self) -> tuple[Callable[[], object], str, int]:
        step = self.training.step
        of = f"one step of {round(step.expected_batch_size)} generated samples"
        return self.training.example(self.options.run.noise_source), of, step.plan.dimension

    def _sections(self) -> dict[str, Any]:
        """Return training losses and counts, only where they were requested."""
        if not self.options.run.diagnostics:
            return {}
        seen = asdict(self.training.diagnostics)
        nonfinite = self.training.step.nonfinite
        found = {"note": DIAGNOSTICS_NOTE, **seen, "nonfinite_samples": nonfinite}
        return {"diagnostics": found}

    def _drawn(self, summary: Mapping[str, Any]) -> FigureSpec:
        return gradient_report.drawn(summary, self.history)

    def _shown(self, summary: Mapping[str, Any]) -> SummaryTable:
        return gradient_report.shown(summary)
