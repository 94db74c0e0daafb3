"""Make AdLM or ILM from the options of a run, and state its privacy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..base.errors import InvalidInput
from ..base.validate import choice
from ..engine.named import read_settings
from ..objective.adlm_networks import build, setting
from ..privacy.mechanisms import AdLM
from ..privacy.mechanisms.objective import near_law
from ..privacy.theory.adlm import AdlmSetting
from ..step.noise_tables import NoiseSource
from .adlm_options import ARCHITECTURE_OF, MODELS, PREFIX
from .objective_mechanism import of_nothing, stated
from .options import required

DECIDED = ("epsilon", "mode", "setting")
"""Fields with an option of their own, or that follow from the data."""

UNPROTECTED = {
    "relevances": "relevances come from a network that was trained on the same rows without noise",
    "inputs": "all rows share one draw: differences of rows are released exactly",
    "labels": "gradients pass through the clean part of the coefficients",
}


def make(
    name: str, *, mode: str, settings: Sequence[str], epsilon: float | None, setting: AdlmSetting
) -> AdLM:
    """Make the mechanism of this name.

    Raises:
        InvalidInput: no epsilon, or settings that the mechanism does not know or take.
    """
    kind = AdLM.named(name)
    fields = read_settings(kind, settings, decided=DECIDED)
    epsilon = required(epsilon, what="one record's release")
    return kind(epsilon=epsilon, mode=mode, setting=setting, **fields)


def planned_setting(
    model: str, row_shape: tuple[int, ...] | None, *, classes: int, records: int, batch: int
) -> AdlmSetting:
    """Return the sizes of a run that is not started.

    Args:
        model: one of ``adlm_options.MODELS``.
        row_shape: shape of one row. None selects the one that the model is for.
        classes: number of classes of the labels.
        records: training rows.
        batch: expected.

    Raises:
        InvalidInput: an unknown model, or rows that it cannot take.
    """
    architecture = choice(MODELS, model=model).removeprefix(PREFIX)
    if row_shape is None:
        usual = {name: shape for shape, name in ARCHITECTURE_OF.items()}
        if architecture not in usual:
            raise InvalidInput(
                "row_shape",
                expected=f"the shape of one row with the model {model}",
                got="none",
                remedy="Pass --row-shape, such as 30.",
            )
        row_shape = usual[architecture]
    network = build(architecture, row_shape, classes, seed=0)
    return setting(network, row_shape, records=records, batch=batch, name=model)


def facts(
    mechanism: AdLM, *, visits: int, seeded: bool, source: NoiseSource | None = None
) -> dict[str, Any]:
    """Return what a report says about the privacy of a run, certificate included.

    Args:
        mechanism: mechanism that releases the records.
        visits: number of visits of each record.
        seeded: the noise comes from a known seed.
        source: source of the Laplace noise. None draws it from the key.
    """
    unprotected = "" if source is None else source.warning
    variation = 0.0 if source is None or unprotected else source.variation
    given: dict[str, Any] = {"variation": variation, "draws": mechanism.noisy_coordinates}
    found = near_law(mechanism.certificate(visits=visits, seeded=seeded), **given)
    secret = near_law(mechanism.certificate(visits=visits, seeded=False), **given)
    if unprotected:
        secret = found = of_nothing(found, unprotected)
    said = stated(
        mechanism,
        found,
        non_private=unprotected or _reason(mechanism, found.epsilon, seeded),
        visits=visits,
        epsilon_by_part={} if unprotected else dict(mechanism.costs()),
        # The sizes follow from the data.
        settings={key: value for key, value in mechanism.options().items() if key != "setting"},
    )
    if unprotected:
        said["epsilon_claimed"] = math.inf  # whatever the source says of noise that is fresh
    return said | ({"epsilon_if_seed_secret": secret.epsilon} if seeded else {})


def _reason(mechanism: AdLM, certified: float, seeded: bool) -> str | None:
    """Return the reason, in words, that nothing is certified; None where something is."""
    open_parts = [UNPROTECTED[part] for part, cost in mechanism.costs().items() if math.isinf(cost)]
    if open_parts:
        return "; ".join(open_parts)
    if math.isinf(mechanism.epsilon_certified()):
        return "the noise has too much of its tail cut"
    if seeded:
        return "the noise comes from a known seed"
    return "the noise is too far from its law" if math.isinf(certified) else None
