"""Mechanisms: frozen configurations that make a plan and compute their own privacy event."""

from .adaclip import AdaClip
from .adlm import ILM, AdLM
from .base import Mechanism
from .catalogue import CataloguedMechanism
from .directional import Directional
from .dpsgd import DPSGD
from .functional import FM, SPOF
from .gredp import GReDP
from .labels import LabelMechanism
from .laplace_sgd import LaplaceSGD
from .memory import MechanismState
from .notes import Note
from .objective import ObjectivePerturbation
from .objective_release import ObjectiveRelease
from .output_sgd import OutputSGD
from .plan import Block, Importance, Plan
from .projected_sgd import ProjectedSGD
from .pruning import Pruned
from .randomized_response import RandomizedResponse
from .release import DiagonalMap, PartialNoiseMap, ReleaseMap, WhitenedCrop
from .site import Site
from .spectral_dp import SpectralDP

__all__ = [
    "DPSGD",
    "FM",
    "ILM",
    "SPOF",
    "AdLM",
    "AdaClip",
    "Block",
    "CataloguedMechanism",
    "DiagonalMap",
    "Directional",
    "GReDP",
    "Importance",
    "LabelMechanism",
    "LaplaceSGD",
    "Mechanism",
    "MechanismState",
    "Note",
    "ObjectivePerturbation",
    "ObjectiveRelease",
    "OutputSGD",
    "PartialNoiseMap",
    "Plan",
    "ProjectedSGD",
    "Pruned",
    "RandomizedResponse",
    "ReleaseMap",
    "Site",
    "SpectralDP",
    "WhitenedCrop",
]
