"""Make an objective release and its feature map from a run's options, and state its privacy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from ..engine.named import read_settings
from ..objective.feature_maps import FeatureMap
from ..privacy.mechanisms import ObjectiveRelease
from .objective_mechanism import stated
from .options import required

DECIDED = ("epsilon", "delta", "mode", "length", "classes")
"""Fields with an option of their own, or that follow from the data."""


def make(
    name: str,
    *,
    mode: str,
    settings: Sequence[str],
    epsilon: float | None,
    delta: float,
    row_shape: tuple[int, ...],
    classes: int,
) -> tuple[ObjectiveRelease, FeatureMap]:
    """Make the mechanism of this name, and the map that ``settings`` choose.

    Raises:
        InvalidInput: no epsilon, or settings that neither of them knows or takes.
    """
    kind = ObjectiveRelease.named(name)
    of_map = {field.name for field in fields(FeatureMap)} - {"row_shape"}
    chosen = [text for text in settings if text.partition("=")[0] in of_map]
    others = [text for text in settings if text not in chosen]
    feature_map = FeatureMap(
        row_shape=row_shape, **read_settings(FeatureMap, chosen, decided=("row_shape",))
    )
    made = kind(
        epsilon=required(epsilon, what="the release"),
        delta=delta,
        mode=mode,
        length=feature_map.length,
        classes=classes,
        **read_settings(kind, others, decided=DECIDED),
    )
    return made, feature_map


def facts(mechanism: ObjectiveRelease, feature_map: FeatureMap, *, seeded: bool) -> dict[str, Any]:
    """Return what a report says about the privacy of a run, certificate included."""
    found = mechanism.certificate(seeded=seeded)
    said = stated(
        mechanism,
        found,
        non_private=_reason(mechanism, seeded),
        settings={**mechanism.to_dict(), "features": asdict(feature_map)},
    )
    return said | ({"epsilon_if_seed_secret": mechanism.epsilon_certified()} if seeded else {})


def _reason(mechanism: ObjectiveRelease, seeded: bool) -> str | None:
    """Return the reason, in words, that nothing is certified; None where something is."""
    if math.isinf(mechanism.epsilon_certified()):
        return "no accountant bounds the release" if mechanism.noisy else "no noise is added"
    return "the noise comes from a known seed" if seeded else None
