"""The names of Opacus that scripts import, over dpkern's engine.

    from dpkern.compat.opacus import PrivacyEngine
    from dpkern.compat.opacus.utils.batch_memory_manager import BatchMemoryManager
    from dpkern.compat.opacus.validators import ModuleValidator

Modules, classes and arguments have the names of Opacus 1.6. Everything is thin: the engine is
dpkern's own, with its guards and its accounting, so that what mixes samples is refused here too.
``dpkern.compat.opacus.lightning`` needs Lightning, so it is imported by its name alone.
"""

from ...engine.privacy_engine import PrivacyEngine
from . import (
    accountants,
    data_loader,
    distributed,
    grad_sample,
    layers,
    optimizers,
    schedulers,
    utils,
    validators,
)
from ._refused import UNWRAPPED, refusals

__getattr__ = refusals(__name__, {"GradSampleModule": UNWRAPPED})

__all__ = [
    "PrivacyEngine",
    "accountants",
    "data_loader",
    "distributed",
    "grad_sample",
    "layers",
    "optimizers",
    "schedulers",
    "utils",
    "validators",
]
