"""Check the trained tensors that a loss reaches: all of them must be the engine's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...errors import PrivacyError
from .tensor import TrackedTensor

if TYPE_CHECKING:
    from ..capture import Capture


def check_leaves(loss: Tensor, capture: Capture) -> None:
    """Refuse a loss that would train something without clipping and noise.

    Raises:
        PrivacyError: a leaf that requires a gradient and is neither the engine's nor a sample.
    """
    names = {id(p): n for n, p in capture.module.named_parameters()}
    for leaf in leaves_of(loss):
        if leaf is capture.anchor or type(leaf) is TrackedTensor or id(leaf) in names:
            continue
        if any(leaf is slot.parameter or leaf is slot.used for slot in capture.slots):
            continue
        raise PrivacyError(
            "loss",
            expected="no trained tensor besides the parameters of the private module",
            got=f"one of shape {list(leaf.shape)} and dtype {leaf.dtype}",
            remedy="It would be trained without clipping and noise. Put it into the module before "
            "make_private, or freeze it: requires_grad_(False) or torch.no_grad().",
        )


def leaves_of(loss: Tensor) -> list[Tensor]:
    """Return the leaves of the graph that gradients would be accumulated in."""
    leaves: list[Tensor] = []
    stack: list[Any] = [loss.grad_fn]
    met = {loss.grad_fn}
    while stack:
        node = stack.pop()
        if node is None:
            continue
        variable = getattr(node, "variable", None)
        if variable is not None:
            leaves.append(variable)
        for following, _ in node.next_functions:
            if following is not None and following not in met:
                met.add(following)
                stack.append(following)
    return leaves
