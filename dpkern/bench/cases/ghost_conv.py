"""Norms, gradients and sums of convolutions."""

from __future__ import annotations

from dataclasses import replace

from ..case import Facts
from ._shared import ABOVE, CHANNELS, CONVOLUTIONS, IMAGES, VOLUME, WHOLE, plane

LAYER = Facts(examples=(*CONVOLUTIONS, VOLUME), positive=CHANNELS, timed=IMAGES)
STEM = {"typical, first layer": plane(64, 3, 16, 28)}

FACTS = {
    "ghost.conv_gradient": LAYER,
    "ghost.conv_norm": replace(
        LAYER,
        examples=(*CONVOLUTIONS, VOLUME, CONVOLUTIONS[0] | {"route": "gram"}),
        options={"route": ("auto", "direct")},
        from_above=ABOVE,
        timed={**IMAGES, **STEM},
    ),
    "ghost.conv_integer_sum": replace(
        WHOLE, examples=(*CONVOLUTIONS, VOLUME), positive=CHANNELS, timed=IMAGES
    ),
    "ghost.conv_sum": replace(LAYER, timed={**IMAGES, **STEM}),
    "ghost.conv_sum_error": replace(LAYER, rounded_alike=True, from_above=ABOVE, looser=34),
}
