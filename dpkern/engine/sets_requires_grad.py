"""Find modules that set ``requires_grad`` of a tensor in their forward pass.

Speech models do so with their input, for checkpoints. PyTorch allows it for tensors without a
graph only, so that such a model must get its input as it came.
"""

from __future__ import annotations

import dis
import inspect
import types
from collections.abc import Iterator

from torch import nn


def sets_requires_grad(module: nn.Module) -> bool:
    """Whether the forward function of a part has an assignment to an attribute of this name."""
    kinds = {type(part) for part in module.modules()}
    forwards = [inspect.getattr_static(kind, "forward", None) for kind in kinds]
    return any(
        instruction.opname == "STORE_ATTR" and instruction.argval == "requires_grad"
        for forward in forwards
        for code in _codes(getattr(forward, "__wrapped__", forward))
        if "requires_grad" in code.co_names
        for instruction in dis.get_instructions(code)
    )


def _codes(function: object) -> Iterator[types.CodeType]:
    code = getattr(function, "__code__", None)
    if isinstance(code, types.CodeType):
        yield code
