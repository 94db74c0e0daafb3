"""Noise made ahead in the training loop: the source, and runs in which there is none to make."""

from __future__ import annotations

from ..base.errors import InvalidInput
from ..privacy.mechanisms import Mechanism
from ..step.noise_tables import NoiseSource, RingPrefetch

SOURCES: dict[str, type[NoiseSource]] = {"ring": RingPrefetch}
"""By the name that ``--noise-source`` takes: only sources that change no distribution."""


def source_of(name: str | None) -> NoiseSource | None:
    """A new source of this name; None: the update draws its own noise."""
    return None if name is None else SOURCES[name]()


def check(source: NoiseSource | None, mechanism: Mechanism) -> None:
    """Refuse, before training, a source that its step would refuse later or never ask.

    Args:
        source: bound by its step; None: nothing to check.
        mechanism: of the run.

    Raises:
        InvalidInput: steps without noise, or with noise in other places at every step.
    """
    if source is None:
        return
    if source.layout is None:
        _refuse(source, mechanism, "a mechanism whose steps draw noise")
    if mechanism.noise_moves:
        _refuse(source, mechanism, "a mechanism that noises the same places at every step")


def _refuse(source: NoiseSource, mechanism: Mechanism, expected: str) -> None:
    raise InvalidInput(
        "noise_source",
        expected=expected,
        got=f"{source.name} with {mechanism.name}",
        remedy="Leave --noise-source out: the update then draws its own noise.",
    )
