"""One call of ``dpkern train``: check everything, train, write everything."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from .. import __version__, accounting
from .._validate import require
from ..backends import cpu
from ..engine.sampling import make_batches
from ..errors import InvalidInput, PrivacyError
from ..mechanisms import ProjectedSGD, RandomizedResponse
from ..mechanisms.base import Mechanism
from ..rng import Key
from ..step import DPStep
from . import ahead, checkpoint, data, files, models, projected, report, responses
from .loop import EPSILON_POINTS, Training, summed_cross_entropy
from .machine import backend_in_use, torch_threads
from .mechanism import CALIBRATED_TO, Run, make
from .options import ModelOptions, Options, PrivacyOptions, RunOptions, only
from .report import Epoch

DEFAULT_BATCH_SIZE = 400
SMALL_MODEL = 100_000
"""With fewer parameters a step takes milliseconds, and waking a second thread costs more."""


class Session:
    """A run that has been checked and can start.

    Making one reads the data and calibrates the noise, and writes nothing. ``run`` trains and
    writes checkpoint, figure and report; after a ``KeyboardInterrupt`` ``save`` leaves the
    checkpoint that ``resume=True`` continues.

    Args:
        given: the options by name, as in ``PrivacyOptions``, ``ModelOptions`` and ``RunOptions``;
            those left out take their defaults or, with ``resume``, their saved values.

    Raises:
        DPKernError: for everything that is wrong with options, data, output or checkpoint.
    """

    OPTIONS: ClassVar[tuple[type[Any], ...]] = (PrivacyOptions, ModelOptions, RunOptions)

    def __init__(self, given: Mapping[str, Any]) -> None:
        saved: dict[str, Any] | None = None
        run = RunOptions(**only(RunOptions, given))
        if run.resume and run.out is not None:
            saved = checkpoint.read(run.out / files.CHECKPOINT)
            self.options = Options.from_saved(saved["options"], given)
        else:
            self.options = Options.from_given(given)
        self.out = files.new_directory() if run.out is None else run.out
        files.check_output(self.out, overwrite=run.overwrite, resume=run.resume)
        if run.figure:
            require("matplotlib", extra="demo")
        self.backend = backend_in_use(run.backend)
        self.data = _load(self.options)
        self.noise_source = ahead.source_of(run.noise_source)
        self.training = self._prepare(saved)
        if saved is not None:
            self._resume(saved)

    def _prepare(self, saved: Mapping[str, Any] | None) -> Training:
        privacy, run = self.options.privacy, self.options.run
        model = models.build(
            self.options.model.model,
            row_shape=self.data.row_shape,
            classes=self.data.classes,
            init_seed=self.options.model.init_seed,
            linear=self.options.model.linear,
            norm=self.options.model.norm,
        )
        rows = len(self.data.x_train)
        batch_size = batch_size_of(privacy.batch_size, rows)
        steps_per_epoch = rows // batch_size
        key = (
            Key.from_unsafe_seed(privacy.unsafe_seed, privacy.rounds)
            if privacy.unsafe_seed is not None
            else Key.fresh(privacy.rounds)
        )
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
        local = isinstance(mechanism, RandomizedResponse)
        if isinstance(mechanism, RandomizedResponse):
            self.data = (
                responses.released(mechanism, self.data, key)
                if saved is None
                else replace(self.data, y_train=saved["responses"])
            )
        step = DPStep(
            responses.WITHOUT_NOISE if local else mechanism,
            [p.detach() for p in model.parameters()],
            expected_batch_size=batches.expected_batch_size,
            optimizer=self.options.model.rule(),
            unsafe_seed=privacy.unsafe_seed,
            rounds=privacy.rounds,
            backend=run.backend,
            noise_source=self.noise_source,
            **sampling,
        )
        ahead.check(self.noise_source, mechanism)
        before, after = None, None
        if isinstance(mechanism, ProjectedSGD):
            projected.check(step.optimizer, sampling=privacy.sampling, batch_size=batch_size)
            before, after = projected.hooks(mechanism)
            after(step)  # the start lies in the set too
        if privacy.epsilon is not None and not local:
            step.calibrated_to = CALIBRATED_TO[privacy.mode]
        return Training(
            data=self.data,
            model=model,
            step=step,
            batches=batches,
            steps_per_epoch=steps_per_epoch,
            delta=privacy.delta,
            max_physical_batch_size=run.max_physical_batch_size,
            epsilon_points=0 if local else EPSILON_POINTS,
            loss=(
                responses.unbiased_loss(mechanism)
                if isinstance(mechanism, RandomizedResponse)
                else summed_cross_entropy
            ),
            before=before,
            after=after,
        )

    def _mechanism(
        self,
        facts: Run,
        saved: Mapping[str, Any] | None,
        dimension: int,
        sampling: Mapping[str, Any],
    ) -> Mechanism:
        """The mechanism with its noise: as saved, as given, or calibrated."""
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
        if saved is not None:
            return mechanism.with_noise_multiplier(saved["noise_multiplier"])
        assert privacy.epsilon is not None
        return accounting.calibrate(
            mechanism,
            to=CALIBRATED_TO[privacy.mode],
            target_epsilon=privacy.epsilon,
            steps=facts.steps,
            delta=privacy.delta,
            dimension=dimension,
            **sampling,
        )

    def _resume(self, saved: Mapping[str, Any]) -> None:
        facts = self.data.public_facts()
        changed = sorted(name for name in facts if facts[name] != saved["public"][name])
        if changed:
            raise PrivacyError(
                "data",
                expected=", ".join(f"{name} {saved['public'][name]}" for name in changed),
                got=", ".join(f"{name} {facts[name]}" for name in changed),
                remedy="Resume with the data that the run was started with.",
            )
        self.training.load_state_dict(dict(saved))
        if self.training.finished and (self.out / files.REPORT).exists():
            raise InvalidInput(
                "resume",
                expected="a run with steps left",
                got=f"{self.out}, complete after {self.training.step.steps} steps",
                remedy="Start a new run in another --out.",
            )

    @property
    def threads(self) -> int:
        """Threads of the training steps; the noise does not depend on them."""
        if self.options.run.threads is not None:
            return self.options.run.threads
        return 1 if self.training.step.plan.dimension < SMALL_MODEL else torch.get_num_threads()

    @property
    def local(self) -> bool:
        """Whether the labels were released once and the steps spend nothing."""
        return isinstance(self.mechanism, RandomizedResponse)

    @property
    def noise_multiplier(self) -> float | None:
        """Of every step; None where the steps add no noise."""
        return None if self.local else self.mechanism.noise_multiplier

    @property
    def seeded(self) -> bool:
        return self.options.privacy.unsafe_seed is not None

    @property
    def steps_done(self) -> int:
        return self.training.step.steps

    @property
    def steps_total(self) -> int:
        return self.training.batches.steps

    @property
    def between_steps(self) -> bool:
        """Whether the run can be saved as it stands."""
        return self.training.between_steps

    @property
    def checkpoint_path(self) -> Path:
        return self.out / files.CHECKPOINT

    def run(
        self,
        *,
        on_step: Callable[[int], None] | None = None,
        on_epoch: Callable[[Epoch], None] | None = None,
    ) -> dict[str, Any]:
        """Train to the end, write everything, return the summary.

        Raises:
            KeyboardInterrupt: see ``Training.run``; nothing has been written yet.
        """
        with torch_threads(self.threads):
            self.training.run(on_step=on_step, on_epoch=on_epoch)
        if self.noise_source is not None:  # an interrupted run keeps it, for the steps left
            self.noise_source.close()
        summary = self.summary()
        self.save()
        if self.options.run.figure:
            self._draw(summary)
        # Last: where a report stands, everything else does too.
        report.write_report(self.out / files.REPORT, summary, self.training.history)
        return summary

    def describe(self, epoch: Epoch) -> str:
        """One line on the run after an epoch, for a progress bar."""
        text = f"held-out loss {epoch.heldout_loss:.3f}, accuracy {epoch.heldout_accuracy:.1%}"
        known = [past for past in self.training.history if past.shown_epsilon is not None]
        if known:
            secret = " if seed secret" if known[-1].epsilon_if_seed_secret is not None else ""
            text += f"; epsilon{secret} {known[-1].shown_epsilon:.3f}"
        if self.options.run.diagnostics:
            loss = self.training.diagnostics.training_loss[-1]
            text += f", training loss {loss:.3f} ({report.DIAGNOSTICS_NOTE})"
        return text

    def save(self) -> Path:
        """Write the checkpoint and return its path."""
        content = {
            "options": self.options.saved(),
            "noise_multiplier": self.noise_multiplier,
            "public": self.data.public_facts(),
            "responses": self.data.y_train if self.local else None,
            **self.training.state_dict(),
        }
        checkpoint.write(self.checkpoint_path, content)
        return self.checkpoint_path

    def summary(self) -> dict[str, Any]:
        """The run so far in JSON terms; training losses and counts only as diagnostics."""
        training, privacy = self.training, self.options.privacy
        facts = training.step.report(privacy.delta)
        if isinstance(self.mechanism, RandomizedResponse):
            facts |= responses.report(self.mechanism, seeded=self.seeded)
        certificate = facts.pop("certificate")
        loss, accuracy = models.evaluate(training.model, self.data.x_test, self.data.y_test)
        summary: dict[str, Any] = {
            "statement": _statement(facts, certificate, privacy.delta),
            **facts,
            "delta": certificate["delta"],
            "relation": certificate["relation"],
            "accountant": certificate["accountant"],
            "certified_for": certificate["certified_for"],
            "noise_multiplier": self.noise_multiplier,
            "max_grad_norm": None if self.local else privacy.max_grad_norm,
            "data_warnings": list(self.data.warnings),
            "test_accuracy": accuracy,
            "test_loss": loss,
            "test_note": "held-out rows are not protected by epsilon",
            "backend": self.backend,
            "seconds": round(training.seconds, 3),
            "report": self.out / files.REPORT,
            "checkpoint": self.checkpoint_path,
            "figure": self.out / files.FIGURE if self.options.run.figure else None,
            "certificate": certificate,
            "public": self.data.public_facts(),
            "options": asdict(self.options.privacy) | asdict(self.options.model),
            "environment": {
                "dpkern": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
                "isa": cpu.build_config().get("isa") if self.backend == "cpu" else None,
                "threads": self.threads,
            },
        }
        if self.options.run.diagnostics:
            summary["diagnostics"] = {
                "note": report.DIAGNOSTICS_NOTE,
                **asdict(training.diagnostics),
                "nonfinite_samples": training.step.nonfinite,
            }
        plain: dict[str, Any] = report.plain(summary)
        return plain

    def _draw(self, summary: Mapping[str, Any]) -> None:
        label = "epsilon if the seed were secret" if self.seeded else "certified epsilon"
        report.write_figure(
            self.out / files.FIGURE,
            self.training.history,
            title=f"{self.options.model.model} on {self.data.source}, "
            f"{summary['mechanism']}, delta = {summary['delta']:g}",
            epsilon_label=label,
        )


def _statement(facts: Mapping[str, Any], certificate: Mapping[str, Any], delta: float) -> str:
    """The privacy of the run in one sentence."""
    if certificate["epsilon"] != "inf" and certificate["delta"] == 0:
        return (
            f"{certificate['epsilon']:.4g}-differentially private: {certificate['relation']}, "
            f"for {certificate['certified_for']}"
        )
    if certificate["epsilon"] != "inf":
        return (
            f"({certificate['epsilon']:.4g}, {delta:g})-differentially private: "
            f"{certificate['relation']}, for {certificate['certified_for']}"
        )
    if facts.get("epsilon_if_seed_secret", "inf") != "inf":
        return "not private against anyone who knows the seed of the noise"
    return f"not private: {facts['non_private'] or 'nothing can be certified'}"


def _load(options: Options) -> data.Dataset:
    privacy = options.privacy
    return data.load(
        privacy.data,
        feature_scale=privacy.feature_scale,
        classes=privacy.classes,
        test_fraction=privacy.test_fraction,
        split_seed=privacy.split_seed,
    )


def batch_size_of(given: int | None, rows: int) -> int:
    """As given, else ``DEFAULT_BATCH_SIZE``, or all rows where they are fewer."""
    if given is None:
        return min(DEFAULT_BATCH_SIZE, rows)
    if given > rows:
        raise InvalidInput(
            "batch_size",
            expected=f"at most the {rows} training rows",
            got=given,
            remedy="Pass a smaller --batch-size.",
        )
    return given
