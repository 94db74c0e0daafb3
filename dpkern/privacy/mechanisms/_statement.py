"""State what a certificate covers, by how sums are made."""

from __future__ import annotations

from ..accounting.history import NOTHING, REAL_SUMS, RELEASED_BITS

ARITHMETIC = ("exact", "float")
MODES = ("corrected", "published")


def certified_scope(private: bool, arithmetic: str) -> str:
    """Return ``released bits``, ``real-number sums`` or ``nothing``, of gradients that are given.

    Where a model makes them the ledger says less (``accounting.history.of_batches``).
    """
    if not private:
        return NOTHING
    return RELEASED_BITS if arithmetic == "exact" else REAL_SUMS
