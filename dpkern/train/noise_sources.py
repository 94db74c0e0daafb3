"""Refuse runs that cannot have the source of noise that they name."""

from __future__ import annotations

from ..base.errors import InvalidInput, PrivacyError
from ..privacy.mechanisms import Mechanism
from ..step.noise_tables import NoiseSource


def check_target(source: NoiseSource | None) -> None:
    """Refuse to calibrate noise to an epsilon that its source cannot have.

    Raises:
        PrivacyError: a source that protects nothing.
    """
    if source is not None and source.warning:
        raise PrivacyError(
            "noise_source",
            expected="a source that a certificate can speak of, for noise that meets --epsilon",
            got=source.warning,
            remedy="Pass --noise-multiplier instead of --epsilon: such a run is called "
            "non-private; or --noise-source cdt.",
        )


def check_audit(source: NoiseSource | None) -> None:
    """Refuse to audit a run with noise of another law than its audit has.

    Raises:
        InvalidInput: a source that does not make the certified law's own draws.
    """
    if source is not None and (source.warning or source.variation):
        raise InvalidInput(
            "audit",
            expected="none with this noise source: an audit runs the step with inline noise",
            got=f"--audit with --noise-source {source.name}",
            remedy="Leave --audit out, or take --noise-source inline or ring.",
        )


def check(source: NoiseSource | None, mechanism: Mechanism) -> None:
    """Refuse, before training, a source that its step would refuse later or never ask.

    Args:
        source: noise source that is bound to its step. None leaves nothing to check.
        mechanism: mechanism of the run.

    Raises:
        InvalidInput: steps without noise, or with noise in other places at every step.
    """
    if source is None:
        return
    if source.layout is None:
        _refuse(source, mechanism, "a mechanism whose steps draw noise", "there is none to draw")
    if mechanism.noise_moves:
        fixed = "a mechanism that noises the same places at every step"
        _refuse(source, mechanism, fixed, "the update then draws its own noise")


def _refuse(source: NoiseSource, mechanism: Mechanism, expected: str, without: str) -> None:
    raise InvalidInput(
        "noise_source",
        expected=expected,
        got=f"{source.name} with {mechanism.name}",
        remedy=f"Leave --noise-source out: {without}.",
    )
