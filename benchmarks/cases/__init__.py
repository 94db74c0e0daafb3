"""Cases shared by the tests and the benchmarks, a file for each stem.

A case makes inputs, runs the op on a backend, runs the best torch formulation of the same work with
preallocated buffers, and compares the op with its reference. Tests use the small ones, benchmarks
the large ones; a benchmark verifies its case before it is timed.
"""

from . import clip, coef, noise, symbols, update
from .clip import ClipCase
from .coef import CoefCase, FeatureCase
from .noise import NoiseCase
from .symbols import SymbolCase
from .update import RULES, UpdateCase, torch_optimizer
from .work import Work

Case = NoiseCase | ClipCase | UpdateCase | SymbolCase | CoefCase | FeatureCase

SMALL_CASES: tuple[Case, ...] = (
    *noise.SMALL,
    *clip.SMALL,
    *update.SMALL,
    *symbols.SMALL,
    *coef.SMALL,
)

LARGE_CASES: tuple[Case, ...] = (
    *noise.LARGE,
    *clip.LARGE,
    *update.LARGE,
    *symbols.LARGE,
    *coef.LARGE,
)

__all__ = [
    "LARGE_CASES",
    "RULES",
    "SMALL_CASES",
    "Case",
    "ClipCase",
    "CoefCase",
    "FeatureCase",
    "NoiseCase",
    "SymbolCase",
    "UpdateCase",
    "Work",
    "torch_optimizer",
]
