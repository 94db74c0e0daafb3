"""Choices that layers and mechanisms share."""

RELEVANCE_RANGES = ("as_formula", "signed")
"""AdLM's normalised relevance: in [0, 1], as the formula gives it, or in [-1, 1], as the text says.
"""
