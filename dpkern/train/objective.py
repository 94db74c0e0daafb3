"""One call of ``dpkern train`` for a system that perturbs its loss: an autoencoder of records."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from .. import __version__, _dispatch
from .._validate import require
from ..backends import cpu
from ..errors import InvalidInput, PrivacyError
from ..objective import records as tables
from ..objective.methods import Schedule
from ..objective.records import GENERATED, Records
from ..objective.spof import Training
from ..rng import Key
from . import checkpoint, files, objective_mechanism, objective_report
from .loop import deferred_signals
from .machine import backend_in_use, torch_threads
from .objective_options import CodeOptions, ObjectiveOptions, RecordOptions, read_bounds
from .options import RunOptions, only
from .report import plain, write_report

GENERATED_RECORDS = 1000
THREADS = 1
"""A step multiplies matrices of a few numbers: waking a second thread costs more."""


@dataclass(frozen=True, kw_only=True)
class Reconstruction:
    """State after an epoch, on held-out records.

    ``accuracy`` is ``100 (1 - mean |x - xhat|)``, ``mse`` the mean of ``||x - xhat||^2`` and
    ``bce`` the mean cross-entropy of a record.
    """

    epoch: int
    step: int
    heldout_accuracy: float
    heldout_mse: float
    heldout_bce: float
    diverged: bool


class ObjectiveSession:
    """A run that has been checked and can start; see ``Session``, whose files it writes too.

    Args:
        given: the options by name, as in ``RecordOptions``, ``CodeOptions`` and ``RunOptions``.

    Raises:
        DPKernError: for everything that is wrong with options, data, output or checkpoint.
    """

    OPTIONS: ClassVar[tuple[type[Any], ...]] = (RecordOptions, CodeOptions, RunOptions)

    def __init__(self, given: Mapping[str, Any]) -> None:
        saved: dict[str, Any] | None = None
        run = RunOptions(**only(RunOptions, given))
        if run.resume and run.out is not None:
            path = run.out / files.CHECKPOINT
            saved = checkpoint.read(path, kind=checkpoint.OBJECTIVE_FORMAT)
            self.options = ObjectiveOptions.from_saved(saved["options"], given)
        else:
            self.options = ObjectiveOptions.from_given(given)
        self.out = files.new_directory() if run.out is None else run.out
        files.check_output(self.out, overwrite=run.overwrite, resume=run.resume)
        if run.figure:
            require("matplotlib", extra="demo")
        self.backend = backend_in_use(run.backend)
        privacy, model = self.options.privacy, self.options.model
        self.mechanism = objective_mechanism.make(
            privacy.mechanism,
            mode=privacy.mode,
            settings=privacy.settings,
            epsilon=privacy.epsilon,
        )
        self.records = load(privacy)
        if model.code >= self.records.features:
            raise InvalidInput(
                "code",
                expected=f"fewer than the {self.records.features} features",
                got=model.code,
                remedy="A code as long as its record compresses nothing; pass a smaller --code.",
            )
        self.history: list[Reconstruction] = []
        self.seconds = 0.0
        self.between_steps = True
        self.training = Training(
            self.records,
            self.mechanism,
            Schedule(lr=model.lr, epochs=privacy.epochs),
            seeds=[model.init_seed],
            sigma=privacy.sigma,
            code=model.code,
            keys=[_key(privacy)],
        )
        if saved is not None:
            self._resume(saved)

    def _resume(self, saved: Mapping[str, Any]) -> None:
        facts = plain(self.records.public_facts())
        changed = sorted(name for name in facts if facts[name] != saved["public"].get(name))
        if changed:
            raise PrivacyError(
                "data",
                expected=", ".join(f"{name} {saved['public'].get(name)}" for name in changed),
                got=", ".join(f"{name} {facts[name]}" for name in changed),
                remedy="Resume with the data that the run was started with.",
            )
        self.training.load_state_dict(saved["training"])
        self.history = [Reconstruction(**record) for record in saved["history"]]
        self.seconds = float(saved["seconds"])
        if self.finished and (self.out / files.REPORT).exists():
            raise InvalidInput(
                "resume",
                expected="a run with steps left",
                got=f"{self.out}, complete after {self.steps_done} steps",
                remedy="Start a new run in another --out.",
            )

    @property
    def steps_done(self) -> int:
        return self.training.step_number

    @property
    def steps_total(self) -> int:
        return self.training.steps

    @property
    def diverged(self) -> bool:
        """Whether a logit left the guard's bounds: the weights stay as they were then."""
        return bool(self.training.diverged.any())

    @property
    def finished(self) -> bool:
        return self.steps_done >= self.steps_total or self.diverged

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
        on_epoch: Callable[[Reconstruction], None] | None = None,
    ) -> dict[str, Any]:
        """Train to the end, write everything, return the summary.

        Raises:
            KeyboardInterrupt: interrupted between steps; nothing has been written yet.
        """
        threads = self.options.run.threads or THREADS
        started = time.perf_counter()
        try:
            with torch_threads(threads), _dispatch.use(self.backend), deferred_signals() as stop:
                while not self.finished:
                    self._step(on_step, on_epoch)
                    if stop.is_set() and not self.finished:
                        raise KeyboardInterrupt
        finally:
            self.seconds += time.perf_counter() - started
        summary = self.summary()
        self.save()
        if self.options.run.figure:
            self._draw(summary)
        # Last: where a report stands, everything else does too.
        write_report(self.out / files.REPORT, summary, self.history)
        return summary

    def _step(
        self,
        on_step: Callable[[int], None] | None,
        on_epoch: Callable[[Reconstruction], None] | None,
    ) -> None:
        self.between_steps = False
        self.training.step()
        complete = self.steps_done % self.training.records_each == 0 or self.diverged
        if complete:
            self.history.append(self._measured())
        self.between_steps = True
        if on_step is not None:
            on_step(self.steps_done)
        if complete and on_epoch is not None:
            on_epoch(self.history[-1])

    def _measured(self) -> Reconstruction:
        outcome = self.training.outcome()
        return Reconstruction(
            epoch=-(-self.steps_done // self.training.records_each),
            step=self.steps_done,
            heldout_accuracy=float(outcome.accuracy[0]),
            heldout_mse=float(outcome.mse[0]),
            heldout_bce=float(outcome.bce[0]),
            diverged=self.diverged,
        )

    def describe(self, epoch: Reconstruction) -> str:
        """One line on the run after an epoch, for a progress bar."""
        text = f"held-out accuracy {epoch.heldout_accuracy:.2f} %, mse {epoch.heldout_mse:.4f}"
        return text + (", diverged" if epoch.diverged else "")

    def save(self) -> Path:
        """Write the checkpoint and return its path."""
        content = {
            "options": self.options.saved(),
            "public": plain(self.records.public_facts()),
            "training": self.training.state_dict(),
            "history": [asdict(epoch) for epoch in self.history],
            "seconds": self.seconds,
        }
        checkpoint.write(self.checkpoint_path, content, kind=checkpoint.OBJECTIVE_FORMAT)
        return self.checkpoint_path

    def summary(self) -> dict[str, Any]:
        """The run so far in JSON terms."""
        facts = objective_mechanism.facts(
            self.mechanism,
            visits=self.training.visits,
            seeded=self.seeded,
            records=self.records,
        )
        certificate = facts.pop("certificate")
        now = self._measured()
        summary: dict[str, Any] = {
            "statement": objective_report.statement(facts, certificate),
            **facts,
            "delta": certificate["delta"],
            "relation": certificate["relation"],
            "accountant": certificate["accountant"],
            "certified_for": certificate["certified_for"],
            "noise": objective_report.noise(self.mechanism, self.records, self.training),
            "test_accuracy": now.heldout_accuracy,
            "test_mse": now.heldout_mse,
            "test_bce": now.heldout_bce,
            "test_note": "held-out records are not protected by epsilon",
            "diverged": now.diverged,
            "steps": self.steps_done,
            "data_notes": list(self.records.notes),
            "backend": self.backend,
            "seconds": round(self.seconds, 3),
            "report": self.out / files.REPORT,
            "checkpoint": self.checkpoint_path,
            "figure": self.out / files.FIGURE if self.options.run.figure else None,
            "certificate": certificate,
            "public": self.records.public_facts(),
            "options": self.options.saved(),
            "environment": {
                "dpkern": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
                "isa": cpu.build_config().get("isa") if self.backend == "cpu" else None,
                "threads": self.options.run.threads or THREADS,
            },
        }
        ready: dict[str, Any] = plain(summary)
        return ready

    def _draw(self, summary: Mapping[str, Any]) -> None:
        objective_report.write_figure(
            self.out / files.FIGURE,
            self.history,
            title=f"{summary['mechanism']}, {summary['mode']}, on {self.records.source}: "
            f"claimed epsilon {summary['epsilon_claimed']}, "
            f"certified {summary['epsilon_certified']}",
        )


def load(privacy: RecordOptions) -> Records:
    """The records of these options."""
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


def _key(privacy: RecordOptions) -> Key:
    if privacy.unsafe_seed is None:
        return Key.fresh(privacy.rounds)
    return Key.from_unsafe_seed(privacy.unsafe_seed, privacy.rounds)
