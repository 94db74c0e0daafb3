"""Declare the codes that stand for names in compiled code: each once, for Python and C++ alike.

A word has the name by which users or torch know it; ``per_layer`` is ``kPerLayer`` in C++. Only
the standard library is used: the build runs this file before anything is installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, get_args

from . import laws

Style = Literal["flat", "per_layer", "automatic"]
CoefForm = Literal["printed", "taylor"]


@dataclass(frozen=True)
class OptionCodes:
    """The words that callers choose from; compiled code knows each by its place."""

    name: str
    doc: str
    words: tuple[str, ...]

    def code(self, word: str) -> int:
        """Return the place of a word."""
        return self.words.index(word)


DISTRIBUTIONS = OptionCodes(
    "Distribution", "Laws of the noise, see dpkern.base.laws.", tuple(laws.LAWS)
)
STYLES = OptionCodes("Style", "Styles of clipping.", get_args(Style))
COEF_FORMS = OptionCodes(
    "CoefForm", "Polynomials that stand for a cross-entropy.", get_args(CoefForm)
)


class Arithmetic(IntEnum):
    """The arithmetic of clipped sums on a device: none, the gradients' floats, or integers."""

    norm_only = 0
    float = 1
    exact32 = 2
    exact64 = 3


class RuleKind(IntEnum):
    """The optimizers, one word each."""

    sgd = 0
    adam = 1


class RuleForm(IntEnum):
    """The computation of an optimizer's rule on one element."""

    plain = 0
    momentum = 1
    nesterov = 2
    adam = 3


class SumType(IntEnum):
    """The types of clipped sums; ``float`` is the type of the parameters."""

    int32 = 0
    int64 = 1
    float = 2


class NoiseOrigin(IntEnum):
    """The origin of a kernel's noise.

    ``stream`` stands for draws that it makes, of a law or by a table, ``draws`` for those that lie
    in memory.
    """

    none = 0
    stream = 1
    draws = 2


class DrawSource(IntEnum):
    """The source of a kernel's draws.

    ``stream`` makes them by the law itself, ``values`` were prefetched, ``samples16`` and
    ``samples32`` stand in a table of ready-made ones, ``cdt`` is a cumulative table.
    """

    stream = 0
    values = 1
    samples16 = 2
    samples32 = 3
    cdt = 4


Codes = OptionCodes | type[IntEnum]


def words(codes: Codes) -> dict[str, int]:
    """Return every word with its code."""
    if isinstance(codes, OptionCodes):
        return {word: code for code, word in enumerate(codes.words)}
    return {item.name: item.value for item in codes}


def name_of(codes: Codes) -> str:
    """Return the name that C++ knows."""
    return codes.name if isinstance(codes, OptionCodes) else codes.__name__


CODES: tuple[Codes, ...] = (
    DISTRIBUTIONS,
    STYLES,
    COEF_FORMS,
    RuleKind,
    RuleForm,
    SumType,
    NoiseOrigin,
    DrawSource,
)
