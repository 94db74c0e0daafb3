"""One call of ``dpkern train`` for AdLM or ILM: everything is released once, then trained on."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import __version__
from .._validate import require
from ..errors import InvalidInput, PrivacyError
from ..mechanisms import ILM, AdLM
from ..nn.polynomial import Coefficients
from ..objective import adlm as trainer
from ..objective.adlm import AdlmTraining, Released, Schedule
from ..objective.adlm_data import Labelled
from ..rng import Key
from . import adlm_report, checkpoint, data, files
from .adlm_options import AdlmOptions, BoundedOptions, LabelledOptions
from .loop import deferred_signals
from .machine import torch_threads
from .mechanism import read_settings
from .options import RunOptions, only
from .report import plain, write_report
from .session import batch_size_of

TYPES: dict[str, type[AdLM]] = {"adlm": AdLM, "ilm": ILM}
DECIDED = ("epsilon", "mode", "setting")
"""Fields with an option of their own, or that follow from the data."""

PRETRAINING = 12
"""Epochs of the network that relevances come from, as for MNIST."""

CLASSES_READ = (
    "the number of classes was read off the labels and counts as public, not covered by epsilon; "
    "pass --classes"
)

_TENSORS = ("inputs", "offset", "bias_noise", "relevance", "betas", "scales")


@dataclass(frozen=True, kw_only=True)
class BoundedEpoch:
    """State after an epoch; ``loss`` is that of the released values, which cost nothing more."""

    epoch: int
    step: int
    heldout_accuracy: float
    loss: float
    diverged: bool


class AdlmSession:
    """A run that has been checked and can start; see ``Session``, whose files it writes too.

    Args:
        given: options by name, as in ``LabelledOptions``, ``BoundedOptions`` and ``RunOptions``.

    Raises:
        DPKernError: for everything that is wrong with options, data, output or checkpoint.
    """

    OPTIONS: ClassVar[tuple[type[Any], ...]] = (LabelledOptions, BoundedOptions, RunOptions)

    def __init__(self, given: Mapping[str, Any]) -> None:
        saved: dict[str, Any] | None = None
        run = RunOptions(**only(RunOptions, given))
        if run.resume and run.out is not None:
            path = run.out / files.CHECKPOINT
            saved = checkpoint.read(path, kind=checkpoint.OBJECTIVE_FORMAT)
            self.options = AdlmOptions.from_saved(saved["options"], given)
        else:
            self.options = AdlmOptions.from_given(given)
        self.out = files.new_directory() if run.out is None else run.out
        files.check_output(self.out, overwrite=run.overwrite, resume=run.resume)
        if run.figure:
            require("matplotlib", extra="demo")
        privacy = self.options.privacy
        self.data, self.warnings = load(privacy, privacy.data)
        self.history: list[BoundedEpoch] = []
        self.seconds = 0.0
        self.between_steps = True
        with torch_threads(self.threads):
            self.training = self._prepare(saved)
        if saved is not None:
            self._resume(saved)

    def _prepare(self, saved: Mapping[str, Any] | None) -> AdlmTraining:
        privacy, model = self.options.privacy, self.options.model
        shape = self.data.row_shape
        architecture = model.architecture(shape)
        network = trainer.build(architecture, shape, self.data.classes, seed=model.init_seed)
        rows = len(self.data.x)
        kind = TYPES[privacy.mechanism]
        assert privacy.epsilon is not None  # checked
        self.mechanism = kind(
            epsilon=privacy.epsilon,
            mode=privacy.mode,
            setting=trainer.setting(
                network, shape, records=rows, batch=batch_size_of(privacy.batch_size, rows)
            ),
            **read_settings(kind, privacy.settings, decided=DECIDED),
        )
        self._check_public()
        key = (
            Key.fresh(privacy.rounds)
            if privacy.unsafe_seed is None
            else Key.from_unsafe_seed(privacy.unsafe_seed, privacy.rounds)
        )
        if saved is None:
            relevance = self._relevance(architecture) if self.mechanism.adaptive else None
            released = trainer.release(self.mechanism, self.data, key, relevance=relevance)
        else:
            self._check_facts(saved)
            released = self._restored(saved["training"]["released"])
        return AdlmTraining(
            self.data,
            [released],
            [network],
            Schedule(lr=model.lr, epochs=privacy.epochs),
            seeds=[model.init_seed],
            keys=[key],
        )

    def _check_public(self) -> None:
        """Public records where relevances come from them, and only there."""
        privacy, mechanism = self.options.privacy, self.mechanism
        needed = mechanism.adaptive and mechanism.relevance_from != "trained_on_data"
        if needed and _same(privacy.public_data, privacy.data):
            raise InvalidInput(
                "public_data",
                expected="other records than those that are protected",
                got=privacy.public_data,
                remedy="Name public records of the same kind.",
            )
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
        """Before noise; of the training rows or of public ones, as the mechanism says."""
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
                raise InvalidInput(
                    "public_data",
                    expected="other records than those that are protected",
                    got="the same rows",
                    remedy="Name public records of the same kind.",
                )
        network: nn.Sequential = trainer.pretrained(
            seen,
            architecture,
            epochs=PRETRAINING,
            seed=self.options.model.init_seed,
            input_range=mechanism.input_range,
        )
        of = seen if mechanism.relevance_from == "public" else self.data
        return trainer.relevance_of(mechanism, network, of)

    def _check_facts(self, saved: Mapping[str, Any]) -> None:
        facts = plain(self.public_facts())
        changed = sorted(name for name in facts if facts[name] != saved["public"].get(name))
        if changed:
            raise PrivacyError(
                "data",
                expected=", ".join(f"{name} {saved['public'].get(name)}" for name in changed),
                got=", ".join(f"{name} {facts[name]}" for name in changed),
                remedy="Resume with the data that the run was started with.",
            )

    def _resume(self, saved: Mapping[str, Any]) -> None:
        self.training.load_state_dict(saved["training"]["state"])
        self.history = [BoundedEpoch(**record) for record in saved["history"]]
        self.seconds = float(saved["seconds"])
        if self.training.finished and (self.out / files.REPORT).exists():
            raise InvalidInput(
                "resume",
                expected="a run with steps left",
                got=f"{self.out}, complete after {self.steps_done} steps",
                remedy="Start a new run in another --out.",
            )

    def _kept(self) -> dict[str, Any]:
        """What was released, so that a resumed run releases nothing twice. True labels, which the
        feature_expanded form reads at every visit, stay out."""
        (released,) = self.training.released
        kept: dict[str, Any] = {name: getattr(released, name) for name in _TENSORS}
        made = released.coefficients
        kept["targets"] = None if released.visit_scale is not None else released.targets
        kept["coefficients"] = None if made is None else [made.linear, made.quadratic]
        return kept

    def _restored(self, kept: Mapping[str, Any]) -> Released:
        made, targets, scale = kept["coefficients"], kept["targets"], None
        if self.mechanism.coefficient_form == "feature_expanded":
            scale = self.mechanism.label_scale
            targets = F.one_hot(self.data.y, self.data.classes).float()
        constant = float(torch.log(torch.tensor(2.0, dtype=torch.float64)))
        return Released(
            mechanism=self.mechanism,
            **{name: kept[name] for name in _TENSORS},
            targets=targets,
            coefficients=None if made is None else Coefficients(constant, *made),
            visit_scale=scale,
        )

    @property
    def threads(self) -> int:
        """One: networks this small only wait for a second."""
        return self.options.run.threads or 1

    @property
    def steps_done(self) -> int:
        return self.training.step

    @property
    def steps_total(self) -> int:
        return self.training.total_steps

    @property
    def seeded(self) -> bool:
        return self.options.privacy.unsafe_seed is not None

    @property
    def checkpoint_path(self) -> Path:
        return self.out / files.CHECKPOINT

    def run(
        self,
        *,
        on_step: Callable[[int], None] | None = None,
        on_epoch: Callable[[BoundedEpoch], None] | None = None,
    ) -> dict[str, Any]:
        """Train to the end, write everything, return the summary.

        Raises:
            KeyboardInterrupt: interrupted between steps; nothing has been written yet.
        """
        started = time.perf_counter()
        try:
            with torch_threads(self.threads), deferred_signals() as stop:

                def after(done: int) -> None:
                    self.between_steps = True
                    if on_step is not None:
                        on_step(done)
                    if stop.is_set() and not self.training.finished:
                        raise KeyboardInterrupt
                    self.between_steps = self.training.finished

                def measured(epoch: int, accuracy: Tensor) -> None:
                    self.history.append(self._epoch(epoch, float(accuracy[0])))
                    if on_epoch is not None:
                        on_epoch(self.history[-1])

                self.between_steps = self.training.finished
                self.training.run(on_step=after, on_epoch=measured)
        finally:
            self.seconds += time.perf_counter() - started
        summary = self.summary()
        self.save()
        if self.options.run.figure:
            title = (
                f"{summary['mechanism']}, {summary['mode']}, on {self.data.source}: claimed "
                f"epsilon {summary['epsilon_claimed']}, certified {summary['epsilon_certified']}"
            )
            adlm_report.write_figure(self.out / files.FIGURE, self.history, title=title)
        # Last: where a report stands, everything else does too.
        write_report(self.out / files.REPORT, summary, self.history)
        return summary

    def _epoch(self, epoch: int, accuracy: float) -> BoundedEpoch:
        return BoundedEpoch(
            epoch=epoch,
            step=self.steps_done,
            heldout_accuracy=accuracy,
            loss=float(self.training.outcome().loss[0, -1]),
            diverged=bool(self.training.diverged.any()),
        )

    def describe(self, epoch: BoundedEpoch) -> str:
        """One line on the run after an epoch, for a progress bar."""
        text = f"held-out accuracy {epoch.heldout_accuracy:.2f} %"
        return text + (", diverged" if epoch.diverged else "")

    def save(self) -> Path:
        """Write the checkpoint and return its path."""
        content = {
            "options": self.options.saved(),
            "public": plain(self.public_facts()),
            "training": {"state": self.training.state_dict(), "released": self._kept()},
            "history": [asdict(epoch) for epoch in self.history],
            "seconds": self.seconds,
        }
        checkpoint.write(self.checkpoint_path, content, kind=checkpoint.OBJECTIVE_FORMAT)
        return self.checkpoint_path

    def public_facts(self) -> dict[str, Any]:
        """What the privacy statement takes as public."""
        return {
            "data": self.data.source,
            "public_data": self.options.privacy.public_data,
            "training_rows": len(self.data.x),
            "heldout_rows": len(self.data.x_test),
            "row_shape": list(self.data.row_shape),
            "classes": self.data.classes,
        }

    def summary(self) -> dict[str, Any]:
        """The run so far in JSON terms."""
        visits = -(-self.steps_done // self.training.steps_per_epoch)
        facts = adlm_report.facts(self.mechanism, visits=visits, seeded=self.seeded)
        certificate = facts.pop("certificate")
        with torch_threads(self.threads):
            accuracy = float(self.training.accuracy()[0]) if self.steps_done else None
        summary: dict[str, Any] = {
            "statement": adlm_report.statement(facts, certificate),
            **facts,
            "delta": certificate["delta"],
            "relation": certificate["relation"],
            "accountant": certificate["accountant"],
            "certified_for": certificate["certified_for"],
            "noise": adlm_report.noise(self.mechanism, self.training.released[0].scales),
            "test_accuracy": accuracy,
            "test_note": "held-out rows are not protected by epsilon",
            "diverged": bool(self.training.diverged.any()),
            "steps": self.steps_done,
            "data_warnings": list(self.warnings),
            "seconds": round(self.seconds, 3),
            "report": self.out / files.REPORT,
            "checkpoint": self.checkpoint_path,
            "figure": self.out / files.FIGURE if self.options.run.figure else None,
            "certificate": certificate,
            "public": self.public_facts(),
            "options": self.options.saved(),
            "environment": {
                "dpkern": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
                "threads": self.threads,
            },
        }
        ready: dict[str, Any] = plain(summary)
        return ready


def load(privacy: LabelledOptions, source: str) -> tuple[Labelled, tuple[str, ...]]:
    """These rows, checked to be in [0, 1] and of several classes, and warnings about them."""
    found = data.load(
        source,
        feature_scale=privacy.feature_scale,
        classes=privacy.classes,
        test_fraction=privacy.test_fraction,
        split_seed=privacy.split_seed,
    )
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


def _within(rows: Tensor, others: Tensor) -> bool:
    """Whether every row is among the others."""
    known = {row.numpy().tobytes() for row in others.flatten(1)}
    return all(row.numpy().tobytes() in known for row in rows.flatten(1))
