"""Backward passes of normalisation layers, with gradients of each sample's scale and shift."""

from __future__ import annotations

from ..case import Facts

TOKENS = {
    "tiny": {"B": 4, "T": 4, "D": 16},
    "typical": {"B": 16, "T": 64, "D": 256},
    "large": {"B": 32, "T": 128, "D": 768},
}
"""Samples, positions, features."""

FACTS = {
    "ghost.group_norm_backward": Facts(
        examples=({"C": 6, "groups": 3}, {"C": 5, "groups": 1}, {"C": 4, "groups": 4}),
        positive=frozenset({"C", "groups"}),
        timed={
            "tiny": {"B": 4, "C": 8, "S": 16, "groups": 2},
            "typical": {"B": 32, "C": 32, "S": 196, "groups": 8},
            "large": {"B": 64, "C": 64, "S": 784, "groups": 16},
        },
    ),
    "ghost.layer_norm_backward": Facts(timed=TOKENS),
    "ghost.rms_norm_backward": Facts(timed=TOKENS),
}
