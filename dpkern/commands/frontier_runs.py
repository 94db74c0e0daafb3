"""Train several mechanisms at one certified epsilon, with the same seeds, data, model and steps.

Seed s decides noise, batches and initial parameters of run s, for every mechanism, so that a report
can be made again and mechanisms can be compared run by run. The seeds are known: epsilon is what
each run would certify if its seed were secret.
"""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from ..base.errors import InvalidInput
from ..base.threads import torch_threads
from ..base.validate import choice
from ..bench import guard
from ..engine.named import NAMES
from ..privacy.accounting import shown_bound
from ..train.session import Session

PER_MECHANISM = ("lr", "max_grad_norm", "clipping", "arithmetic")
"""Options that a mechanism may have for itself; other keys are fields of the mechanism."""
CLOSE = 0.98
"""Smallest share of the wanted epsilon that counts as equal: calibration leaves less than this."""
DECIDED = ("mechanism", "mode", "epsilon", "noise_multiplier", "unsafe_seed", "init_seed")
"""Options of a run that the comparison decides."""
RUNS_OF_ITS_OWN = ("out", "resume", "overwrite", "audit", "ceiling", "diagnostics", "settings")
"""Options of ``dpkern train`` that a run of a comparison does not have."""


@dataclass(frozen=True, kw_only=True)
class MechanismChoice:
    """A mechanism with its settings, ``NAME[:KEY=VALUE...]``.

    Attributes:
        text: as it was given.
        name: its name.
        options: options of the run that it has for itself, and ``settings``.
    """

    text: str
    name: str
    options: Mapping[str, Any]

    @classmethod
    def parse(cls, text: str) -> MechanismChoice:
        """Parse ``adaclip:beta1=0.9:lr=0.1``.

        Raises:
            InvalidInput: an unknown mechanism, or a number that is none.
        """
        name, *parts = re.split(r":(?=\w+=)", text)
        choice(NAMES, mechanisms=name)
        options: dict[str, Any] = {}
        settings = []
        for part in parts:
            key, _, value = part.partition("=")
            if key not in PER_MECHANISM:
                settings.append(part)
            elif key in ("lr", "max_grad_norm"):
                options[key] = _number(key, value)
            else:
                options[key] = value
        return cls(text=text, name=name, options={**options, "settings": tuple(settings)})


@dataclass(frozen=True, kw_only=True)
class EqualRun:
    """One run.

    Attributes:
        seed: decides noise, batches and initial parameters.
        accuracy: on held-out rows.
        digest: of the bits of the trained parameters.
        seconds: median of the steps, the first one left out.
        quiet: whether the machine did nothing else.
        certified: epsilon that the run certifies if its seed is secret.
        summary: facts of the run; those of the first seed have its costs.
    """

    seed: int
    accuracy: float
    digest: str
    seconds: float
    quiet: bool
    certified: float
    summary: Mapping[str, Any]


def session_of(
    mechanism: MechanismChoice, given: Mapping[str, Any], *, epsilon: float, seed: int
) -> Session:
    """Make the run of one seed; nothing is written.

    Raises:
        DPKernError: whatever is wrong with options, data or mechanism.
    """
    return Session(
        {
            **{name: value for name, value in given.items() if name != "no_figure"},
            **mechanism.options,
            "mechanism": mechanism.name,
            "epsilon": epsilon,
            "unsafe_seed": seed,
            "init_seed": seed,
            "figure": False,
        }
    )


def train(session: Session, seed: int) -> EqualRun:
    """Take all steps of a run, and time them; epochs' records are in no step's time."""
    steps = session.training
    steps.epsilon_points = 0  # one certificate at the end suffices
    marks: list[tuple[float, float]] = []
    take = steps.learn

    def timed(batch: torch.Tensor) -> None:
        started = time.perf_counter()
        take(batch)
        marks.append((started, time.perf_counter()))

    steps.learn = timed  # type: ignore[method-assign]  # the clock belongs to no other run
    before = guard.counters()
    try:
        with torch_threads(session.threads):
            steps.run()
    finally:
        del steps.learn  # uncovers the method
    quiet = guard.verdict(before, guard.counters(), threads=session.threads).quiet
    summary = session.summary()
    seconds = [end - start for start, end in marks[1:] or marks]
    digest = hashlib.blake2b(digest_size=16)
    for parameter in steps.model.parameters():
        digest.update(parameter.detach().contiguous().numpy().tobytes())
    return EqualRun(
        seed=seed,
        accuracy=float(summary["test_accuracy"]),
        digest=digest.hexdigest(),
        seconds=median(seconds),
        quiet=quiet,
        certified=float(summary.get("epsilon_if_seed_secret", math.inf)),
        summary=summary,
    )


def check_equal(runs: Mapping[str, EqualRun], epsilon: float) -> None:
    """Refuse mechanisms whose guarantees are not the same.

    Args:
        runs: a run of each mechanism at the wanted epsilon.

    Raises:
        InvalidInput: another epsilon, another neighbouring relation, or other protected parts.
    """
    kinds = {
        name: (run.summary["relation"], run.summary["certified_for"]) for name, run in runs.items()
    }
    if len(set(kinds.values())) > 1:
        raise InvalidInput(
            "mechanisms",
            expected="mechanisms that protect the same thing: an epsilon of another relation is "
            "another promise",
            got="; ".join(f"{name}: {relation}" for name, (relation, _) in kinds.items()),
            remedy="Compare mechanisms of one relation at a time.",
        )
    for name, run in runs.items():
        if not CLOSE * epsilon <= run.certified <= epsilon:
            raise InvalidInput(
                "mechanisms",
                expected=f"mechanisms that certify {100 * CLOSE:g} to 100 % of epsilon "
                f"{shown_bound(epsilon)}",
                got=f"{name} with {shown_bound(run.certified)}",
                remedy=f"Leave {name} out, or choose an epsilon that it can certify.",
            )


def check_options(given: Mapping[str, Any]) -> None:
    """Refuse options of ``dpkern train`` that a comparison decides or does not have.

    Raises:
        InvalidInput: one of them.
    """
    for name in (*DECIDED, *RUNS_OF_ITS_OWN):
        if name in given:
            raise InvalidInput(
                name,
                expected="no such option in a comparison",
                got=given[name],
                remedy="Remove it: mechanisms, epsilons and seeds are options of the comparison.",
            )
    for name in given.keys() - Session.known() - {"no_figure"}:
        raise InvalidInput(
            name,
            expected="none: these mechanisms have no such option",
            got=given[name],
            remedy="Remove it.",
        )
    if given.get("device") not in (None, "cpu"):
        raise InvalidInput(
            "device",
            expected="cpu: times, quiet runs and energies of a comparison are of a processor",
            got=given["device"],
            remedy="Leave device out; dpkern train --device trains one mechanism there.",
        )


def chosen(texts: Sequence[str]) -> list[MechanismChoice]:
    """Parse the mechanisms of a comparison.

    Raises:
        InvalidInput: fewer than two, or one of them twice.
    """
    if len(texts) < 2 or len(set(texts)) < len(texts):
        raise InvalidInput(
            "mechanisms",
            expected="at least two, each once",
            got=", ".join(texts) or "none",
            remedy="Pass, for example, --mechanisms dpsgd,adaclip.",
        )
    return [MechanismChoice.parse(text) for text in texts]


def _number(key: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise InvalidInput(
            key, expected="a number", got=value, remedy=f"Write, for example, {key}=0.1."
        ) from None


OnRun = Callable[[str, int], None]
"""Called before each run with the mechanism and the seed."""

__all__ = [
    *("CLOSE", "EqualRun", "MechanismChoice", "OnRun", "check_equal", "check_options", "chosen"),
    *("session_of", "train"),
]
