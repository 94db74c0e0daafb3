"""Declare the codes that stand for names in compiled code: each once, for Python and C++ alike.

A member has the name by which users or torch know it; ``per_layer`` is ``kPerLayer`` in C++. Only
the standard library is used: the build runs this file before anything is installed.
"""

from __future__ import annotations

from enum import IntEnum


class Distribution(IntEnum):
    """Laws of the noise, see ``dpkern.laws``."""

    gaussian = 0
    laplace = 1


class GradType(IntEnum):
    """Types of explicit per-sample gradients."""

    float32 = 0
    float64 = 1
    bfloat16 = 2


class Style(IntEnum):
    """Styles of clipping."""

    flat = 0
    per_layer = 1
    automatic = 2


class Arithmetic(IntEnum):
    """What clipping sums in: nothing, the gradients' floats, or integers."""

    norm_only = 0
    float = 1
    exact32 = 2
    exact64 = 3


class RuleKind(IntEnum):
    """Optimizers."""

    sgd = 0
    adam = 1


class RuleForm(IntEnum):
    """What one element of an optimizer's rule computes."""

    plain = 0
    momentum = 1
    nesterov = 2
    adam = 3


class SumType(IntEnum):
    """Types of clipped sums; ``float`` is the type of the parameters."""

    int32 = 0
    int64 = 1
    float = 2


class NoisedType(IntEnum):
    """Types of tensors that noise is added to in place."""

    int32 = 0
    int64 = 1
    float32 = 2
    float64 = 3


class NoiseSource(IntEnum):
    """Where a kernel's noise comes from; ``draws``: from draws made ahead."""

    none = 0
    stream = 1
    draws = 2


class CoefForm(IntEnum):
    """Polynomials that stand for a cross-entropy."""

    printed = 0
    taylor = 1


class SymbolType(IntEnum):
    """Types of the symbols of randomized response."""

    uint8 = 0
    int32 = 1
    int64 = 2


CODES: tuple[type[IntEnum], ...] = (
    Distribution,
    GradType,
    Style,
    Arithmetic,
    RuleKind,
    RuleForm,
    SumType,
    NoisedType,
    NoiseSource,
    CoefForm,
    SymbolType,
)
