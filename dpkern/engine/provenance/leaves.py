"""Check that every trained tensor that a loss reaches belongs to the engine."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from ...base.errors import PrivacyError
from ..parameter import PRIVATE
from .tensor import TrackedTensor

if TYPE_CHECKING:
    from ..capture import Capture

OWN_FUNCTIONS = "backward passes of autograd functions in the loop keep samples apart"
"""The condition of certificates where a loss has such a function."""


_ACCUMULATOR = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
"""The graph's node in front of a trained tensor."""


class Leaves:
    """Search for trained tensors that are not the capture's.

    A leaf that the module makes in its forward pass, such as an input for which checkpointing wants
    a gradient, is an ordinary tensor that the next pass makes anew. A leaf that appears again in a
    later batch is trained.
    """

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self._made: list[tuple[weakref.ref[Tensor], int]] = []
        """Leaves that a pass made, with the number of its batch."""

    def check(
        self, loss: Tensor, outputs: Collection[Any], assume: Callable[[str], None], *, whole: bool
    ) -> None:
        """Refuse a loss that would train something without clipping and noise.

        Args:
            loss: root of the backward pass.
            outputs: graph nodes at which the module's own part begins.
            assume: called with a condition of the certificate.
            whole: whether the module's own part is searched as well.

        Raises:
            PrivacyError: a leaf that requires a gradient and is neither the engine's nor made anew.
        """
        for node in (
            () if not whole and leads_only_to(outputs, loss) else nodes_of(loss.grad_fn, outputs)
        ):
            if type(node) is _ACCUMULATOR:
                self._check_leaf(node.variable)
            elif isinstance(node, BackwardCFunction):
                assume(OWN_FUNCTIONS)
        for node in nodes_of(loss.grad_fn) if whole else ():
            if type(node) is _ACCUMULATOR:
                self._check_leaf(node.variable)

    def _check_leaf(self, leaf: Tensor) -> None:
        if not self._is_foreign(leaf):
            return
        raise PrivacyError(
            "loss",
            expected="no trained tensor besides the parameters of the private module",
            got=f"one of shape {list(leaf.shape)} and dtype {leaf.dtype}",
            remedy="Put it into the module before make_private, or freeze it with "
            "requires_grad_(False): it would be trained without clipping and noise. A generator is "
            "trained on fakes alone, in engine.public().",
        )

    def _is_foreign(self, leaf: Tensor) -> bool:
        capture = self.capture
        if leaf is capture.anchor or type(leaf) is TrackedTensor or type(leaf) in PRIVATE:
            return False
        if any(leaf is slot.parameter or leaf is slot.used for slot in capture.slots):
            return False
        if isinstance(leaf, nn.Parameter):
            return not any(leaf is own for own in capture.module.parameters())
        batch = capture.batch or 0
        made_by_the_pass = bool(batch and leaf.dim() and leaf.shape[0] % batch == 0)
        now = capture.batch_number
        self._made = [(made, number) for made, number in self._made if made() is not None]
        if not made_by_the_pass or any(m() is leaf and n != now for m, n in self._made):
            return True
        self._made.append((weakref.ref(leaf), now))
        return False


def leads_only_to(outputs: Collection[Any], loss: Tensor) -> bool:
    """Whether the graph is a short chain of torch's own nodes that ends at one of the outputs.

    Most losses are such chains. For all others the caller walks the graph.
    """
    node: Any = loss.grad_fn
    for _ in range(_CHAIN):
        if node in outputs:
            return node is not None
        if node is None or isinstance(node, BackwardCFunction):
            return False
        following = node.next_functions
        if len(following) != 1:
            return False
        node = following[0][0]
    return False


_CHAIN = 8


def nodes_of(root: Any, stop: Collection[Any] = ()) -> Iterator[Any]:
    """Yield the nodes of a graph, from its root on, without passing through those in ``stop``."""
    stack: list[Any] = [root]
    met = {None, *stop}
    while stack:
        node = stack.pop()
        if node in met:
            continue
        met.add(node)
        yield node
        stack += [following for following, _ in node.next_functions]
