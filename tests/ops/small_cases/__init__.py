"""Small cases of clipping, coefficients, noise, symbols and updates, which tests run everywhere.

A case makes inputs, runs the op on a backend, and compares it with its reference: styles, rules,
dtypes and arithmetic in more combinations than the conformance suite goes through.
"""

from . import clip, coef, noise, symbols, update
from .clip import ClipCase
from .coef import CoefCase, FeatureCase
from .noise import NoiseCase
from .symbols import SymbolCase
from .update import RULES, UpdateCase

SmallCase = NoiseCase | ClipCase | UpdateCase | SymbolCase | CoefCase | FeatureCase

SMALL_CASES: tuple[SmallCase, ...] = (
    *noise.SMALL,
    *clip.SMALL,
    *update.SMALL,
    *symbols.SMALL,
    *coef.SMALL,
)

__all__ = ["RULES", "SMALL_CASES", "ClipCase", "SmallCase"]
