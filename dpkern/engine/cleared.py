"""Let ``module.zero_grad()`` forget the gradients of the current samples, as it does in torch.

Private parameters have no ``grad`` that it could find.
"""

from __future__ import annotations

import types

from torch import nn

from .parameter import is_private, source_of


def zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
    """Forget the current samples' gradients and public ones, as ``optimizer.zero_grad()`` does."""
    private = next(filter(is_private, self.parameters()), None)
    if private is not None:
        source_of(private).capture.discard()
    type(self).zero_grad(self, set_to_none)


def show_zero_grad(module: nn.Module) -> bool:
    """Put it in the place of the module's own; return whether there was none of an instance's."""
    if "zero_grad" in vars(module):
        return False
    module.__dict__["zero_grad"] = types.MethodType(zero_grad, module)
    return True


__all__ = ["show_zero_grad", "zero_grad"]
