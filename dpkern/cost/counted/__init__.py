"""Ops executed and counted: the kernels' own templates with scalars that tally what they do.

Only ops whose arithmetic stands in the templates of ``csrc/core`` are here: what is counted is then
what ships. Kernels that are vectorised by hand have closed forms alone.

One file per stem; each has its ``KERNELS``, from the name of an op to its counted kernel, which
takes the op's arguments, does what the op does (in place too) and says what that took.
"""

from __future__ import annotations

from typing import Any

from ...base.dispatch import Op
from ...base.errors import InvalidInput
from . import coef, factors, noise, symbols, update
from ._native import open_cipher
from ._tally import Kernel, Tally

KERNELS: dict[str, Kernel] = {
    **noise.KERNELS,
    **update.KERNELS,
    **factors.KERNELS,
    **coef.KERNELS,
    **symbols.KERNELS,
}
"""Counted kernels by the name of their op."""


def tally_of(op: Op[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Tally]:
    """Run a call of an op in its counted kernel: its result, and what it took.

    Raises:
        InvalidInput: the op has no counted kernel, or its call is invalid.
    """
    kernel = KERNELS.get(op.name)
    if kernel is None:
        raise InvalidInput(
            "op",
            expected=f"one that can be counted: {', '.join(sorted(KERNELS))}",
            got=op.name,
            remedy="Its arithmetic is no template: take its closed form in dpkern.cost.forms.",
        )
    given = {name: value for name, value in kwargs.items() if name != "backend"}
    op.validate(*args, **given)
    return kernel(*args, **given)


__all__ = ["KERNELS", "Kernel", "Tally", "open_cipher", "tally_of"]
