"""The life of one call of ``dpkern train``: check everything, train, write everything.

Subclasses are kinds of runs: they say which options a run has, how it reads its data and prepares
its steps, and what it measures and shows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, ClassVar, Generic

from rich.console import Console

from ..base import outputs as files
from ..base.commit import version_with_commit
from ..base.errors import InvalidInput, PrivacyError
from ..base.json import plain
from ..base.report import Report
from ..base.threads import torch_threads
from ..base.validate import require
from ..privacy.accounting import delta_warning
from . import checkpoint, display, report, run_file, step_costs
from .options import M, P, RunOptions, TrainOptions, only
from .page import report_of
from .resources import backend_in_use, environment
from .step_audit import Auditor
from .steps import E, Steps


class BaseSession(ABC, Generic[P, M, E]):
    """A run that has been checked and can start.

    Making one reads the data and calibrates the noise, and writes nothing. ``run`` trains and
    writes checkpoint, figure and report; after a ``KeyboardInterrupt`` ``save`` leaves the
    checkpoint that ``resume=True`` continues.

    Args:
        given: the options by name, as in the classes of ``KINDS`` and ``RunOptions``; those left
            out take their defaults or, with ``resume``, their saved values.
        auditor: audits the run's step where ``audit`` is among the options.
        render: makes the page of a run with a figure. None writes no page.

    Attributes:
        options: all of them.
        out: folder of the results.
        backend: name of the backend that runs the kernels. None means that none can be chosen.
        steps: the result of ``_prepare``.

    Raises:
        DPKernError: for everything that is wrong with options, data, output or checkpoint.
    """

    KINDS: ClassVar[tuple[type[Any], type[Any]]]
    """Classes of the privacy and model options."""
    EPOCH: ClassVar[type[Any]]
    """Class of the records in the history."""
    RUN_OPTIONS: ClassVar[frozenset[str]]
    """Names of the ``RunOptions`` that such a run has."""
    OPS: ClassVar[tuple[str, ...]]
    """Ops that its backend, by option or environment, must have a kernel for."""
    FORMAT: ClassVar[str] = checkpoint.OBJECTIVE_FORMAT

    steps: Steps[E]

    def __init__(
        self,
        given: Mapping[str, Any],
        auditor: Auditor | None = None,
        render: Callable[[Report], str] | None = None,
    ) -> None:
        self.auditor = auditor
        self.render = render
        run = RunOptions(**only(RunOptions, given))
        saved: dict[str, Any] | None = None
        if run.resume and run.out is not None:
            saved = checkpoint.read(run.out / files.CHECKPOINT, kind=self.FORMAT)
        self.options: TrainOptions[P, M] = TrainOptions.read(
            self.KINDS, given, None if saved is None else saved["options"]
        )
        self.out = files.new_directory() if run.out is None else run.out
        files.check_output(self.out, overwrite=run.overwrite, resume=run.resume)
        if run.figure:
            require("matplotlib")
        in_use = backend_in_use(run.backend, self.OPS)  # the environment chooses for every run
        # On a device every call chooses for itself, unless a name was given.
        on_device = run.device is not None and run.device != "cpu"
        self.backend = in_use if "backend" in self.RUN_OPTIONS and not on_device else run.backend
        self._read()
        if saved is not None:
            self._refuse_other_data(saved["public"])
        self._prepare(saved)
        if saved is not None:
            self._load(saved)
            self.steps.history = [self.EPOCH(**record) for record in saved["history"]]
            self.steps.seconds = float(saved["seconds"])
            self._refuse_complete()

    @classmethod
    def known(cls) -> set[str]:
        """Return the names of the options that such a run has."""
        return {f.name for kind in cls.KINDS for f in fields(kind)} | cls.RUN_OPTIONS

    @abstractmethod
    def _read(self) -> None:
        """Read the data, and whatever ``public_facts`` speaks of."""

    def data_in_words(self) -> str:
        """Return what was read, before any budget is spent; empty where there is nothing to say."""
        return ""

    @abstractmethod
    def public_facts(self) -> dict[str, Any]:
        """Return what the privacy statement takes as public; a resumed run must agree with it."""

    @abstractmethod
    def _prepare(self, saved: Mapping[str, Any] | None) -> None:
        """Make mechanism and ``steps``; nothing that a checkpoint kept is released again."""

    @abstractmethod
    def _load(self, saved: Mapping[str, Any]) -> None:
        """Bring the steps to where ``_state`` was taken."""

    @abstractmethod
    def _state(self) -> dict[str, Any]:
        """Return what the checkpoint keeps besides options, public facts and history."""

    @abstractmethod
    def _facts(self) -> dict[str, Any]:
        """Return what was released and what is certified, certificate included."""

    @abstractmethod
    def _measured(self) -> dict[str, Any]:
        """Return the rest of the summary that only such a run has: results, remarks on the data."""

    @abstractmethod
    def _example(self) -> tuple[Callable[[], object], str, int]:
        """Return a function that takes a step like the run's, words for it, and trained values.

        It must release nothing: neither data nor key of the run go into it.
        """

    @abstractmethod
    def _drawn(self, summary: Mapping[str, Any]) -> report.FigureSpec:
        """Return the contents of the figure."""

    @abstractmethod
    def _shown(self, summary: Mapping[str, Any]) -> display.SummaryTable:
        """Return the rows of the table that only such a run has."""

    @abstractmethod
    def describe(self, epoch: E) -> str:
        """Return one line on the run after an epoch, for a progress bar."""

    def _begin(self) -> None:
        """Prepare the first step of this session."""

    def _end(self) -> None:
        """Release what only steps need, after the last one."""

    def _sections(self) -> dict[str, Any]:
        """Return the requested parts of the report by name; they stand at its end."""
        return {}

    def _refuse_other_data(self, public: Mapping[str, Any]) -> None:
        facts = plain(self.public_facts())
        changed = sorted(name for name in facts if facts[name] != public.get(name))
        if changed:
            raise PrivacyError(
                "data",
                expected=", ".join(f"{name} {public.get(name)}" for name in changed),
                got=", ".join(f"{name} {facts[name]}" for name in changed),
                remedy="Resume with the data that the run was started with.",
            )

    def _refuse_complete(self) -> None:
        if self.steps.finished and (self.out / files.REPORT).exists():
            raise InvalidInput(
                "resume",
                expected="a run with steps left",
                got=f"{self.out}, complete after {self.steps_done} steps",
                remedy="Start a new run in another --out.",
            )

    @property
    def threads(self) -> int:
        """The number of torch's threads; the noise does not depend on it.

        Small steps need only one.
        """
        return self.options.run.threads or 1

    @property
    def seeded(self) -> bool:
        """Whether the noise comes from a known seed."""
        return self.options.privacy.unsafe_seed is not None

    @property
    def steps_done(self) -> int:
        return self.steps.done

    @property
    def steps_total(self) -> int:
        return self.steps.total

    @property
    def history(self) -> list[E]:
        return self.steps.history

    @property
    def between_steps(self) -> bool:
        """Whether the run can be saved as it stands."""
        return self.steps.between_steps

    @property
    def checkpoint_path(self) -> Path:
        return self.out / files.CHECKPOINT

    def run(
        self,
        *,
        on_step: Callable[[int], None] | None = None,
        on_epoch: Callable[[E], None] | None = None,
    ) -> dict[str, Any]:
        """Train to the end, write everything, return the summary.

        Raises:
            KeyboardInterrupt: see ``Steps.run``; nothing has been written yet.
        """
        with torch_threads(self.threads):
            self._begin()
            self.steps.run(on_step=on_step, on_epoch=on_epoch)
        self._end()
        summary = self.summary()
        self.save()
        if self.options.run.figure:
            report.write_figure(
                self.out / files.FIGURE,
                self.history,
                self._drawn(summary),
                collapsed=summary.get("collapsed") is True,
            )
        if summary["page"] is not None and self.render is not None:
            drawn, shown = self._drawn(summary), self._shown(summary)
            page = self.render(report_of(summary, self.history, drawn, shown)).encode()
            files.write_atomically(self.out / files.PAGE, lambda file: file.write(page))
        config = run_file.written(self.options, self.known(), version_with_commit()).encode()
        files.write_atomically(self.out / files.CONFIG, lambda file: file.write(config))
        # Last: where a report stands, everything else does too.
        report.write_report(self.out / files.REPORT, summary, self.history)
        return summary

    def save(self) -> Path:
        """Write the checkpoint and return its path."""
        content = {
            "options": self.options.saved(),
            "public": plain(self.public_facts()),
            **self._state(),
            "history": [asdict(epoch) for epoch in self.history],  # type: ignore[call-overload]
            "seconds": self.steps.seconds,
        }
        checkpoint.write(self.checkpoint_path, content, kind=self.FORMAT)
        return self.checkpoint_path

    def summary(self) -> dict[str, Any]:
        """Return the run so far in JSON terms."""
        facts = self._facts()
        certificate = facts.pop("certificate")
        with torch_threads(self.threads):
            measured = self._measured()
        summary: dict[str, Any] = {
            "statement": report.statement(facts, certificate),
            **facts,
            **{name: certificate[name] for name in report.CERTIFIED},
            "warnings": self.privacy_warnings(certificate),
            **measured,
            "costs": self._costs(),
            "seconds": round(self.steps.seconds, 3),
            "report": self.out / files.REPORT,
            "checkpoint": self.checkpoint_path,
            "figure": self.out / files.FIGURE if self.options.run.figure else None,
            "page": self.out / files.PAGE if self.options.run.figure and self.render else None,
            "config": self.out / files.CONFIG,
            "certificate": certificate,
            "public": self.public_facts(),
            "options": self.options.saved(),
            "environment": environment(self.backend, self.threads),
            **self._sections(),
        }
        ready: dict[str, Any] = plain(summary)
        return ready

    def _costs(self) -> dict[str, Any]:
        """Return what one step costs; see ``step_costs``."""
        with torch_threads(self.threads):
            step, of, numbers = self._example()
            return step_costs.costs_of(step, of=of, numbers=numbers)

    @property
    def protected_records(self) -> int:
        """The number of records that are protected."""
        return int(self.public_facts()["training_rows"])

    def privacy_warnings(self, certificate: Mapping[str, Any] | None = None) -> list[str]:
        """Return warnings where the guarantee says less than its numbers seem to; known in advance.

        Args:
            certificate: certificate of the run. None selects the one of the steps so far.
        """
        known = self._facts()["certificate"] if certificate is None else certificate
        found = delta_warning(known["delta"], dataset_size=self.protected_records)
        return [] if found is None else [found]

    def show(self, console: Console, summary: Mapping[str, Any]) -> None:
        """Print the end of a run as a table."""
        display.print_summary(console, summary, self._shown(summary))
