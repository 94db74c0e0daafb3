"""AdLM's methods and the readings of its printed noise, as settings of the mechanism.

Source: AdLM, (17), (20), (21), section on experiments.
"""

from __future__ import annotations

from typing import Any

METHODS: dict[str, dict[str, Any]] = {
    "AdLM": {"mode": "published"},
    "ILM": {"mode": "published"},
    "AdLM, one draw shared by all": {"mode": "published", "noise_sharing": "shared_per_feature"},
    "AdLM, corrected": {"mode": "corrected", "relevance_from": "public"},
    "ILM, corrected": {"mode": "corrected"},
}
COUNTS = ("units", "maps", "patch", "one")
SHARING: dict[str, str] = {
    "a draw for each record": "iid_per_example",
    "one draw for all records": "shared_per_feature",
}
READINGS: dict[str, dict[str, Any]] = {
    f"AdLM, |h0| {count}, {words}": {
        "mode": "published",
        "relevance_from": "public_network",
        "noise_sharing": sharing,
        "h0_count": count,
    }
    for words, sharing in SHARING.items()
    for count in COUNTS
}
"""Every reading of the printed noise."""

__all__ = ["COUNTS", "METHODS", "READINGS", "SHARING"]
