"""Make the session for an option's mechanism, which perturbs gradients or the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..base import outputs as files
from ..base.errors import InvalidInput
from ..base.report import Report
from ..base.validate import choice
from . import checkpoint
from .adlm import AdlmSession
from .base import BaseSession
from .moments import MomentsSession
from .objective import ObjectiveSession
from .options import PrivacyOptions, RunOptions
from .session import Session
from .step_audit import Auditor

AnySession = BaseSession[Any, Any, Any]

SESSIONS: dict[str, type[AnySession]] = {
    name: kind
    for kind in (Session, ObjectiveSession, AdlmSession, MomentsSession)
    for name in kind.KINDS[0].NAMES
}
"""Sessions by the mechanisms that they have."""

NAMES = tuple(sorted(SESSIONS))
"""The names that ``--mechanism`` takes."""


def make_session(
    given: Mapping[str, Any],
    auditor: Auditor | None = None,
    render: Callable[[Report], str] | None = None,
) -> AnySession:
    """Make a checked session of the mechanism that is named, or that the resumed run has.

    Args:
        given: the options that were named; see ``BaseSession``.
        auditor: audits the run's step where that is requested.
        render: makes the page of a run with a figure. None writes no page.

    Raises:
        DPKernError: an unknown mechanism, an option that it does not have, or whatever is wrong
            with options, data, output or checkpoint.
    """
    name = _mechanism(given)
    kind = SESSIONS[name]
    known = kind.known()
    for option, value in given.items():
        if option not in known:
            raise InvalidInput(
                option,
                expected=f"none: {name} has no such option",
                got=value,
                remedy=f"Leave --{option.replace('_', '-')} out.",
            )
    return kind(given, auditor, render)


def _mechanism(given: Mapping[str, Any]) -> str:
    """Return the mechanism as named, else as saved, else the usual one."""
    if "mechanism" in given:
        return str(choice(NAMES, mechanism=given["mechanism"]))
    run = RunOptions(
        **{name: given[name] for name in ("out", "resume", "overwrite") if name in given}
    )
    if run.resume and run.out is not None:
        saved = checkpoint.read(run.out / files.CHECKPOINT, kind=None)
        return str(saved["options"]["mechanism"])
    return PrivacyOptions.mechanism
