"""Releases with false claims, each of which an audit must catch, and sound ones it must pass."""

from .broken import local as _broken_local
from .broken import precision, sources, tables, trainer
from .kit import Case
from .sound import gaussian
from .sound import local as _sound_local

BROKEN: tuple[Case, ...] = (
    *sources.CASES,
    *trainer.CASES,
    *tables.CASES,
    *_broken_local.CASES,
    *precision.CASES,
)
SOUND: tuple[Case, ...] = (*gaussian.CASES, *_sound_local.CASES)

__all__ = ["BROKEN", "SOUND", "Case"]
