"""The public name of ``dpkern.privacy.mechanisms``: mechanisms, their plans and release maps."""

from .base.renamed import old_names
from .privacy.mechanisms import *  # noqa: F403
from .privacy.mechanisms import __all__ as __all__

__getattr__ = old_names(
    __name__,
    {
        "Crop": "WhitenedCrop",
        "Diagonal": "DiagonalMap",
        "Memory": "MechanismState",
        "Open": "PartialNoiseMap",
        "Release": "ReleaseMap",
    },
)
