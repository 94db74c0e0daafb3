"""The session that an option's mechanism asks for: gradients made private, or the loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from .._validate import choice
from ..errors import InvalidInput
from . import adlm_options, checkpoint, files, mechanism, objective_options
from .adlm import AdlmSession
from .objective import ObjectiveSession
from .options import PrivacyOptions, RunOptions
from .session import Session

NAMES = tuple(sorted((*mechanism.NAMES, *objective_options.NAMES, *adlm_options.NAMES)))
"""Everything that ``--mechanism`` takes."""

AnySession = Session | ObjectiveSession | AdlmSession


def start(given: Mapping[str, Any]) -> AnySession:
    """A checked session of the mechanism that is named, or that the resumed run has.

    Args:
        given: the options that were named; see ``Session`` and ``ObjectiveSession``.

    Raises:
        DPKernError: an unknown mechanism, an option that it does not have, or whatever is wrong
            with options, data, output or checkpoint.
    """
    name = _mechanism(given)
    kind, of_run = _kind(name)
    known = {f.name for options in kind.OPTIONS for f in fields(options)}
    known -= {f.name for f in fields(RunOptions)} - of_run
    for option, value in given.items():
        if option not in known:
            raise InvalidInput(
                option,
                expected=f"none: {name} has no such option",
                got=value,
                remedy=f"Leave --{option.replace('_', '-')} out.",
            )
    return kind(given)


def _kind(name: str) -> tuple[type[AnySession], set[str]]:
    """The session of a mechanism, and the options of ``RunOptions`` that it has."""
    if name in objective_options.NAMES:
        return ObjectiveSession, set(objective_options.RUN_OPTIONS)
    if name in adlm_options.NAMES:
        return AdlmSession, set(adlm_options.RUN_OPTIONS)
    return Session, {f.name for f in fields(RunOptions)}


def _mechanism(given: Mapping[str, Any]) -> str:
    """As named, else as saved, else the usual one."""
    if "mechanism" in given:
        return str(choice(NAMES, mechanism=given["mechanism"]))
    run = RunOptions(
        **{name: given[name] for name in ("out", "resume", "overwrite") if name in given}
    )
    if run.resume and run.out is not None:
        saved = checkpoint.read(run.out / files.CHECKPOINT, kind=None)
        return str(saved["options"]["mechanism"])
    return PrivacyOptions.mechanism
