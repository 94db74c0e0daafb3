"""The sources' formulas as printed, beside the exact ones; nothing here certifies anything."""

from . import (
    adlm,
    adlm_loss,
    bmax,
    composition,
    directional,
    divergence,
    environment,
    gaussian,
    information,
    markov,
    pnsgd,
    rdp,
    spof_loss,
    spof_sensitivity,
    utility_subspace,
    water_filling,
)

__all__ = [
    "adlm",
    "adlm_loss",
    "bmax",
    "composition",
    "directional",
    "divergence",
    "environment",
    "gaussian",
    "information",
    "markov",
    "pnsgd",
    "rdp",
    "spof_loss",
    "spof_sensitivity",
    "utility_subspace",
    "water_filling",
]
