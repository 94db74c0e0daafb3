"""Count, compare and measure what private training costs."""

from ..base.counts import CIPHER, PRIMITIVES, Counts, Item, Itemised

__all__ = ["CIPHER", "PRIMITIVES", "Counts", "Item", "Itemised"]
