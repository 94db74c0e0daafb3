"""What a certificate can speak about, by how sums are made."""

from __future__ import annotations

from ..accounting.history import NOTHING, REAL_SUMS, RELEASED_BITS

ARITHMETIC = ("exact", "float")
MODES = ("corrected", "published")


def statement(private: bool, arithmetic: str) -> str:
    """``released bits``, ``real-number sums`` or ``nothing``, of gradients that are given.

    Where a model makes them the ledger says less (``accounting.history.of_batches``).
    """
    if not private:
        return NOTHING
    return RELEASED_BITS if arithmetic == "exact" else REAL_SUMS
