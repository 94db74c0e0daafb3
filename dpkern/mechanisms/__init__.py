"""Mechanisms: frozen configurations that make a plan and compute their own privacy event."""

from .adaclip import AdaClip
from .base import Mechanism
from .dpsgd import DPSGD
from .gredp import GReDP
from .laplace_sgd import LaplaceSGD
from .memory import Memory
from .notes import Note
from .plan import Block, Importance, Plan
from .randomized_response import RandomizedResponse
from .release import Crop, Diagonal, Open, Release
from .site import Site
from .spectral_dp import SpectralDP

__all__ = [
    "DPSGD",
    "AdaClip",
    "Block",
    "Crop",
    "Diagonal",
    "GReDP",
    "Importance",
    "LaplaceSGD",
    "Mechanism",
    "Memory",
    "Note",
    "Open",
    "Plan",
    "RandomizedResponse",
    "Release",
    "Site",
    "SpectralDP",
]
