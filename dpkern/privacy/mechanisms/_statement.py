"""State what a certificate covers, by how sums are made."""

from __future__ import annotations

from ..accounting.history import NOTHING, REAL_SUMS, RELEASED_BITS

ARITHMETIC = ("exact", "float")
MODES = ("corrected", "published")


def certified_scope(private: bool, arithmetic: str) -> str:
    """Return ``released bits``, ``real-number sums`` or ``nothing``, of gradients that are given.

    For gradients of a model the ledger certifies less
    (``accounting.history.scope_for_batched_gradients``).
    """
    if not private:
        return NOTHING
    return RELEASED_BITS if arithmetic == "exact" else REAL_SUMS
