"""Releases with false claims, each of which an audit must catch, and sound ones it must pass."""

from .broken import local, plans, precision, sources, tables, trainer
from .kit import Case
from .sound import gaussian
from .sound import local as sound_local
from .sound import plans as sound_plans

BROKEN: tuple[Case, ...] = (
    *sources.CASES,
    *trainer.CASES,
    *tables.CASES,
    *local.CASES,
    *precision.CASES,
    *plans.CASES,
)
SOUND: tuple[Case, ...] = (*gaussian.CASES, *sound_local.CASES, *sound_plans.CASES)

__all__ = ["BROKEN", "SOUND", "Case"]
