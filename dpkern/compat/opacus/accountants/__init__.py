"""Accountants that stand alone, and noise for a target, by Opacus' names."""

from .accountant import (
    GaussianAccountant,
    IAccountant,
    PRVAccountant,
    RDPAccountant,
    create_accountant,
)
from .utils import get_noise_multiplier

__all__ = [
    "GaussianAccountant",
    "IAccountant",
    "PRVAccountant",
    "RDPAccountant",
    "create_accountant",
    "get_noise_multiplier",
]
