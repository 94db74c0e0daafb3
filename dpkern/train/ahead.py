"""Noise made ahead in the training loop: the source, and runs in which there is none to make."""

from __future__ import annotations

import torch

from ..errors import InvalidInput
from ..mechanisms import Pruned
from ..mechanisms.base import Mechanism
from ..noise_tables import NoiseSource, RingPrefetch
from ..ops import update
from ..rng import Key, Purpose

SOURCES: dict[str, type[NoiseSource]] = {"ring": RingPrefetch}
"""By the name that ``--noise-source`` takes: only sources that change no distribution."""


def source_of(name: str | None) -> NoiseSource | None:
    """A new source of this name; None: the update draws its own noise."""
    return None if name is None else SOURCES[name]()


def check(
    source: NoiseSource | None, mechanism: Mechanism, *, key: Key, backend: str | None
) -> None:
    """Refuse, before training, a source that its step would refuse later or never ask.

    Args:
        source: bound by its step; None: nothing to check.
        mechanism: of the run.
        key: of the run; nothing is drawn.
        backend: who runs the ops.

    Raises:
        InvalidInput: steps without noise, or with noise in other places at every step.
        BackendError: a backend whose updates take no draws made ahead.
    """
    if source is None:
        return
    if source.layout is None:
        _refuse(source, mechanism, "a mechanism whose steps draw noise")
    if isinstance(mechanism, Pruned) and mechanism.mask == "previous":
        _refuse(source, mechanism, "a mechanism that noises the same places at every step")
    one, rule = [torch.zeros(1)], update.SGD(lr=1.0)
    noise = update.Noise(
        distribution="gaussian",
        scales=(1.0,),
        stream=key.stream(Purpose.NOISE, 0),
        positions=(0,),
        rounding=None,
        draws=update.Draws(0, torch.zeros(1, dtype=torch.int32), None),
    )
    sums = [torch.zeros(1, dtype=torch.int64)]
    update.step.backend_of(one, sums, rule=rule, state=rule.init(one), noise=noise, backend=backend)


def _refuse(source: NoiseSource, mechanism: Mechanism, expected: str) -> None:
    raise InvalidInput(
        "noise_source",
        expected=expected,
        got=f"{source.name} with {mechanism.name}",
        remedy="Leave --noise-source out: the update then draws its own noise.",
    )
