"""Mechanisms: frozen configurations that make a plan and compute their own privacy event."""

from .base import Block, Mechanism, Plan
from .dpsgd import DPSGD

__all__ = ["DPSGD", "Block", "Mechanism", "Plan"]
