"""Prefetched noise in the training loop: its source, and runs that have none to prefetch."""

from __future__ import annotations

from ..base.errors import InvalidInput
from ..privacy.mechanisms import Mechanism
from ..step.noise_tables import NoiseSource, RingPrefetch

SOURCES: dict[str, type[NoiseSource]] = {"ring": RingPrefetch}
"""Sources by the name that ``--noise-source`` takes; none of them changes a distribution."""


def source_of(name: str | None) -> NoiseSource | None:
    """Make a source of this name; None means that the update draws its own noise."""
    return None if name is None else SOURCES[name]()


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
