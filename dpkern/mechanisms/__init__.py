"""Mechanisms: frozen configurations that make a plan and compute their own privacy event."""

from .base import Mechanism
from .dpsgd import DPSGD
from .gredp import GReDP
from .memory import Memory
from .notes import Note
from .plan import Block, Importance, Plan
from .release import Crop, Diagonal, Open, Release
from .site import Site
from .spectral_dp import SpectralDP

__all__ = [
    "DPSGD",
    "Block",
    "Crop",
    "Diagonal",
    "GReDP",
    "Importance",
    "Mechanism",
    "Memory",
    "Note",
    "Open",
    "Plan",
    "Release",
    "Site",
    "SpectralDP",
]
