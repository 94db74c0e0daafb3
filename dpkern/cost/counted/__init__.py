"""Execute ops and count them: the kernels' own templates, on scalars that tally operations.

Only ops with their arithmetic in the templates of ``csrc/core`` are here, so that the counted code
is the code that ships. Kernels that are vectorised by hand have closed forms alone.

Each stem has a file with its ``KERNELS``: from the name of an op to its counted kernel, which takes
the op's arguments, does what the op does (in place too) and returns what that took.
"""

from __future__ import annotations

from typing import Any

from ...base.dispatch import Op
from ...base.errors import InvalidInput
from . import coef, factors, noise, symbols, update
from ._native import open_cipher
from ._tally import CountedRun, Kernel

KERNELS: dict[str, Kernel] = {
    **noise.KERNELS,
    **update.KERNELS,
    **factors.KERNELS,
    **coef.KERNELS,
    **symbols.KERNELS,
}
"""Counted kernels by the name of their op."""


def tally_of(
    op: Op[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, CountedRun]:
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
            remedy="Use its closed form in dpkern.cost.forms; its kernel is no template.",
        )
    given = {name: value for name, value in kwargs.items() if name != "backend"}
    op.validate(*args, **given)
    return kernel(*args, **given)


__all__ = ["KERNELS", "CountedRun", "Kernel", "open_cipher", "tally_of"]
