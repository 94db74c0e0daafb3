"""Closed form of randomized response."""

from __future__ import annotations

from typing import Any

import torch

from ...base.counts import Counts, Item, Itemised
from ...ops.symbols import blocks
from ._form import Form
from ._layers import moved

_WORD = Counts(SHIFT=1, OR=1, CMP=1)
"""Two words are joined to one, which is compared with the number of words that keep the symbol."""
_WRAP = Counts(ADD=1, CMP=1, SUB=1, MUX=1)
_LIE = Counts(SUB=2, MUL=2, CMP=2, ADD=2, MUX=2)
"""Quotient by a rounded reciprocal, corrected; the last response at most; 1 + j, or the symbol."""


def randomize(
    symbols: torch.Tensor, *, categories: int = 2, position: int = 0, **_: Any
) -> Itemised:
    """Count ``symbols.randomize``."""
    n = symbols.numel()
    each = _WORD + _WRAP + (_LIE if categories > 2 else Counts())
    return Itemised(
        (
            Item(name="words", counts=Counts(RNG=16 * blocks(position, n))),
            moved([(n, symbols.dtype)], [(n, symbols.dtype)]),
            Item(name="responses", counts=n * each, flops=0),
        )
    )


FORMS: dict[str, Form] = {"symbols.randomize": randomize}
