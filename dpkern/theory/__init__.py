"""The sources' formulas as printed, beside the exact ones; nothing here certifies anything."""

from . import (
    adlm,
    adlm_loss,
    composition,
    directional,
    divergence,
    gaussian,
    information,
    markov,
    pnsgd,
    rdp,
    utility_subspace,
    water_filling,
)

__all__ = [
    "adlm",
    "adlm_loss",
    "composition",
    "directional",
    "divergence",
    "gaussian",
    "information",
    "markov",
    "pnsgd",
    "rdp",
    "utility_subspace",
    "water_filling",
]
