"""Checks of dpkern's own privacy claims: what is proved, recomputed from the shipped numbers."""
