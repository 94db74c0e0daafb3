"""What private training costs: counted, in closed form, and measured."""

from ..base.counts import CIPHER, PRIMITIVES, Counts, Item, Itemised

__all__ = ["CIPHER", "PRIMITIVES", "Counts", "Item", "Itemised"]
